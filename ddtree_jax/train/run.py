"""Train kimi-nano and its drafter: python -m ddtree_jax.train.run --stage all --data D --workdir W

Stages: pilot (speed and first losses of both optimisers, a checkpoint round trip), target, polish
(less repetition), eval, sample, drafter, all (the last five; those that are done are skipped). A
stage that was stopped goes on when called again.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from ddtree_jax.train import blocks, drafter, forward, joint, nano, polish, sample, store, target
from ddtree_jax.train.data import load_heldout, load_tokens
from ddtree_jax.train.optimizer import Optimizer
from ddtree_jax.train.pace import Pace
from ddtree_jax.train.windows import Streams

RESUME = "resume me: the same command goes on from the checkpoint"
SHORT = sample.Group("short", batch=8192, low=32, high=192, length=512, segment=256, share=0.75)
LONG = sample.Group("long", batch=1024, low=1536, high=1536, length=1792, share=0.25)
# Seconds without which a stage is not begun, with --stage all and --stop-after.
LEAST = {"target": 0, "polish": 100, "eval": 45, "sample": 60, "drafter": 90}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    stages = ("pilot", "target", "polish", "eval", "sample", "drafter", "all")
    add("--stage", choices=stages, default="all")
    add("--data", type=Path, default=Path(".data"))
    add("--workdir", type=Path, required=True)
    add("--source", type=Path, help="folder of exports and samples that the workdir lacks")
    add("--init", type=Path, help="folder of an exported target to train on from, without moments")
    add("--seconds", type=float, default=480, help="of the target's training, or of the one stage")
    add("--sample-seconds", type=float, default=90, help="with --stage all")
    add("--drafter-seconds", type=float, default=300, help="with --stage all")
    add("--stop-after", type=float, help="save and leave when this process is so old")
    add("--steps", type=int, help="fix the number of steps instead of --seconds")
    add("--sample-batches", type=int, help="fix the batches of each group instead of seconds")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--lr", type=float, help="peak; default 4e-3 (target), 1.5e-3 (drafter)")
    add("--warmup", type=int)
    add("--batch", type=int, help="windows of 2048 in a step of the target")
    add("--joint-weight", type=float, help="of the drafter's loss beside the target's; 0: off")
    add("--joint-anchors", type=int, help="blocks in a window of 2048")
    add("--block-attention", choices=("plain", "cudnn"), help="default: cudnn where it works")
    add("--rounds", type=int, help="of the polish")
    add("--round-steps", type=int, help="steps of a round of the polish")
    add("--strength", type=float, help="of the polish's unlikelihood")
    add("--again", type=float, help="weight of a second occurrence in it")
    add("--distil", type=float, help="of the target's own texts in the polish")
    add("--anchors", type=int, help="of the drafter's stage: blocks in a text")
    add("--real-share", type=float, help="of training text in the drafter's stage")
    add("--fresh", action="store_true", help="begin the drafter's stage from scratch")
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true", help="tiny models, float32, for a test on a CPU")
    return parser.parse_args(argv)


def changes(**values) -> dict:
    """Those that were given."""
    return {name: value for name, value in values.items() if value is not None}


class Setup:
    """Recipes and data of one call."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.started = args, time.monotonic()
        self.scale = nano.TINY if args.tiny else nano.NANO
        gpu = jax.default_backend() == "gpu"
        block = args.block_attention or blocks.default_attention(self.scale.drafter)
        common = {
            "attention": forward.default_attention(),
            "block_attention": block,
            "dtype": "bfloat16" if gpu else "float32",
        }
        rates = changes(peak=args.lr, warmup=args.warmup) | {"matrices": args.optimizer}
        both = changes(joint_weight=args.joint_weight, joint_anchors=args.joint_anchors)
        given = changes(batch=args.batch)
        self.target = target.Recipe(
            seed=args.seed, optimizer=Optimizer(**rates), **common, **both, **given
        )
        given = changes(anchors=args.anchors, real_share=args.real_share)
        self.drafter = drafter.Recipe(seed=args.seed + 1, **common, **given)
        self.drafter = replace(self.drafter, optimizer=replace(self.drafter.optimizer, **rates))
        given = changes(
            rounds=args.rounds, steps=args.round_steps, strength=args.strength, again=args.again,
            distil=args.distil,
        )  # fmt: skip
        self.polish = polish.Recipe(seed=args.seed + 2, **common, **both, **given)
        self.groups = [SHORT, LONG]
        if args.tiny:
            self._shrink()
        self._streams = None

    def _shrink(self):
        self.target = replace(
            self.target, batch=4, length=64, long_length=128, chunk=2, longest_repeat=10,
            joint_anchors=4,
        )  # fmt: skip
        self.polish = replace(
            self.polish, real=(2, 256), said=(4, 2), steps=4, chunk=2, joint_anchors=4,
            groups=(
                replace(polish.SHORT, batch=8, low=8, high=16, length=161, segment=161),
                replace(polish.LONG, batch=4, low=64, high=64, length=193, segment=193),
            ),
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

    def folder(self, pattern: str) -> Path:
        """The workdir, or --source where only that has files of `pattern`."""
        a = self.args
        here = a.source is None or any(a.workdir.glob(pattern))
        return a.workdir if here else a.source

    @property
    def left(self) -> float:
        """Seconds until --stop-after."""
        return (self.args.stop_after or float("inf")) - (time.monotonic() - self.started)

    def exported(self, dtype) -> dict:
        return store.load_target(self.folder(f"{store.TARGET}*.safetensors"), dtype)

    def exported_drafter(self) -> dict | None:
        folder = self.folder(pattern := f"{store.DRAFTER}*.safetensors")
        return joint.load(folder) if any(folder.glob(pattern)) else None

    def pace(self, seconds: float, reserve: float, slower: float = 1.0) -> Pace:
        a = self.args
        begun = time.monotonic()
        stop = None if a.stop_after is None else self.left
        return Pace(seconds, begun, stop, a.steps, reserve, slower)


def pilot(setup: Setup) -> bool:
    """Half of `seconds` for each optimiser: speed, loss curve, a checkpoint written and read."""
    workdir, each, scale = setup.args.workdir, setup.args.seconds / 2, setup.scale
    for matrices in ("muon", "adamw"):
        recipe = replace(setup.target, optimizer=replace(setup.target.optimizer, matrices=matrices))
        log = store.Log(workdir / f"pilot_{matrices}.jsonl")
        state = target.initial(scale, recipe)
        step_fn = target.chunk_step(scale, recipe, (recipe.batch, recipe.length))
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
    # Steps of the long windows cost a quarter more.
    pace = setup.pace(seconds, reserve=60, slower=1 + setup.target.long_share / 4)
    init = setup.args.init
    start = None if init is None else store.load_target(init, jnp.float32)
    a = setup.args
    return target.train(setup.scale, setup.target, setup.streams, a.workdir, pace, start)


def polish_target(setup: Setup) -> bool:
    params, draft = setup.exported(jnp.float32), setup.exported_drafter()
    workdir, pace = setup.args.workdir, setup.pace(0, 0)
    return polish.polish(setup.scale, setup.polish, setup.streams, workdir, pace, params, draft)


def evaluate(setup: Setup) -> bool:
    recipe = setup.target
    weights = setup.exported(jnp.dtype(recipe.dtype))
    results = {}
    for name, documents in load_heldout(setup.args.data).items():
        results[name] = target.bits_per_byte(
            setup.scale.trained, weights, documents, recipe.attention,
            length=recipe.length, batch=recipe.batch, most=1 << (12 if setup.args.tiny else 22),
        )  # fmt: skip
        print(name, json.dumps(results[name]), flush=True)
    (setup.args.workdir / "target_eval.json").write_text(json.dumps(results, indent=1))
    return True


def sample_texts(setup: Setup, seconds: float) -> bool:
    a, recipe = setup.args, setup.target
    weights = setup.exported(jnp.dtype(recipe.dtype))
    sample.run(
        setup.scale.trained, weights, setup.groups, setup.streams, a.workdir,
        min(seconds, setup.left - 30),
        recipe.attention, recipe.code_share, a.seed, a.sample_batches,
    )  # fmt: skip
    return True


def train_drafter(setup: Setup, seconds: float) -> bool:
    a, recipe = setup.args, setup.drafter
    weights = setup.exported(jnp.dtype(recipe.dtype))
    start = None if a.fresh else setup.exported_drafter()
    return drafter.train(
        setup.scale, recipe, setup.streams, a.workdir, setup.folder("sample_*.npz"),
        setup.pace(seconds, reserve=25), weights, start,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    args.workdir.mkdir(parents=True, exist_ok=True)
    store.unpack_cache(args.workdir, args.source or args.workdir)
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
    for name in LEAST if whole else [args.stage]:
        if whole and setup.folder(f"{name}.done").joinpath(f"{name}.done").exists():
            print(f"{name}: done already", flush=True)
            continue
        begun = time.monotonic()
        done = (not whole or setup.left > LEAST[name]) and stages[name]()
        print(f"{name}: {time.monotonic() - begun:.1f} s, memory {memory()}", flush=True)
        if not done:
            print(RESUME, flush=True)
            break
        (args.workdir / f"{name}.done").touch()
    store.pack_cache(args.workdir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
