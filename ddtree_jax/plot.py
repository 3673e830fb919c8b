"""Pictures of draft trees and of acceptance, for notebooks: `ddtree-jax[notebooks]`.

matplotlib is imported when a picture is drawn, not with the package.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ddtree_jax.config import Speculation
from ddtree_jax.generate import Completion, Method
from ddtree_jax.loading import Model
from ddtree_jax.state import DecodeState
from ddtree_jax.step import draft_and_walk
from ddtree_jax.tokenizer import Tokenizer
from ddtree_jax.tree import Tree, visibility

_ACCEPTED, _DRAFTED, _LINE = "#d5efdc", "#f4f4f2", "#b8b8b2"
_GREEN, _INK, _FAINT = "#1a7f45", "#333333", "#777772"
_FONT = "DejaVu Sans Mono"  # comes with matplotlib
_ROOM = 11  # characters of a token shown
_COLUMN, _ROW, _MATRIX = 1.6, 0.36, 4.0  # inches of a depth, a leaf, the matrix
_BOX = 0.84  # of a column


def next_tree(
    model: Model, state: DecodeState, speculation: Speculation = Speculation()
) -> tuple[Tree, list[list[int]]]:
    """The tree that the next `ddtree_step` will verify, and each request's accepted nodes.

    The state stays as it is.
    """
    settings = Method("ddtree", speculation, model.weights).speculation
    look = jax.jit(draft_and_walk, static_argnums=(2, 3))
    tree, _, path, length, _ = look(model.weights, state, settings, settings.block_size)
    pairs = zip(np.asarray(path).tolist(), np.asarray(length).tolist(), strict=True)
    return tree, [nodes[:count] for nodes, count in pairs]


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
    the path to it (of perturbed scores, where the request samples). `path` are the accepted nodes,
    root first, drawn green. `matrix` adds node numbers, and on the right the visibility matrix: row
    i sees column j. Returns the figure.
    """
    plt, box = _pyplot()
    size = int(tree.size[request])
    parent, depth, token, score = (
        np.asarray(column)[request, :size]
        for column in (tree.parent, tree.depth, tree.tokens, tree.score)
    )
    height = _heights(parent)
    rows, columns = height.max(initial=0) + 1, depth.max(initial=0) + 1
    accepted = set() if path is None else {int(node) for node in path}
    shown = rows
    if axis is None:
        widths = [columns * _COLUMN, _MATRIX][: 1 + matrix]
        tall = max(rows * _ROW + 0.2, _MATRIX * matrix)
        figure, axes = plt.subplots(
            ncols=len(widths), figsize=(sum(widths) + 0.2, tall), width_ratios=widths,
            squeeze=False, layout="constrained",
        )  # fmt: skip
        axis, shown = axes[0, 0], tall / _ROW  # rows keep their height beside a tall matrix
        if matrix:
            _draw_visibility(axes[0, 1], tree, request, size, accepted)
    elif matrix:
        raise ValueError("matrix=True: needs a figure of its own, leave axis=None")

    for node in range(1, size):
        up, on = parent[node], {node, int(parent[node])} <= accepted
        start, end = depth[up] + _BOX, depth[node]
        bend = (start + end) / 2
        axis.plot(
            [start, bend, bend, end], [height[up], height[up], height[node], height[node]],
            color=_GREEN if on else _LINE, linewidth=1.8 if on else 0.9, zorder=2 if on else 1,
            solid_joinstyle="round",
        )  # fmt: skip
    for node in range(size):
        x, y, on = depth[node], height[node], node in accepted
        style = {"boxstyle": "round,pad=0,rounding_size=0.06", "mutation_aspect": _COLUMN / _ROW}
        face, edge = (_ACCEPTED, _GREEN) if on else (_DRAFTED, _LINE)
        axis.add_patch(
            box((x, y - 0.34), _BOX, 0.68, **style, facecolor=face, edgecolor=edge, zorder=3)
        )
        text = {"va": "center_baseline", "zorder": 4, "parse_math": False, "family": _FONT}
        name = _label(int(token[node]), tokenizer)
        bold = "bold" if on else "normal"
        axis.text(x + 0.03, y, name, fontsize=8, color=_INK, fontweight=bold, **text)
        note = _percent(float(np.exp(score[node]))) if node else "root"
        if matrix:
            note = f"#{node} {note}"
        axis.text(x + _BOX - 0.03, y, note, fontsize=6.5, color=_FAINT, ha="right", **text)
    axis.set(xlim=(-0.05, columns - 1 + _BOX + 0.05), ylim=(shown - 0.5, -0.5))
    axis.set_axis_off()
    return axis.figure


def draw_acceptance(completions: Mapping[str, Completion] | Sequence[Completion], axis=None):
    """Draw how often passes committed a drafted token at each depth; one line a completion.

    A mapping's keys are the lines' names; autoregression drafts nothing and is left out. Returns
    the figure.
    """
    if axis is None:
        axis = _pyplot()[0].subplots(figsize=(5, 3), layout="constrained")[1]
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


def _pyplot():
    """matplotlib's pyplot, and its rounded box."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.patches import FancyBboxPatch
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'ddtree-jax[notebooks]'"
        ) from error
    return plt, FancyBboxPatch


def _draw_visibility(axis, tree: Tree, request: int, size: int, accepted: set[int]) -> None:
    """Which row sees which: the accepted rows' cells green, the others' dark."""
    sees = np.asarray(visibility(tree.ancestors))[request, :size, :size]
    colours = {False: (0.30, 0.30, 0.30), True: (0.10, 0.50, 0.27)}
    image = np.full((size, size, 3), 0.96)
    for row, column in np.argwhere(sees):
        image[row, column] = colours[{row, column} <= accepted]
    axis.imshow(image, interpolation="none")
    axis.set_anchor("N")
    ticks = range(0, size, max(1, size // 8))
    axis.set(xticks=ticks, yticks=ticks, xlabel="sees node", ylabel="node")
    axis.set_xticks(np.arange(size + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(size + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=0.6)
    axis.tick_params(which="both", length=0, labelsize=7)
    axis.spines[:].set_visible(False)


def _label(token: int, tokenizer: Tokenizer | None) -> str:
    """A token as short text; with quotes and escapes where it would not be seen as it is."""
    if tokenizer is None:
        return str(token)
    raw = tokenizer.decode_bytes([token])
    try:
        text = raw.decode()
    except UnicodeDecodeError:  # part of a character
        text = str(raw)
    if any(c >= "\u2e80" for c in text):  # the font ends before
        text = ascii(text)
    elif not text.isprintable() or text != text.strip():
        text = repr(text)
    return text if len(text) <= _ROOM else text[: _ROOM - 1] + "…"


def _percent(share: float) -> str:
    if share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def _heights(parent: np.ndarray) -> np.ndarray:
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
