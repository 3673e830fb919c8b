"""Train kimi-nano and its drafter: python -m ddtree_jax.train.run --stage all --data D --workdir W

Stages: pilot (speed and first losses of both optimisers, a checkpoint round trip), target, polish
(less repetition), eval, sample, drafter, all (the last five). A stage that was stopped goes on
when called again.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from ddtree_jax.train import drafter, forward, nano, polish, sample, store, target
from ddtree_jax.train.data import load_heldout, load_tokens
from ddtree_jax.train.optimizer import Optimizer
from ddtree_jax.train.pace import Pace
from ddtree_jax.train.windows import Streams

RESUME = "resume me: the same command goes on from the checkpoint"
SHORT = sample.Group("short", batch=4096, low=64, high=192, length=1024, share=0.75)
LONG = sample.Group("long", batch=1024, low=1536, high=1536, length=2048, share=0.25)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    stages = ("pilot", "target", "polish", "eval", "sample", "drafter", "all")
    add("--stage", choices=stages, default="all")
    add("--data", type=Path, default=Path(".data"))
    add("--workdir", type=Path, required=True)
    add("--source", type=Path, help="folder of the exported target and samples; default: workdir")
    add("--init", type=Path, help="folder of an exported target to train on from, without moments")
    add("--seconds", type=float, default=600, help="of the target's training, or of the one stage")
    add("--sample-seconds", type=float, default=90, help="with --stage all")
    add("--drafter-seconds", type=float, default=300, help="with --stage all")
    add("--stop-after", type=float, help="save and leave when this process is so old")
    add("--steps", type=int, help="fix the number of steps instead of --seconds")
    add("--sample-batches", type=int, help="fix the batches of each group instead of seconds")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--lr", type=float, help="peak; default 4e-3 (target), 3e-3 (drafter)")
    add("--warmup", type=int)
    add("--batch", type=int, help="windows of 2048 in a step of the target")
    add("--anchors", type=int)
    add("--rounds", type=int, help="of the polish")
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true", help="tiny models, float32, for a test on a CPU")
    return parser.parse_args(argv)


class Setup:
    """Recipes and data of one call."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.started = args, time.monotonic()
        self.scale = nano.TINY if args.tiny else nano.NANO
        gpu = jax.default_backend() == "gpu"
        common = {
            "attention": forward.default_attention() if not args.tiny or gpu else "xla",
            "dtype": "bfloat16" if gpu else "float32",
        }
        change = {"matrices": args.optimizer}
        if args.warmup:
            change["warmup"] = args.warmup
        if args.lr:
            change["peak"] = args.lr
        self.target = target.Recipe(seed=args.seed, optimizer=Optimizer(**change), **common)
        self.drafter = drafter.Recipe(seed=args.seed + 1, **common)
        self.drafter = replace(
            self.drafter, optimizer=replace(self.drafter.optimizer, **change),
            anchors=args.anchors or self.drafter.anchors,
        )  # fmt: skip
        self.polish = polish.Recipe(seed=args.seed + 2, **common)
        if args.rounds:
            self.polish = replace(self.polish, rounds=args.rounds)
        self.groups = [SHORT, LONG]
        if args.batch:
            self.target = replace(self.target, batch=args.batch)
        if args.tiny:
            self._shrink()
        self.source = args.source or args.workdir
        self._streams = None

    def _shrink(self):
        self.target = replace(
            self.target, batch=4, length=64, long_length=128, chunk=2, longest_repeat=10
        )
        self.polish = replace(
            self.polish, real=(2, 256), said=4, rounds=1, steps=4, chunk=2,
            group=replace(polish.GROUP, batch=8, low=8, high=16, length=160, segment=160),
        )  # fmt: skip
        self.drafter = replace(self.drafter, rows=256, anchors=4, chunk=2, held=4, least=4)
        self.groups = [
            replace(SHORT, batch=8, low=8, high=16, length=64, segment=32),
            replace(LONG, batch=8, low=64, high=64, length=96, segment=32),
        ]

    @property
    def streams(self) -> Streams:
        if self._streams is None:
            begun = time.monotonic()
            tokens = load_tokens(self.args.data)
            self._streams = Streams(jnp.asarray(tokens["code"]), jnp.asarray(tokens["prose"]))
            sizes = {k: len(v) for k, v in tokens.items()}
            print(f"token streams {sizes} in {time.monotonic() - begun:.1f} s", flush=True)
        return self._streams

    def pace(self, seconds: float, reserve: float, slower: float = 1.0) -> Pace:
        a = self.args
        begun = time.monotonic()
        stop = None if a.stop_after is None else a.stop_after - (begun - self.started)
        return Pace(seconds, begun, stop, a.steps, reserve, slower)


