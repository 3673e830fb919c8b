"""Work list and sorted rows in one launch, in the interpreter, against their definition."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from pallas.experts import rows, shares

from ddtree_jax.pallas.expert_sort import sort_rows
from ddtree_jax.pallas.expert_work import work_list


@pytest.mark.parametrize(
    ("m", "k", "experts", "first", "hidden"),
    [(9, 2, 5, 0, 256), (44, 3, 6, 2, 512), (1, 8, 20, 0, 1024)],
)
def test_slots_rows_and_biases(m, k, experts, first, hidden, capsys):
    rng = np.random.default_rng(m)
    ids = rng.integers(0, experts + 2, (m, k))
    ids = np.where(rng.random(ids.shape) < 0.5, min(3, experts - 1), ids)
    x, share = rows(rng, m, hidden), shares(rng, ids)
    given = jnp.asarray(ids, jnp.int32), jnp.asarray(share), jnp.asarray([first], jnp.int32)
    params = plgpu.InterpretGPUParams(detect_races=True)
    work, made = sort_rows(x, *given, experts, 2, params)
    assert "RACE DETECTED" not in capsys.readouterr().out
    flat, wide = ids.reshape(-1) - first, np.asarray(x.astype(jnp.float32))
    values = np.asarray(made.values.astype(jnp.float32))
    found, sizes = [], []
    for slot in range(int(work.used[0])):
        expert, start, count, _ = map(int, work.slots[slot])
        assert start == 8 * slot and 1 <= count <= 8
        sizes.append((expert, count))
        for row in range(start, start + count):
            pair = int(work.pair[row])
            found.append(pair)
            assert flat[pair] == expert and float(work.share[row]) == share.reshape(-1)[pair]
            assert (values[row] == wide[pair // k]).all()
            sums = -136 * wide[pair // k].reshape(-1, 4, 32).sum(axis=-1)
            bias = made.bias[slot, :, :, row - start]
            np.testing.assert_allclose(bias, sums, rtol=1e-4, atol=1e-3)
    assert sorted(found) == [i for i, e in enumerate(flat) if 0 <= e < experts]
    assert all((flags == 0).all() for flags in work.flags)
    local = np.where((flat >= 0) & (flat < experts), flat, experts).reshape(m, k)
    other = work_list(jnp.asarray(local), given[1], experts, 8)
    used = int(other.used[0])
    assert sorted(sizes) == sorted((int(s[0]), int(s[2])) for s in other.slots[:used])
