"""The training forward against the model's own pieces; quantisation; resuming."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.model.attention import causal_attention
from ddtree_jax.model.kimi import Kimi, merge_kimi
from ddtree_jax.pallas.expert_matmul import expert_mlp_reference
from ddtree_jax.pallas.expert_weights import dequantize
from ddtree_jax.train import forward, store, target
from ddtree_jax.train.nano import TINY
from ddtree_jax.train.optimizer import Optimizer, orthogonal
from ddtree_jax.train.pace import Pace
from ddtree_jax.train.params import initialise, leaves
from ddtree_jax.train.windows import Streams

CONFIG = TINY.trained
RECIPE = target.Recipe(
    optimizer=Optimizer(warmup=2), batch=2, length=32, long_length=64, chunk=2, longest_repeat=6,
    long_share=0.0, joint_anchors=3, dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def masters():
    return initialise(Kimi, CONFIG, 0)


@pytest.fixture(scope="module")
def streams():
    ids = np.random.default_rng(0).integers(0, 2048, (2, 500)).astype(np.uint16)
    return Streams(jnp.asarray(ids[0]), jnp.asarray(ids[1]))


def sequence_attention(length):
    """Each sequence of flattened rows on its own, by the model's plain attention."""

    def attend(mla, x, positions, layer):
        nope, rope, latents = mla.project(x, positions)
        keys, values = mla.expand(latents)
        parts = [
            causal_attention(*(a[s : s + length] for a in args), mla.config.softmax_scale)
            for args in [(jnp.concatenate([nope, rope], -1), keys, values)]
            for s in range(0, x.shape[0], length)
        ]
        return mla.o_proj(jnp.concatenate(parts).reshape(x.shape[0], -1)), latents

    return attend


