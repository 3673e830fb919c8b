"""Pictures of draft trees and of acceptance, for notebooks: `ddtree-jax[notebooks]`.

matplotlib is imported when a picture is drawn, not with the package.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from ddtree_jax.config import Speculation
from ddtree_jax.generate import Completion, Method, Model
from ddtree_jax.state import DecodeState
from ddtree_jax.step import inspect
from ddtree_jax.tokenizer import Tokenizer
from ddtree_jax.tree import Tree, visibility

_ACCEPTED, _DRAFTED, _LINE = "#d5efdc", "#f4f4f2", "#b8b8b2"
_GREEN, _INK = "#1a7f45", "#333333"
_ROOM = 12  # characters of a token shown
_COLUMN, _ROW = 1.55, 0.42  # inches of a depth, of a leaf


def draw_tree(
    tree: Tree,
    request: int = 0,
    tokenizer: Tokenizer | None = None,
    path: Sequence[int] | None = None,
    axis=None,
    matrix: bool = False,
):
    """Draw one request's draft tree from left to right: tokens, and their paths' probabilities.

    A node shows its token (its id without a `tokenizer`) and the probability that the drafter gives
    the path to it. `path` are the accepted nodes, root first, drawn green. `matrix` adds the
    visibility matrix on the right: row i sees column j. Returns the figure.
    """
    plt = _pyplot()
    size = int(tree.size[request])
    parent, depth, token = (
        np.asarray(a)[request, :size] for a in (tree.parent, tree.depth, tree.tokens)
    )
    score = np.asarray(tree.score)[request, :size]
    height = _leaf_rows(parent)
    rows, columns = height.max(initial=0) + 1, depth.max(initial=0) + 1
    accepted = set() if path is None else {int(node) for node in path}
    if axis is None:
        figure, axes = plt.subplots(
            ncols=1 + matrix, squeeze=False, layout="constrained",
            figsize=(columns * _COLUMN + 0.3 + matrix * 4, max(rows * _ROW, 4 * matrix) + 0.5),
            width_ratios=[columns * _COLUMN, 4][: 1 + matrix],
        )  # fmt: skip
        axis = axes[0, 0]
        if matrix:
            _draw_visibility(axes[0, 1], tree, request, size, accepted)
    elif matrix:
        raise ValueError("matrix=True: needs a figure of its own, leave axis=None")

    for node in range(1, size):
        up, both = parent[node], {node, int(parent[node])} <= accepted
        axis.plot(
            *_branch((depth[up] + 0.8, height[up]), (depth[node], height[node])),
            color=_GREEN if both else _LINE, linewidth=2.0 if both else 1.0, zorder=1,
        )  # fmt: skip
    for node in range(size):
        on = node in accepted
        box = plt.matplotlib.patches.FancyBboxPatch(
            (depth[node], height[node] - 0.32), 0.8, 0.64,
            boxstyle="round,pad=0,rounding_size=0.12", mutation_aspect=0.5, zorder=2,
            facecolor=_ACCEPTED if on else _DRAFTED, edgecolor=_GREEN if on else _LINE,
        )  # fmt: skip
        axis.add_patch(box)
        label = partial(axis.text, y=height[node], va="center_baseline", zorder=3)
        label(
            depth[node] + 0.04, s=_label(token[node], tokenizer), ha="left", fontsize=8,
            family=_FONTS, color=_INK, fontweight="bold" if on else "normal",
        )  # fmt: skip
        note = _probability(score[node]) if node else "root"
        label(depth[node] + 0.77, s=note, ha="right", fontsize=6.5, color="#777772")
    axis.set_xlim(-0.1, columns - 0.1)
    axis.set_ylim(rows - 0.4, -0.6)
    axis.set_axis_off()
    return axis.figure


def draw_acceptance(completions: Mapping[str, Completion] | Sequence[Completion], axis=None):
    """Draw how often passes committed a drafted token at each depth; one line a completion.

    A mapping's keys are the lines' names; autoregression drafts nothing and is left out. Returns
    the figure.
    """
    if axis is None:
        axis = _pyplot().subplots(figsize=(5, 3), layout="constrained")[1]
    named = completions if isinstance(completions, Mapping) else dict(enumerate(completions, 1))
    for name, done in named.items():
        if done.accept_by_depth:
            label = f"{name}: {done.accept_length:.2f} tokens a pass"
            depths = range(1, len(done.accept_by_depth) + 1)
            axis.plot(depths, done.accept_by_depth, marker="o", markersize=4, label=label)
    axis.set(xlabel="depth", ylabel="share of passes that reached it", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(frameon=False, fontsize=8)
    return axis.figure


_FONTS = ["DejaVu Sans Mono", "monospace"]


def _pyplot():
    try:
        import matplotlib.patches
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'ddtree-jax[notebooks]'"
        ) from error
    return plt


def _leaf_rows(parent: np.ndarray) -> np.ndarray:
    """Heights without overlap: leaves on rows of their own, parents beside their first child."""
    children: list[list[int]] = [[] for _ in parent]
    for node in range(1, len(parent)):
        children[parent[node]].append(node)
    height, free = np.zeros(len(parent)), 0

    def place(node: int) -> None:
        nonlocal free
        height[node] = free
        for child in children[node]:
            place(child)
        if not children[node]:
            free += 1

    if len(parent):
        place(0)
    return height
