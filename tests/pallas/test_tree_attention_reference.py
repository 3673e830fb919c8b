"""The attention reference against a softmax in float64, row by row, on poisoned memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import make_case, slow_softmax

from ddtree_jax.pallas.tree_attention_reference import tree_attention_reference

D, V, HEADS = 24, 16, 2
CASES = [  # sizes of the requests' trees, prefixes, width the words allow, tree kind
    ((1,), (0,), 1, "chain"), ((2, 7), (1, 63), 8, "random"), ((8, 8, 8), (64, 65, 0), 9, "random"),
    ((9,), (130,), 9, "star"), ((17, 1, 5), (3, 64, 200), 17, "random"), ((31, 33), (65, 1), 33,
    "random"), ((64, 3), (0, 63), 64, "chain"), ((65,), (64,), 65, "random"),
    ((128, 1), (10, 127), 128, "random"), ((40,), (7,), 40, "best-first"), ((9,), (64,), 9, "comb"),
]  # fmt: skip


@pytest.mark.parametrize("sizes,prefixes,width,kind", CASES)
def test_against_a_slow_softmax(sizes, prefixes, width, kind):
    rng = np.random.default_rng([*sizes, *prefixes])
    case = make_case(rng, sizes, prefixes, width, kind, HEADS, D)
    attend = jax.jit(tree_attention_reference, static_argnames=("scale", "value_size", "max_rows"))
    out, lse = attend(*case.arguments, scale=0.3, value_size=V)
    expected = slow_softmax(case, 0.3, V)
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=3e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=3e-5)


def test_rows_past_a_size_give_zero():
    """Two more rows than nodes in every tree, and two of nobody: they hold NaN and no bits."""
    rng = np.random.default_rng(0)
    case = make_case(rng, (2, 2), (5, 64), 4, "chain", HEADS, D, padding=2, spare=2)
    out, lse = tree_attention_reference(
        *map(jnp.asarray, case.arguments), scale=0.3, value_size=V, max_rows=4
    )
    expected = slow_softmax(case, 0.3, V)
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=3e-5)
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=3e-5)


def test_refuses_more_rows_than_the_words_name():
    case = make_case(np.random.default_rng(0), (4,), (5,), 4, "chain", HEADS, D)
    with pytest.raises(ValueError, match="max_rows=5"):
        tree_attention_reference(*case.arguments, scale=1.0, value_size=V, max_rows=5)