def pilot(setup: Setup) -> bool:
    """Half of `seconds` for each optimiser: speed, loss curve, a checkpoint written and read."""
    workdir, each = setup.args.workdir, setup.args.seconds / 2
    for matrices in ("muon", "adamw"):
        recipe = replace(setup.target, optimizer=replace(setup.target.optimizer, matrices=matrices))
        log = store.Log(workdir / f"pilot_{matrices}.jsonl")
        state = target.initial(setup.scale.trained, recipe)
        step_fn = target.chunk_step(setup.scale.trained, recipe, (recipe.batch, recipe.length))
        limit, step = None, 0
        while limit is None or time.monotonic() < limit:
            begun = time.monotonic()
            state, metrics = step_fn(state, setup.streams)
            jax.block_until_ready(metrics)
            step += recipe.chunk
            took = time.monotonic() - begun
            log.write(
                repeated=True,
                optimizer=matrices,
                **target.summary(recipe, step, None, took, metrics),
            )
            limit = limit or time.monotonic() + each  # after the compilation
        begun = time.monotonic()
        checkpoints = store.Checkpoints(workdir / f"pilot_{matrices}")
        checkpoints.save(step, state)
        again = checkpoints.restore(state)
        checkpoints.close()
        same = all(
            bool((a == b).all())
            for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True)
        )
        paths = store.export(workdir, "pilot", store.published(state["params"]))
        log.write(
            checkpoint_equal=same, checkpoint_seconds=time.monotonic() - begun,
            export_bytes=[p.stat().st_size for p in paths], memory=memory(),
        )  # fmt: skip
    return True


def memory() -> dict:
    stats = jax.devices()[0].memory_stats() or {}
    return {k: stats[k] / 2**30 for k in ("peak_bytes_in_use", "bytes_limit") if k in stats}


def train_target(setup: Setup, seconds: float) -> bool:
    # Steps of the long windows cost about a sixth more.
    pace = setup.pace(seconds, reserve=60, slower=1 + setup.target.long_share / 6)
    init = setup.args.init
    start = None if init is None else drafter.load_target(init, jnp.float32)
    a = setup.args
    return target.train(setup.scale, setup.target, setup.streams, a.workdir, pace, start)


def polish_target(setup: Setup) -> bool:
    a = setup.args
    return polish.polish(setup.scale, setup.polish, setup.streams, a.workdir, setup.source)


def evaluate(setup: Setup) -> bool:
    recipe = setup.target
    weights = drafter.load_target(setup.source, jnp.dtype(recipe.dtype))
    results = {}
    for name, documents in load_heldout(setup.args.data).items():
        results[name] = target.bits_per_byte(
            setup.scale.trained, weights, documents, recipe.attention,
            length=recipe.length, batch=recipe.batch,
        )  # fmt: skip
        print(name, json.dumps(results[name]), flush=True)
    (setup.args.workdir / "target_eval.json").write_text(json.dumps(results, indent=1))
    return True


def sample_texts(setup: Setup, seconds: float) -> bool:
    a, recipe = setup.args, setup.target
    if a.stage == "all" and all(
        (setup.source / f"sample_{g.name}.npz").exists() for g in setup.groups[-1:]
    ):
        print("samples are there already")
        return True
    weights = drafter.load_target(setup.source, jnp.dtype(recipe.dtype))
    sample.run(
        setup.scale.trained, weights, setup.groups, setup.streams, a.workdir, seconds,
        recipe.attention, recipe.code_share, a.seed, a.sample_batches,
    )  # fmt: skip
    return True


def train_drafter(setup: Setup, seconds: float) -> bool:
    pace = setup.pace(seconds, reserve=25)
    return drafter.train(setup.scale, setup.drafter, setup.args.workdir, setup.source, pace)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    args.workdir.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(args.workdir.absolute() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1)
    setup = Setup(args)
    print(f"{jax.devices()} {setup.target}", flush=True)
    whole = args.stage == "all"
    stages = {
        "pilot": lambda: pilot(setup),
        "target": lambda: train_target(setup, args.seconds),
        "polish": lambda: polish_target(setup),
        "eval": lambda: evaluate(setup),
        "sample": lambda: sample_texts(setup, args.sample_seconds if whole else args.seconds),
        "drafter": lambda: train_drafter(setup, args.drafter_seconds if whole else args.seconds),
    }
    chosen = [s for s in stages if s != "pilot"] if whole else [args.stage]
    for name in chosen:
        begun = time.monotonic()
        done = stages[name]()
        print(f"{name}: {time.monotonic() - begun:.1f} s, memory {memory()}", flush=True)
        if not done:
            print(RESUME, flush=True)
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
