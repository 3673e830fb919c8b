"""Small experts for the tests of the grouped matmul, with every awkward weight in them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ddtree_jax.pallas.expert_weights import Int4, Records, down_records, gate_up_records

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 6, 256, 128


def published(rng, experts=EXPERTS, hidden=HIDDEN, width=WIDTH, layers=LAYERS) -> list[Int4]:
    """gate, up, down: all nibbles from -8 to 7, whole words of either, groups of scale zero."""

    def weight(out, inner):
        words = rng.integers(0, 2**32, (layers, experts, out, inner // 8), np.uint32)
        words[:, :, 0], words[:, :, 1] = 0, 2**32 - 1  # a row of -8, a row of 7
        scales = (rng.uniform(0.5, 1.5, (layers, experts, out, inner // 32)) / 80).astype(
            ml_dtypes.bfloat16
        )
        scales[:, :, 2:40:3, 0] = 0
        return Int4(jnp.asarray(words.view(np.int32)), jnp.asarray(scales))

    return [weight(width, hidden), weight(width, hidden), weight(hidden, width)]


def records(gate: Int4, up: Int4, down: Int4) -> list[Records]:
    both = gate_up_records(gate, up)
    return [Records(both, "gate"), Records(both, "up"), Records(down_records(down), "down")]


def rows(rng, m: int, hidden=HIDDEN):
    return jnp.asarray(rng.normal(size=(m, hidden)), jnp.bfloat16)


def shares(rng, ids) -> np.ndarray:
    return rng.uniform(0.1, 1, ids.shape).astype(np.float32)


def counted(*counts: int) -> np.ndarray:
    """[sum / 2, 2]: expert e chosen counts[e] times, in a shuffled order."""
    ids = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(sum(counts)).permutation(ids).reshape(-1, 2)


def routings(experts=EXPERTS) -> dict[str, np.ndarray]:
    """ids [11, 2] by name, so that one program runs them; id `experts` is a padding row's."""
    rng = np.random.default_rng(5)
    uniform = np.stack([rng.permutation(experts)[:2] for _ in range(11)])
    few = np.arange(22).reshape(11, 2)
    return {
        "uniform": uniform,
        "one pair": np.where(few == 5, 2, experts),
        "one expert for all": np.full((11, 2), 3),
        "odd counts": counted(1, 0, 7, 9, 0, 5),
        "only the last expert": np.where(few < 3, experts - 1, experts),
        "padding": np.where(rng.random((11, 1)) < 0.4, experts, uniform),
        "all padding": np.full((11, 2), experts),
    }
