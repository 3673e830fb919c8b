"""Where every array of a model and a decode lives on a mesh, and how a program is run over it.

A mesh has one axis. Each dimension of a weight has a logical axis or none, by the weight's name;
a plan (`parallel.SPLIT`) splits some logical axes over the devices. What does not divide is padded
at its end with weights of zeros, which change no result: heads and widths that add nothing,
vocabulary columns that are dropped, experts that no row is sent to.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ddtree_jax.cache import Cache
from ddtree_jax.checkpoint import leaves_by_path
from ddtree_jax.checks import is_int, require, show
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.parallel import ALONE, AXIS, SPLIT, Plan
from ddtree_jax.state import DecodeState, Weights

MOST_DEVICES = 4096  # of a process
_ROWS, _COLUMNS = 0, 1  # of a matrix [out, in]
# The logical axis of a weight's split dimension, by the weight's path. All others are on every
# device: norms, the router, the low-rank projections before heads, the drafter's `fc`.
LOGICAL = (
    (r"(embed_tokens|lm_head)/weight", "vocab", _ROWS),
    (r"self_attn/(q|q_b|k|v)_proj/weight", "heads", _ROWS),
    (r"self_attn/kv_b_(key|value)", "heads", _ROWS),
    (r"self_attn/o_proj/weight", "heads", _COLUMNS),
    (r"(gate|up)_proj/weight", "width", _ROWS),
    (r"down_proj/weight", "width", _COLUMNS),
    (r"experts/[a-z_]+", "experts", 1),
    (r"experts/(gate|up)(_words|_scales)?", "expert_width", 2),
    (r"experts/down(_words|_scales)?", "expert_width", 3),
    (r"experts/gate_up_records", "expert_width", 2),
    (r"experts/down_records", "expert_width", 3),
)  # fmt: skip


def make_mesh(devices: int, processes: int = 1) -> Mesh:
    """A mesh of so many devices over all processes. On a CPU they are made, if jax has not
    started yet."""
    require(is_int(processes) and processes >= 1, "processes", processes, "1 or greater")
    require(is_int(devices), "devices", devices, "an integer")
    ok = devices >= 1 and devices % processes == 0
    wanted = "1 or greater" if processes == 1 else f"a multiple of the {processes} processes"
    require(ok, "devices", devices, wanted)
    # Before a CPU makes them: with too many it hangs.
    few = devices // processes <= MOST_DEVICES
    require(few, "devices", devices, f"at most {MOST_DEVICES} a process")
    try:
        jax.config.update("jax_num_cpu_devices", devices // processes)
    except RuntimeError:
        pass  # jax has started: its devices are what they are
    there = jax.devices()
    if devices > len(there):
        kind = there[0].platform
        raise ValueError(f"devices={devices}: only {len(there)} here (platform {kind!r})")
    if jax.process_count() > 1 and devices < len(there):
        raise ValueError(f"devices={devices}: must be all {len(there)} of the processes")
    return Mesh(np.array(there[:devices]), (AXIS,))


def make_plan(name: str, mesh: Mesh | AbstractMesh | None) -> Plan:
    """A plan over the devices of a mesh (any axes: they are taken in order), or none."""
    ok = isinstance(name, str) and name in SPLIT
    require(ok, "plan", name, f"one of {', '.join(SPLIT)}")
    if mesh is None:
        return ALONE
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh={show(mesh)}: must be a jax.sharding.Mesh")
    if isinstance(mesh, Mesh):
        mesh = Mesh(mesh.devices.reshape(-1), (AXIS,))
    elif tuple(mesh.axis_names) != (AXIS,):
        raise ValueError(f"mesh with axes {mesh.axis_names}: must have the one axis {AXIS!r}")
    return Plan(name, mesh)


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError naming a process that has no device of the mesh."""
    absent = set(range(jax.process_count())) - {d.process_index for d in mesh.devices.flat}
    if absent:
        raise ValueError(
            f"mesh of {mesh.size} devices: none is of process {min(absent)}, and all "
            f"{jax.process_count()} processes must take part"
        )


