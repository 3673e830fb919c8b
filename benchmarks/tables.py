"""The tables of README.md and docs/, made from the result files.

    python -m benchmarks.tables [--check README.md | --write README.md]

A table stands in a page between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.results_file import RESULTS

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

LAW_NAMES = {"t0.6": "T = 0.6", "t1": "T = 1", "t1_top_p": "T = 1, top-p 0.95"}  # of sampling.json


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", type=Path, metavar="PAGE", help="fail if a table is stale")
    action.add_argument("--write", type=Path, metavar="PAGE", help="rewrite the page's tables")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(arguments)
    page = args.check or args.write
    try:
        if page is None:
            for name in TABLES:
                print(f"<!-- table: {name} -->\n{render(name, args.results)}<!-- end -->\n")
            return 0
        stale = rewrite(page, args.results, write=args.write is not None)
    except (ValueError, FileNotFoundError) as error:
        print(f"tables: error: {error}", file=sys.stderr)
        return 2
    if args.write or not stale:
        return 0
    print(f"{page} is stale: {', '.join(stale)}; --write renews it", file=sys.stderr)
    return 1


def rewrite(page: Path, results: Path, write: bool) -> list[str]:
    """Names of the page's tables that differ from the result files; `write` puts them right."""
    text, stale = page.read_text(), []
    starts = text.count("<!-- table:")
    if not starts or starts != len(BLOCK.findall(text)):
        raise ValueError(f"{page}: {starts} tables begin, {len(BLOCK.findall(text))} are whole")

    def fresh(match: re.Match) -> str:
        start, name, old, end = match.groups()
        new = render(name, results)
        if new != old:
            stale.append(name)
        return start + new + end

    text = BLOCK.sub(fresh, text)
    if write and stale:
        page.write_text(text)
    return stale


def render(name: str, results: Path) -> str:
    """One table in Markdown, newline-terminated."""
    if name not in TABLES:
        raise ValueError(f"table {name!r}: must be one of {', '.join(TABLES)}")
    file, make = TABLES[name]
    path = results / f"{file}.json"
    if not path.exists():
        raise FileNotFoundError(f"no {path}: run python -m benchmarks.{file}")
    return make(json.loads(path.read_text()))


def acceptance(result: dict) -> str:
    """Accept lengths of the chain and of trees, short and long prompts together."""
    summary = result["summary"]
    trees = ((7, 4), (8, 4), (16, 8), (32, 8))
    columns = ["chain", *(f"ddtree_b{b}_k{k}" for b, k in trees)]
    rows = [
        [mix, words, *(f"{summary[f'{c}_{name}_{mix}']:.2f}" for c in columns)]
        for mix in ("code", "prose")
        for name, words in (("greedy", "greedy"), ("t1", "T = 1"))
    ]
    return markdown(["mix", "sampling", "chain", *(f"tree {b}/{k}" for b, k in trees)], rows)


def acceptance_grid(result: dict) -> str:
    """Greedy accept length by budget and top-k: the mean of short and long prompts, by mix."""
    cells = {}
    for p in result["points"]:
        if p["method"] == "ddtree" and p["temperature"] == 0:
            key = p["mix"].split("_")[0], p["budget"], p["top_k"]
            cells.setdefault(key, []).append(p["accept_length"])
    mixes, budgets, top_ks = (sorted({key[i] for key in cells}) for i in range(3))
    rows = [
        [mix, str(b), *(f"{sum(c := cells[mix, b, k]) / len(c):.2f}" for k in top_ks)]
        for mix in mixes
        for b in budgets
    ]
    return markdown(["mix", "budget", *(f"top-k {k}" for k in top_ks)], rows)


def sampling(result: dict) -> str:
    """Accept lengths of the acceptance rules under temperature, short and long prompts together."""
    points = [p for p in result["points"] if p["part"] == "rules"]
    chains = {"coupled": "coupled chain", "rejection": "sampled chain"}
    budgets = sorted({p["budget"] for p in points if p["method"] == "ddtree"})

    def mean(kind, law, rule, budget=None):
        here = [
            p for p in points
            if p["mix"].startswith(kind) and (p["law"], p["rule"]) == (law, rule)
            and budget in (None, p["budget"])
        ]  # fmt: skip
        return f"{sum(p['tokens'] for p in here) / sum(p['passes'] for p in here):.2f}"

    rows = [
        [kind, words, rule, mean(kind, law, chain), *(mean(kind, law, rule, b) for b in budgets)]
        for kind in ("code", "prose")
        for law, words in LAW_NAMES.items()
        for rule, chain in chains.items()
    ]
    top_k = next(p["top_k"] for p in points if p["method"] == "ddtree")
    return markdown(["mix", "law", "rule", "chain", *(f"tree {b}/{top_k}" for b in budgets)], rows)


