"""The command line: `python -m ddtree_jax generate | demo`."""

import argparse
import json
import os
import re
import sys
import traceback

import jax
from rich.console import Console
from rich.table import Table

from ddtree_jax import processes
from ddtree_jax._version import __version__
from ddtree_jax.checks import require
from ddtree_jax.config import ACCEPTANCE, Sampling, Speculation
from ddtree_jax.generate import METHODS, Completion, generate, stream
from ddtree_jax.loading import Model, load
from ddtree_jax.parallel import SPLIT
from ddtree_jax.prefill import check_request
from ddtree_jax.sharding import make_mesh

DEMO_PROMPTS = (
    "def read_lines(path):\n    with open(path) as f:\n",
    'class Node:\n    """A node of a tree."""\n\n    def __init__(self, value, parent=None):\n',
    "Usage\n=====\n\nTo read a file, call",
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status. Bad input ends with one line on stderr.

    One of many processes does not return from an error: it ends (`processes.leave`).
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError as error:  # the reader of our output went away
        sys.stderr.close()
        return processes.leave(error, 1)
    except (ValueError, OSError) as error:
        print(f"ddtree_jax: error: {error}", file=sys.stderr)
        return processes.leave(error, 2)
    except BaseException as error:
        if processes.count() > 1:
            traceback.print_exc()
            processes.leave(error, 1)
        raise


class _Parser(argparse.ArgumentParser):
    """Errors are one line, as those of bad values are, and name --help instead of repeating it."""

    def error(self, message: str):
        self.exit(2, f"ddtree_jax: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddtree_jax", description="Decode Kimi K2.6 with DFlash drafts verified as trees."
    )
    parser.add_argument("--version", action="version", version=f"ddtree_jax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="complete prompts")
    command.add_argument("prompts", nargs="+", metavar="PROMPT")
    command.add_argument("--method", choices=METHODS, default="ddtree")
    command.add_argument("--budget", type=int, default=8, help="tree nodes besides the root (8)")
    command.add_argument("--top-k", type=int, default=4, help="candidates a position (4)")
    command.add_argument(
        "--block-size", type=int, default=None, metavar="F", help="drafter rows (the drafter's)"
    )
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--sample-top-k", type=int, default=0, metavar="K", help="sample from the K likeliest (all)"
    )
    command.add_argument("--top-p", type=float, default=1.0, help="nucleus to sample from (1)")
    command.add_argument("--min-p", type=float, default=0.0, help="of the likeliest's (0)")
    command.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before it; repeatable",
    )
    command.add_argument("--min-new-tokens", type=int, default=0)
    command.add_argument(
        "--acceptance",
        choices=ACCEPTANCE,
        default="coupled",
        help="rule for drafts, if any (coupled)",
    )
    command.add_argument("--max-new-tokens", type=int, default=128)
    _model_options(command)
    command.add_argument(
        "--json",
        action="store_true",
        help="decode all prompts as one batch; one JSON object a prompt, in order, and nothing "
        "else, on stdout; tokens_per_second is of the prompt in the batch (without --json: one "
        "prompt after another, text as it comes)",
    )
    command.set_defaults(run=_generate)

    command = commands.add_parser("demo", help="three prompts, all methods side by side")
    command.add_argument("--max-new-tokens", type=int, default=96)
    _model_options(command)
    command.set_defaults(run=_demo)
    return parser


def _model_options(command) -> None:
    command.add_argument("--model", default="kimi-nano", metavar="PATH", help="name or folder")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    command.add_argument("--devices", type=int, default=None, metavar="N", help="to split over (1)")
    command.add_argument(
        "--plan", choices=sorted(SPLIT), default="expert", help="how to split (expert)"
    )
    command.add_argument("--distributed", action="store_true", help="join the cluster's processes")
    command.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, else found")
    command.add_argument("--processes", type=int, metavar="P", help="how many there are")
    command.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")


def _load(options) -> Model:
    where = options.coordinator, options.processes, options.process
    distributed = options.distributed or any(w is not None for w in where)
    if distributed:
        require(options.devices is not None, "devices", None, "given: those of all processes")
        _keep_output_apart()
        processes.start(*where)
        own = {"process", "run", "model"}  # a copy may lie elsewhere
        processes.check_agreement(**{k: v for k, v in vars(options).items() if k not in own})
    mesh = None if options.devices is None else make_mesh(options.devices, processes.count())
    if distributed and jax.process_index() > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # process 0 speaks for all
    return load(options.model, mesh=mesh, plan=options.plan, dtype=options.dtype)


