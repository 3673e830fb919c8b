"""Many decodings of nano against its own law, for all acceptance rules."""

import jax
import numpy as np
import pytest

import ddtree_jax as dd
from benchmarks.chi_square import p_values, pearson

pytestmark = pytest.mark.usefixtures("optimized")
TEXT = "This option sets the"  # where many words may follow
CASES = [("ddtree", "coupled"), ("ddtree", "rejection"), ("dflash", "rejection")]


def run(method, acceptance, samples, seed, dtype, batch):
    model = dd.load("kimi-nano", dtype=dtype)
    prompt = model.tokenizer.encode(TEXT)
    speculation = dd.Speculation(4, 4, 4, acceptance)
    seeds = np.arange(samples) + seed * samples
    law = dd.Sampling(0.9, top_p=0.98)
    return p_values(model, prompt, method, speculation, law, seeds, 3, batch)


def test_pearson_knows_right_from_wrong():
    rng = np.random.default_rng(0)
    p = np.array([0.5, 0.3, 0.15, 0.05, 0, *[1e-5] * 3])
    p /= p.sum()
    assert pearson(rng.multinomial(20_000, p), p) > 0.001
    assert pearson(rng.multinomial(20_000, [0.52, 0.28, 0.15, 0.05, 0, 0, 0, 0]), p) < 0.001
    assert pearson(np.array([10, 5, 2, 1, 1, 0, 0, 0]), p) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method, acceptance", CASES)
def test_follows_the_law(method, acceptance):
    found = run(method, acceptance, 2048, 0, "float32", 256)
    assert min(found) > 0.001, found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method, acceptance", CASES)
def test_follows_the_law_on_a_gpu(method, acceptance, seed, dtype):
    assert jax.default_backend() == "gpu"
    found = run(method, acceptance, 20_000, seed, dtype, 2000)
    assert min(found) > 0.001, found
