"""`largest` against XLA's own top_k: values, places, ties and all."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ddtree_jax.select import largest, largest_values


@pytest.mark.parametrize("kind", ("plain", "tied", "infinite", "constant", "sorted"))
@pytest.mark.parametrize("v, count", [(1, 1), (9, 3), (1000, 4), (4099, 16), (20_000, 128)])
def test_equals_top_k(kind, v, count):
    rng = np.random.default_rng(v + count)
    x = rng.normal(size=(2, 3, v)).astype(np.float32)
    if kind == "tied":
        x = np.round(x)
    elif kind == "infinite":
        x[rng.random(x.shape) < 0.999] = -np.inf
    elif kind == "constant":
        x[:] = 1
    elif kind == "sorted":
        x = np.sort(x)
    values, places = largest(jnp.asarray(x), count)
    wanted, at = lax.top_k(jnp.asarray(x), count)
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(places, at)
    np.testing.assert_array_equal(largest_values(jnp.asarray(x), count), wanted)


@pytest.mark.parametrize("count", (0, 6))
def test_refuses_impossible_counts(count):
    with pytest.raises(ValueError, match=f"count={count}: must be from 1 to the row's 5 entries"):
        largest(jnp.zeros((1, 5)), count)