def check_plan(plan: Plan, config: KimiConfig) -> None:
    """Raise ValueError naming what of the target has fewer parts than the plan has devices."""
    for logical, field in (
        ("heads", "num_attention_heads"),
        ("experts", "n_routed_experts"),
        ("expert_width", "moe_intermediate_size"),
        ("vocab", "vocab_size"),
    ):
        if logical.startswith("expert") and not config.num_moe_layers:
            continue
        parts = _parts(config, logical)
        if plan.splits(logical) and parts < plan.size:
            raise ValueError(
                f"plan={plan.name!r} on {plan.size} devices: {field}={getattr(config, field)} "
                f"gives {parts} parts, fewer than devices"
            )


def _parts(config: KimiConfig | DFlashConfig, logical: str) -> int | None:
    """Into how many pieces a logical axis can be cut; None: element by element."""
    if logical == "vocab":
        return config.vocab_size
    if logical == "heads":  # the drafter's query heads go where the key heads they share are
        target = isinstance(config, KimiConfig)
        return config.num_attention_heads if target else config.num_key_value_heads
    if logical == "experts":
        return config.n_routed_experts
    if logical == "expert_width":
        unit = 128 if config.expert_records else 32 if config.expert_bits else 1
        return config.moe_intermediate_size // unit
    return None