@pytest.mark.parametrize("attention", ["xla", "plain"])
def test_training_forward_equals_the_model(masters, attention):
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, CONFIG.vocab_size)
    taps = (0, 2)
    run = partial(forward.run, CONFIG, implementation=attention, taps=taps)
    ours = jax.jit(run)(masters, tokens)

    @jax.jit
    def plain(weights, tokens):
        model = merge_kimi(CONFIG, leaves(weights), jnp.float32)
        positions = jnp.tile(jnp.arange(16, dtype=jnp.int32), 2)
        return model(
            tokens.reshape(-1), positions, jnp.ones(32, bool), sequence_attention(16), taps,
            expert_mlp_reference,
        )  # fmt: skip

    for got, want in zip(ours, plain(masters, tokens), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_embedding_gradient_is_the_scatter():
    weight = jax.random.normal(jax.random.key(0), (8, 4))
    tokens = jnp.array([1, 7, 1, 0, 1], jnp.int32)
    grad = jax.random.normal(jax.random.key(1), (5, 4))
    (ours,) = jax.vjp(lambda w: forward.embed(w, tokens), weight)[1](grad)
    (want,) = jax.vjp(lambda w: w[tokens], weight)[1](grad)
    np.testing.assert_allclose(ours, want, rtol=1e-6, atol=1e-6)


def test_head_gradients():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, weight, grad = (
        jax.random.normal(k, s) for k, s in zip(keys, ((2, 5, 8), (6, 8), (2, 5, 6)), strict=True)
    )
    ours = jax.vjp(forward.head, hidden, weight)[1](grad)
    want = jax.vjp(lambda h, w: h @ w.T, hidden, weight)[1](grad)
    for got, expected in zip(ours, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_fake_quantisation_is_the_published_format(masters):
    weight = masters["experts/gate"].at[0, 0, 0, :32].set(0.0)
    values, scales = forward.quantize(weight)
    published = dequantize(forward.pack(values), scales, jnp.float32)
    fake = forward.fake_quantize(weight)
    assert (fake == published).all()
    exact = dequantize(forward.pack(values), scales, jnp.bfloat16)
    assert (fake.astype(jnp.bfloat16) == exact).all()
    again, _ = forward.quantize(published)
    assert (again == values).all()
    gradient = jax.grad(lambda w: (forward.fake_quantize(w) * weight).sum())(weight)
    assert (gradient == weight).all()


def test_export_round_trip(masters, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 100_000)
    weights = store.published(masters)
    paths = store.export(tmp_path, "t", weights)
    assert len(paths) > 1
    again = store.read_export(tmp_path, "t")
    assert again.keys() == weights.keys()
    assert all((again[n] == w).all() and again[n].dtype == w.dtype for n, w in weights.items())
    merge_kimi(TINY.target, leaves(again), jnp.bfloat16)  # the names are the module's


def test_balance_lifts_idle_experts(masters):
    load = jnp.array([[0, 4, 2, 2, 2, 2]] * CONFIG.num_moe_layers)
    out = target.balance(CONFIG, masters, load, 0.1)
    bias = out["layers/1/mlp/gate/e_score_correction_bias"]
    np.testing.assert_allclose(bias, [0.1, -0.1, 0, 0, 0, 0], atol=1e-7)


def test_muon_makes_matrices_orthogonal():
    keys = jax.random.split(jax.random.key(0), 2)
    updates = {
        "tall": jax.random.normal(keys[0], (3, 64, 32)),
        "wide": jax.random.normal(keys[1], (32, 64)),
    }
    for name, out in orthogonal(updates).items():
        assert out.shape == updates[name].shape
        singular = np.linalg.svd(np.asarray(out), compute_uv=False)
        assert singular.min() > 0.5 and singular.max() < 1.3
        overlap = (out * updates[name]).sum()
        assert overlap > 0


def test_schedule():
    rate = Optimizer(peak=1.0, warmup=10, decay_share=0.5).rate
    assert rate(0, 100) == pytest.approx(0.1)
    assert rate(49, 100) == 1.0
    assert rate(75, 100) == pytest.approx(0.5)


@pytest.mark.slow
def test_stopped_and_resumed_equals_straight(streams, tmp_path):
    def pace(stop=None):
        return Pace(seconds=1e9, started=0.0, stop_after=stop, steps=10)

    class Stopping(Pace):
        def must_stop(self, needed):
            return len(self._times) >= 2

    for folder in ("straight", "parts"):
        (tmp_path / folder).mkdir()
    assert target.train(TINY, RECIPE, streams, tmp_path / "straight", pace())
    stopping = Stopping(seconds=1e9, started=0.0, steps=10)
    assert not target.train(TINY, RECIPE, streams, tmp_path / "parts", stopping)
    assert target.train(TINY, RECIPE, streams, tmp_path / "parts", pace())
    for stem in (store.TARGET, store.DRAFTER):
        straight, parts = (store.read_export(tmp_path / f, stem) for f in ("straight", "parts"))
        assert all((straight[n] == parts[n]).all() for n in straight)


def test_a_bad_gradient_changes_nothing(masters):
    optimizer = Optimizer()
    grads = {n: jnp.full_like(v, jnp.nan) for n, v in masters.items()}
    moments = optimizer.init(masters)
    out, moments, _ = optimizer.update(masters, grads, moments, jnp.int32(5), jnp.int32(10))
    assert all((out[n] == v).all() for n, v in masters.items())
    assert all(jnp.isfinite(m).all() for m in jax.tree.leaves(moments))


def test_bits_per_byte_counts_every_token(masters):
    ids = np.append(np.arange(30, dtype=np.uint16), 2049)
    out = target.bits_per_byte(CONFIG, masters, [(ids, 90)] * 3, "xla", length=16, batch=2)
    assert out["tokens"] == 93 and out["bytes"] == 270
    assert out["bits_per_byte"] == pytest.approx(
        out["nats_per_token"] * 93 / np.log(2) / 270, rel=1e-6
    )
    assert 6 < out["nats_per_token"] < 10


def test_shape_follows_the_curriculum():
    recipe = replace(RECIPE, chunk=2, long_share=0.2)
    assert recipe.shape(7, 10) == (2, 32)
    assert recipe.shape(8, 10) == (1, 64)
