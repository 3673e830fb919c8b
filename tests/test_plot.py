"""Pictures: what they show, that nothing overlaps, and the one-step look they are drawn from."""

import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from lossless import prompts_of
from matplotlib import pyplot as plt
from tiny import tiny_model

import ddtree_jax as dd
from ddtree_jax.generate import Completion
from ddtree_jax.plot import draw_acceptance, draw_tree, next_tree
from ddtree_jax.tree import build, candidates

matplotlib.use("Agg")
TEXTS = [b"def", b" x", b"\n", b"\xe4\xbd", "你".encode(), b"$a_1$", b"interpretation", b"'"]


class Eight:
    """A tokenizer of eight awkward tokens."""

    def decode_bytes(self, ids):
        return b"".join(TEXTS[i] for i in ids)


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def some_tree(budget, seed=0, vocab=8, sharp=1.0):
    logits = sharp * jax.random.normal(jax.random.key(seed), (2, 7, vocab))
    log_q, tokens = candidates(jax.nn.log_softmax(logits), min(4, vocab))
    return build(jnp.zeros(2, jnp.int32), log_q, tokens, budget, jnp.array([True, True]))


def boxes(axis):
    renderer = axis.figure.canvas.get_renderer()
    return [patch.get_window_extent(renderer) for patch in axis.patches]


@pytest.mark.parametrize("sharp", [0.3, 2.0, 9.0])
@pytest.mark.parametrize("budget", [0, 1, 8, 32])
def test_nodes_do_not_overlap(budget, sharp):
    """No box meets another, and every text stays inside its box."""
    tree = some_tree(budget, sharp=sharp)
    figure = draw_tree(tree, 1, Eight(), matrix=True)
    figure.canvas.draw()
    axis = figure.axes[0]
    found = boxes(axis)
    assert len(found) == budget + 1
    assert not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])
    extents = [text.get_window_extent() for text in axis.texts]
    for box, name, note in zip(found, extents[::2], extents[1::2], strict=True):
        assert box.x0 < name.x0 < name.x1 < note.x0 < note.x1 < box.x1
        assert box.y0 < name.y0 and name.y1 < box.y1


def test_labels_and_probabilities():
    tree = some_tree(8)
    axis = draw_tree(tree, 0, Eight()).axes[0]
    texts = [text.get_text() for text in axis.texts]
    shown = ["def", "' x'", r"'\n'", r"b'\xe4\xbd'", r"'\u4f60'", "$a_1$", "interpreta…", "'"]
    assert texts[::2] == [shown[int(token)] for token in tree.tokens[0]]
    assert texts[1] == "root"
    for text, score in zip(texts[3::2], tree.score[0, 1:], strict=True):
        assert float(text.strip("<%")) == pytest.approx(100 * np.exp(float(score)), abs=0.51)
    ids = [text.get_text() for text in draw_tree(tree, 0).axes[0].texts]
    assert ids[::2] == [str(token) for token in tree.tokens[0].tolist()]


def test_the_accepted_path_is_green():
    tree = some_tree(8)
    child = int(np.flatnonzero(np.asarray(tree.parent[0]) == 0)[-1])
    axis = draw_tree(tree, 0, path=[0, child]).axes[0]
    colours = [patch.get_edgecolor() for patch in axis.patches]
    assert {i for i, c in enumerate(colours) if c != colours[0]} == set(range(1, 9)) - {child}


def test_an_axis_of_ones_own():
    figure, axis = plt.subplots()
    assert draw_tree(some_tree(8), axis=axis) is figure
    assert len(axis.patches) == 9
    with pytest.raises(ValueError, match="matrix=True"):
        draw_tree(some_tree(8), axis=axis, matrix=True)


def test_acceptance():
    def done(rates, tau):
        return Completion("", [], 1, "length", 9, tau, rates, [], 0, 1.0)

    named = {"ddtree": done([0.9, 0.5], 2.4), "autoregressive": done([], 1.0)}
    axis = draw_acceptance(named).axes[0]
    assert [line.get_label() for line in axis.lines] == ["ddtree: 2.40 tokens a pass"]
    assert axis.lines[0].get_ydata().tolist() == [0.9, 0.5]
    assert len(draw_acceptance([named["ddtree"]] * 2).axes[0].lines) == 2


def test_next_tree_is_what_the_step_commits():
    model, prompts = tiny_model(), prompts_of((5, 9))
    speculation = dd.Speculation(20, 8)
    step = jax.jit(dd.ddtree_step, static_argnames="speculation")
    state = dd.prefill(model, prompts, dd.Sampling(1.0, seed=7), max_new_tokens=30)
    for _ in range(4):
        tree, paths = next_tree(model, state, speculation)
        after = step(model.weights, state, speculation=speculation)
        for request, path in enumerate(paths):
            assert path[0] == 0
            drafted = tree.tokens[request, jnp.array(path[1:], int)].tolist()
            start, end = int(state.count[request]), int(after.count[request])
            assert after.tokens[request, start : end - 1].tolist() == drafted
        state = after


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for draw in (lambda: draw_tree(some_tree(1)), lambda: draw_acceptance([])):
        with pytest.raises(ImportError, match=r"pip install 'ddtree-jax\[notebooks\]'"):
            draw()