def leaf_layout(
    plan: Plan, config: KimiConfig | DFlashConfig, path: str, shape: tuple[int, ...]
) -> tuple[PartitionSpec, tuple[int, ...]]:
    """How a leaf is split, and its global shape once padded."""
    for pattern, logical, axis in LOGICAL:
        if plan.splits(logical) and re.fullmatch(rf"(.*/)?{pattern}", path):
            parts = _parts(config, logical) or shape[axis]
            padded = -(-parts // plan.size) * plan.size
            shape = (*shape[:axis], shape[axis] // parts * padded, *shape[axis + 1 :])
            return PartitionSpec(*(None,) * axis, AXIS), shape
    return PartitionSpec(), shape


def leaf_layouts(
    plan: Plan, config: KimiConfig | DFlashConfig, dtype
) -> dict[str, tuple[PartitionSpec, jax.ShapeDtypeStruct]]:
    """Spec, padded shape and dtype of every leaf, in order, by path."""
    layouts = {}
    for path, leaf in leaves_by_path(config, dtype).items():
        spec, shape = leaf_layout(plan, config, path, leaf.shape)
        layouts[path] = spec, jax.ShapeDtypeStruct(shape, leaf.dtype)
    return layouts


def leaf_specs(plan: Plan, config: KimiConfig | DFlashConfig, dtype) -> tuple[PartitionSpec, ...]:
    return tuple(spec for spec, _ in leaf_layouts(plan, config, dtype).values())


def weight_bytes(plan: Plan, config: KimiConfig | DFlashConfig, dtype) -> dict[str, int]:
    """Bytes of every leaf on each device, without allocating any."""
    sizes = {}
    for path, (spec, leaf) in leaf_layouts(plan, config, dtype).items():
        share = plan.size if AXIS in spec else 1
        sizes[path] = prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize // share
    return sizes


def placed_leaves(
    plan: Plan, config: KimiConfig | DFlashConfig, dtype
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every leaf as it is once placed; raises ValueError if the plan does not fit the target."""
    if isinstance(config, KimiConfig):
        check_plan(plan, config)
    placed = {}
    for path, (spec, leaf) in leaf_layouts(plan, config, dtype).items():
        sharding = None if plan.mesh is None else NamedSharding(plan.mesh, spec)
        placed[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return placed


def abstract_weights(
    plan: Plan, config: KimiConfig, drafter: DFlashConfig | None, dtype: str
) -> Weights:
    """Weights without values, placed: to lower a program for a model that is not there."""

    def leaves(config):
        return tuple(placed_leaves(plan, config, dtype).values())

    held = None if drafter is None else leaves(drafter)
    return Weights(leaves(config), held, config, drafter, dtype, plan)


def place_weights(weights: Weights, plan: Plan) -> Weights:
    """The weights padded and put where the plan has them; raises ValueError if it cannot."""
    check_plan(plan, weights.config)

    def place(config, leaves):
        placed = []
        layouts = leaf_layouts(plan, config, weights.dtype).values()
        for leaf, (spec, wanted) in zip(leaves, layouts, strict=True):
            whole = np.zeros(wanted.shape, leaf.dtype)
            whole[tuple(slice(n) for n in leaf.shape)] = np.asarray(leaf)
            placed.append(jax.device_put(whole, NamedSharding(plan.mesh, spec)))
        return tuple(placed)

    drafter = weights.drafter
    if drafter is not None:
        drafter = place(weights.drafter_config, drafter)
    return replace(
        weights, target=place(weights.config, weights.target), drafter=drafter, plan=plan
    )


def padded_heads(plan: Plan, config: DFlashConfig) -> int:
    """Key heads of the drafter's cache, over all devices."""
    heads = config.num_key_value_heads
    return -(-heads // plan.size) * plan.size if plan.splits("heads") else heads


def padded_requests(plan: Plan, requests: int) -> int:
    """Requests of a batch over all devices, with those that never start."""
    return -(-requests // plan.size) * plan.size if plan.splits("requests") else requests


def state_specs(plan: Plan, state: DecodeState) -> DecodeState:
    """How a decode state is split: by requests and their pages, or the drafter's cache by heads."""
    requests = plan.splits("requests")
    specs = jax.tree.map(lambda _: PartitionSpec(AXIS) if requests else PartitionSpec(), state)
    pool = PartitionSpec(None, AXIS) if requests else PartitionSpec()
    heads = pool
    if plan.splits("heads"):
        heads = PartitionSpec(None, None, None, AXIS)
    cache = state.cache
    cache = Cache(pool, *(None if c is None else heads for c in (cache.keys, cache.values)))
    return replace(specs, cache=cache)


def place_state(plan: Plan, make: Callable[[], DecodeState]) -> DecodeState:
    """The state that `make` makes, made where the plan has it."""
    if plan.mesh is None:
        return make()
    specs = state_specs(plan, jax.eval_shape(make))
    shardings = jax.tree.map(lambda spec: NamedSharding(plan.mesh, spec), specs)
    return jax.jit(make, out_shardings=shardings)()


def fetch(x: jax.Array) -> np.ndarray:
    """An array's values on this host, whichever hosts hold them; all must ask at once."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def on_mesh(
    run: Callable, weights: Weights, state: DecodeState, *rest, same_rows=False, flag=False
):
    """`run(weights, state, *rest)` on every device with its own parts, as one program.

    It returns the next state, and with `flag` one more array that is the same on all devices, as
    `rest` is. On one device, and within such a program, this is a plain call.
    """
    plan = weights.plan
    if plan.mesh is None or plan.inside:
        return run(weights, state, *rest)
    specs = state_specs(plan, state)
    target = leaf_specs(plan, weights.config, weights.dtype)
    drafter = None
    if weights.drafter is not None:
        drafter = leaf_specs(plan, weights.drafter_config, weights.dtype)

    def local(target, drafter, state, *rest):
        own = replace(
            weights, target=target, drafter=drafter, plan=plan.within(same_rows=same_rows)
        )
        return run(own, state, *rest)

    everywhere = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(target, drafter, specs, *(everywhere,) * len(rest)),
        out_specs=(specs, everywhere) if flag else specs,
        # The kernels and loops inside cannot say which of their results are the same everywhere.
        check_vma=False,
    )(weights.target, weights.drafter, state, *rest)
