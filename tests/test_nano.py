"""The bundled model in float32: every method writes what plain decoding writes, but for near-ties.

Rows of a float32 matmul differ by about 1e-6 between batch shapes. A difference is allowed if the
target, teacher-forced, had its two best (perturbed) scores within 1e-4 there; such differences are
counted, at most one in 10,000 tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import ddtree_jax as dd
from benchmarks.prompts import MIXES, load
from ddtree_jax.model.attention import expanded_attention
from ddtree_jax.sampling import Law, keyed_noise, log_law, perturbed

pytestmark = pytest.mark.usefixtures("optimized")
GAP = 1e-4
SETTINGS = [
    ("dflash", dd.Speculation()),
    ("ddtree", dd.Speculation(8, 4)),
    ("ddtree", dd.Speculation(16, 8)),
    ("ddtree", dd.Speculation(33, 8, 4)),
]


@pytest.fixture(scope="module")
def model():
    return dd.load("kimi-nano", dtype="float32")


@jax.jit
def next_scores(weights, tokens, length, law):
    """Perturbed scores of the token after the first `length` of `tokens` [t], all in one pass."""
    target, config = weights.target_module(), weights.config
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)

    rows = target(tokens, positions, positions < length, expanded_attention)
    logits = target.lm_head(rows.hidden[length - 1])[None]
    noise = keyed_noise(law, length[None, None], config.vocab_size)
    return perturbed(log_law(logits, law), noise[:, 0], law)[0]


def gap_at_difference(model, prompt, plain, other, sampling) -> float | None:
    """The target's top-two gap where two completions part; None if they do not."""
    if plain == other:
        return None
    shared = next(i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b)
    ids = model.tokenizer.encode(prompt) + plain[:shared]
    padded = np.zeros(-(-len(ids) // 256) * 256, np.int32)
    padded[: len(ids)] = ids
    scores = next_scores(model.weights, padded, jnp.int32(len(ids)), Law.of([sampling]))
    best = np.sort(np.asarray(scores))[-2:]
    return float(best[1] - best[0])


def compare(model, texts, temperature, new, settings, placed=None):
    """Tokens compared and how many completions part at a near-tie; any other difference fails.

    `placed`: the model on many devices, which then decodes by `settings`."""
    samplings = [dd.Sampling(temperature, seed=seed) for seed in range(len(texts))]
    plain = dd.generate(model, texts, "autoregressive", sampling=samplings, max_new_tokens=new)
    compared = ties = 0
    for method, speculation in settings:
        drafted = dd.generate(placed or model, texts, method, speculation, samplings, new)
        for text, sampling, a, b in zip(texts, samplings, plain, drafted, strict=True):
            gap = gap_at_difference(model, text, a.tokens, b.tokens, sampling)
            assert gap is None or gap < GAP, (method, speculation, text[:60], gap)
            compared, ties = compared + len(a.tokens), ties + (gap is not None)
            assert b.verify_passes <= a.verify_passes
    return compared, ties


def test_methods_agree(model):
    texts = [load(mix, 2)[1] for mix in ("code_short", "prose_short")]
    compared, ties = compare(model, texts, 0.0, 64, SETTINGS[1:2])
    assert compared >= 60 and ties == 0
    assert compare(model, texts, 0.7, 64, SETTINGS[1:2])[1] == 0


@pytest.mark.slow
def test_trees_commit_more_than_chains(model):
    texts = load("code_short", 4)
    passes = {"dflash": 0, "ddtree": 0}
    for pair in (texts[:2], texts[2:]):
        for method in passes:
            done = dd.generate(model, pair, method, dd.Speculation(8, 4), max_new_tokens=64)
            passes[method] += sum(c.verify_passes for c in done)
    assert passes["ddtree"] < passes["dflash"]


@pytest.mark.slow
def test_a_request_alone_or_in_a_batch(model):
    texts = load("code_short", 2)
    together = dd.generate(model, texts, max_new_tokens=64)
    for text, done in zip(texts, together, strict=True):
        alone = dd.generate(model, text, max_new_tokens=64)[0]
        gap = gap_at_difference(model, text, alone.tokens, done.tokens, dd.Sampling())
        assert gap is None or gap < GAP


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan,count", [("expert", 8), ("tensor", 4), ("data", 2)])
def test_many_devices_agree(model, plan, count):
    """With one device, whose sums have another order."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("devices",))
    placed = dd.load("kimi-nano", dtype="float32", mesh=mesh, plan=plan)
    texts = load("code_short", 3) + load("prose_short", 2)
    settings = [("autoregressive", dd.Speculation()), *SETTINGS[:2]]
    for temperature in (0.0, 1.0):
        compared, ties = compare(model, texts, temperature, 64, settings, placed)
        assert compared >= 300 and ties <= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_near_ties_are_rare(model):
    compared = ties = 0
    for temperature in (0.0, 1.0):
        for mix in MIXES:
            count = 9 if mix.endswith("short") else 2
            found = compare(model, load(mix, count), temperature, 64, SETTINGS)
            compared, ties = compared + found[0], ties + found[1]
    assert compared > 10_000 and ties * 10_000 <= compared
