"""Compile what benchmarks/tree_attention.py measures, for an H200 and without one.

    build/cuda/bin/python scripts/compile_attention.py FOLDER [--only TEXT]

The environment is that of scripts/compile_for_h200.py. Prints registers and spills of every kernel,
as ptxas tells them; benchmarks/ahead.py says how the programs are run.
"""

import argparse
import time
from functools import partial
from pathlib import Path

from compile_for_h200 import H200, verdicts  # first: it sets where ptxas reports to

import jax  # isort: skip
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import ahead
from benchmarks import tree_attention as bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="programs with this in their names")
    args = parser.parse_args()
    card = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    place = SingleDeviceSharding(card.devices[0])

    def on_card(tree):
        described = partial(jax.ShapeDtypeStruct, sharding=place)
        return jax.tree.map(lambda x: described(x.shape, x.dtype), tree)

    def compile_all(point, masks=(True, False)):
        config = bench.BEST.get(point.kind, bench.Config())
        arguments = on_card(jax.eval_shape(partial(bench.inputs, point)))
        planner = bench.planner(point, config)
        plan = on_card(jax.eval_shape(planner, *arguments))
        wanted = [(planner, arguments, bench.name_of("plan", point, config))]
        wanted += [(bench.reference(point), arguments, bench.name_of("reference", point))]
        for masked in masks:
            run = bench.program(point, config, masked)
            wanted += [(run, (plan, *arguments), bench.name_of("calls", point, config, masked))]
        for run, given, name in wanted:
            if args.only in name and not (args.folder / f"{name}.xz").exists():
                start = time.monotonic()
                size = ahead.save(args.folder, name, ahead.build(run, given, name))
                seconds = time.monotonic() - start
                print(f"{name}: {seconds:.0f} s, {size >> 10} KiB", set(verdicts()), flush=True)

    for point in bench.ALL:
        compile_all(point, masks=(True, False) if point == bench.MASK else (True,))


if __name__ == "__main__":
    main()