def calibration(result: dict) -> str:
    """Accept lengths by how perturbed scores become node weights."""
    points = result["points"]
    fitted = [v for k, v in result["summary"].items() if k.startswith("scale_depth")]
    names = {
        "scores as they are": "scores as they are (what is served)",
        "fitted by depth": f"scaled by a fitted b ({', '.join(f'{b:g}' for b in fitted)})",
        "without the noise": "without the noise",
    }
    lengths = {(p["variant"], p["budget"]): p["accept_length"] for p in points}
    budgets = sorted({p["budget"] for p in points})
    rows = [[text, *(f"{lengths[name, b]:.2f}" for b in budgets)] for name, text in names.items()]
    heads = ["node weights", *(f"tree {b}/{points[0]['top_k']}" for b in budgets)]
    return markdown(heads, rows)


def sweep(result: dict) -> str:
    """Tokens/s of all requests; in brackets over autoregression's."""
    points, rows = result["points"], []
    methods = dict.fromkeys((p["method"], p["budget"], p["top_k"]) for p in points)
    cases = dict.fromkeys((p["mix"], p["context"], p["temperature"]) for p in points)
    for mix, context, temperature in cases:
        for requests in sorted({p["requests"] for p in points}):
            wanted = (mix, context, temperature, requests)
            cell = {
                (p["method"], p["budget"], p["top_k"]): p["tokens_per_second"]
                for p in points
                if (p["mix"], p["context"], p["temperature"], p["requests"]) == wanted
            }
            if not cell:
                continue
            plain = cell.get(("autoregressive", 0, 1))
            shown = [_speed(cell.get(m), None if m[1] == 0 else plain) for m in methods]
            words = f"T = {temperature:g}" if temperature else "greedy"
            rows.append([f"{mix}, {context}, {words}", str(requests), *shown])
    names = {"autoregressive": "plain", "dflash": "chain"}
    heads = [names.get(m, f"tree {b}/{k}") for m, b, k in methods]
    return markdown(["prompts", "requests", *heads], rows)


def _speed(speed: float | None, plain: float | None) -> str:
    if speed is None:
        return "-"
    return f"{speed:,.0f}" + (f" ({speed / plain:.2f}x)" if plain else "")


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """Words to the left, figures to the right."""
    kinds = [all(r[i][:1].isdigit() or r[i] == "-" for r in rows) for i in range(len(heads))]
    rule = ["---:" if figures else "---" for figures in kinds]
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, rule, *rows))


def experts(result: dict) -> str:
    """The routed layer by rows: time, the time to read the touched experts, and their ratio."""
    rows = []
    for p in sorted(result["points"], key=lambda p: (-p["expert_width"], p["routing"], p["rows"])):
        name = f"{p['expert_width']}, {p['routing']}"
        figures = f"{p['us']:,.0f}", f"{p['limit_us']:,.0f}", f"{p['share']:.2f}"
        rows.append(
            [name, str(p["rows"]), f"{p['distinct_experts']:.0f}", *figures, f"{p['tflops']:.0f}"]
        )
    heads = ["width, routing", "rows", "experts", "us", "us to read them", "share", "TFLOP/s"]
    return markdown(heads, rows)


def attention(result: dict) -> str:
    """Tree attention: microseconds of a call, in brackets the share of its limit."""
    widths = sorted({p["width"] for p in result["points"]})
    cells = {
        (p["heads"], p["requests"], p["context"], p["width"]): f"{p['us']:,.0f} ({p['share']:.2f})"
        for p in result["points"]
    }
    rows = [
        [str(heads), str(requests), f"{context:,}",
         *(cells.get((heads, requests, context, n), "-") for n in widths)]
        for heads, requests, context in sorted({key[:3] for key in cells}, reverse=True)
    ]  # fmt: skip
    return markdown(
        ["heads", "requests", "context", *(f"{n} row{'s' * (n > 1)}" for n in widths)], rows
    )


TABLES = {
    "acceptance": ("acceptance", acceptance),
    "attention": ("tree_attention", attention),
    "acceptance_grid": ("acceptance", acceptance_grid),
    "sampling": ("sampling", sampling),
    "calibration": ("calibration", calibration),
    "experts": ("expert_matmul", experts),
    "sweep": ("sweep", sweep),
}

if __name__ == "__main__":
    sys.exit(main())