def _keep_output_apart() -> None:
    """Libraries that join processes write lines of their own to descriptor 1: from now on these go
    where errors go, and only Python's output to the real one."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(output, "w")  # to the end of the process


def _generate(options) -> int:
    speculation = Speculation(options.budget, options.top_k, options.block_size, options.acceptance)
    try:
        sampling = Sampling(
            options.temperature,
            options.sample_top_k,
            options.top_p,
            options.min_p,
            options.seed,
            stop=options.stop,
            min_new_tokens=options.min_new_tokens,
        )
    except ValueError as error:  # here --top-k is the tree's
        raise ValueError(re.sub("^top_k=", "sample-top-k=", str(error))) from None
    model = _load(options)
    settings = (options.method, speculation, sampling, options.max_new_tokens)
    check_request(model, options.prompts, sampling, options.max_new_tokens)  # before any output
    if options.json:
        results = generate(model, options.prompts, *settings)
        for done in results:
            print(json.dumps(_as_json(done, options.method, options.budget)), flush=True)
    else:
        results = [_show(model, prompt, settings) for prompt in options.prompts]
    failed = any(done.finish_reason == "error" for done in results)
    if failed:
        print("ddtree_jax: error: the target produced NaN or infinite logits", file=sys.stderr)
    return int(failed)


def _show(model: Model, prompt: str, settings: tuple) -> Completion:
    """Print a prompt, its text as it comes, and a table of how it came."""
    done: list[Completion] = []
    pieces = stream(model, prompt, *settings, done=done)  # refuses before any output
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print("\n")
    Console().print(_summary([(settings[0], done[0])]))
    return done[0]


def _as_json(done: Completion, method: str, budget: int) -> dict:
    return {
        "text": done.text,
        "tokens": done.tokens,
        "prompt_tokens": done.prompt_tokens,
        "finish_reason": done.finish_reason,
        "method": method,
        "budget": _budget(method, budget, done),
        "verify_passes": done.verify_passes,
        "accept_length": round(done.accept_length, 4),
        "accept_by_depth": [round(a, 4) for a in done.accept_by_depth],
        "tokens_per_second": round(done.tokens_per_second, 2),
    }


def _budget(method: str, budget: int, done: Completion) -> int:
    """Drafted rows a pass: the tree's budget, the chain's horizon, none."""
    return {"ddtree": budget, "dflash": len(done.accept_by_depth), "autoregressive": 0}[method]


def _summary(results: list[tuple[str, Completion]]) -> Table:
    """At most 80 columns wide up to a horizon of 7; acceptance in percent."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in (
        "method", "verify\npasses", "tokens", "accept\nlength", "acceptance\nby depth, %",
        "tokens/s",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, done in results:
        table.add_row(
            method,
            str(done.verify_passes),
            str(len(done.tokens)),
            f"{done.accept_length:.2f}",
            " ".join(f"{100 * a:.0f}" for a in done.accept_by_depth) or "-",
            f"{done.tokens_per_second:.1f}",
        )
    return table


def _demo(options) -> int:
    model = _load(options)
    console, equal = Console(), True
    outputs = {
        method: generate(model, DEMO_PROMPTS, method, max_new_tokens=options.max_new_tokens)
        for method in reversed(METHODS)
    }
    for index, prompt in enumerate(DEMO_PROMPTS):
        results = [(method, done[index]) for method, done in outputs.items()]
        same = len({tuple(done.tokens) for _, done in results}) == 1
        equal &= same
        console.rule()
        print(prompt + results[-1][1].text, flush=True)
        console.rule(style="dim")
        console.print(_summary(results))
        verdict = "the three texts are equal" if same else "THE TEXTS DIFFER"
        console.print(f"{verdict}\n", style="green" if same else "bold red")
    _explain(console, model, equal)
    return 0 if equal else 1


def _explain(console: Console, model: Model, equal: bool) -> None:
    verdict = "All methods wrote the same text" if equal else "Some texts differ"
    console.print(
        f"{verdict}, greedily, with {model.name}. Accept length: tokens committed per verify pass, "
        "the bonus counted, the token that prefill samples not. Acceptance by depth: of 100 "
        "passes, those that committed a drafted token that deep. Tokens/s: of one prompt in the "
        "batch of three; CPU figures say nothing about a GPU."
    )
