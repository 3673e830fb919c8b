"""Compile the expert kernels for an H200 on a machine without one: registers, spills, launches.

    python -m venv build/cuda && build/cuda/bin/pip install .
    build/cuda/bin/pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc
    build/cuda/bin/python scripts/compile_for_h200.py

XLA compiles for a described card, Mosaic hands each kernel to ptxas, and ptxas says how many
registers it used, what it spilled, and whether it had to serialise wgmma: what a first run on the
card would otherwise find out. Exits with 1 if any shipped configuration spills or serialises.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

_DUMP = tempfile.mkdtemp()  # must exist before a kernel is compiled
os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": _DUMP, "JAX_PLATFORMS": "cpu"}
for _folder in map(Path, sys.path):
    for _tools in _folder.glob("nvidia/cu*/bin"):
        os.environ["PATH"] = f"{_tools}:{os.environ['PATH']}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from ddtree_jax.pallas.expert_config import DENSE, PACKED  # noqa: E402
from ddtree_jax.pallas.expert_matmul import expert_mlp_kernel  # noqa: E402
from ddtree_jax.pallas.expert_weights import Records, records_shape  # noqa: E402

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def compile_layer(m: int, k: int, experts: int, width: int, hidden: int, packed: bool, config):
    """The compiled routed layer of a described H200."""
    card = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    place = SingleDeviceSharding(card.devices[0])

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def weight(part, out, inner):
        if packed:
            shape = (2, experts, *records_shape(part, out, inner))
            return Records(struct(shape, jnp.int32), part)
        return struct((2, experts, out, inner), jnp.bfloat16)

    weights = (
        weight("gate", width, hidden), weight("up", width, hidden), weight("down", hidden, width)
    )  # fmt: skip
    routing = struct((m, k), jnp.int32), struct((m, k), jnp.float32)
    run = jax.jit(lambda x, w, *r: expert_mlp_kernel(x, *w, 1, *r, config=config))
    return run.lower(struct((m, hidden), jnp.bfloat16), weights, *routing).compile()


def launches(compiled) -> int:
    """Kernels of the entry computation: fusions, custom calls, library calls."""
    text = compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    return len(re.findall(r" (?:fusion|custom-call|sort|copy|dot|reduce)\(", entry))


def verdicts() -> list[str]:
    """What ptxas said of the kernels compiled since the last call."""
    said = []
    for path in sorted(Path(_DUMP).glob("*.ptxas"), key=lambda p: int(p.stem.rpartition("_")[2])):
        text = path.read_text()
        registers = re.search(r"Used (\d+) registers", text)[1]
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", text)[:1]))
        serial = ", wgmma serialised" if "instructions are serialized" in text else ""
        said.append(f"{registers} registers, {spilled} bytes spilled{serial}")
        path.unlink()
    return said


def main() -> int:
    bad = 0
    for name, shape in {"kimi": (384, 2048, 7168), "rank": (384, 256, 7168)}.items():
        for packed, table in ((True, PACKED), (False, DENSE)):
            for limit, config in table:
                each = limit if limit < 1e9 else 170
                m = int(each * shape[0]) // 8
                compiled = compile_layer(m, 8, *shape, packed, config)
                kind = f"{name} {'INT4' if packed else 'bf16'}"
                for verdict in verdicts():
                    bad += " 0 bytes" not in verdict or "serialised" in verdict
                    print(kind, config.tiles, verdict)
                print(kind, m, "rows:", launches(compiled), "launches")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
