"""What devices say to each other in a step: collectives and their bytes, off the program."""

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from ddtree_jax.config import DFlashConfig, KimiConfig, Sampling
from ddtree_jax.generate import Method, decode
from ddtree_jax.parallel import Plan
from ddtree_jax.prefill import empty_state
from ddtree_jax.sharding import abstract_weights

OPS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}


@dataclass(frozen=True)
class Collective:
    """One collective of a program: its kind, and the arrays each device holds after it."""

    op: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each

    @property
    def bytes(self) -> int:
        return sum(_BYTES[dtype] * prod(shape) for dtype, shape in self.arrays)

    def sent(self, devices: int) -> float:
        """Bytes each device sends at the least, where no switch adds up for them."""
        share = (devices - 1) / devices
        factor = {"all-reduce": 2 * share, "reduce-scatter": devices - 1, "collective-permute": 1}
        return factor.get(self.op, share) * self.bytes


def collectives(text: str) -> list[Collective]:
    """The collectives in the text of a program, lowered (StableHLO) or compiled (HLO)."""
    found = []
    for op in OPS:
        # Compiled: `%x = f32[9,32]{1,0} all-reduce(`, or `(f32[4], s32[4]) all-reduce-start(`.
        for line, start in re.findall(rf"= (.*?) {op}(-start)?\(", text):
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", line)
            if start and op != "all-reduce":  # the operands stand before the results
                arrays = [a for a in arrays if a[1] or a[0] != "u32"]
                # A ragged exchange has one result, but offsets and sizes among its operands.
                arrays = arrays[-1:] if op.startswith("ragged") else arrays[len(arrays) // 2 :]
            found.append(Collective(op, tuple((d, _shape(s.split(","))) for d, s in arrays)))
        # Lowered: `"stablehlo.all_reduce"(%x) <{..}> ({ .. }) : (tensor<9x32xf32>) -> tensor<..>`.
        # A ragged exchange is a custom call by its name.
        name = op.replace("-", "_")
        called = rf'(?:"stablehlo\.{name}"|stablehlo\.custom_call @{name})'
        pattern = rf"{called}\(.*?\) -> tensor<([^>]*)>"
        for line in re.findall(pattern, text, re.DOTALL):
            *shape, dtype = line.split("x")
            dtype = "pred" if dtype == "i1" else re.sub(r"^u?i(\d+)$", r"s\1", dtype)
            found.append(Collective(op, ((dtype, _shape(shape)),)))
    return found


def _shape(words) -> tuple[int, ...]:
    return tuple(int(n) for n in words if n)


def lowered_decode(
    plan: Plan,
    config: KimiConfig,
    drafter: DFlashConfig | None,
    method: Method,
    requests: int,
    pages: int,
    dtype: str = "bfloat16",
    new: int = 128,
):
    """The decode loop of a model that need not exist, lowered for the plan's mesh."""
    weights = abstract_weights(plan, config, drafter, dtype)
    samplings, stops = [Sampling(1.0)] * requests, [(-1,)] * requests
    state = jax.eval_shape(lambda: empty_state(weights, samplings, stops, new, pages, 0))
    passes = jax.ShapeDtypeStruct((), jnp.int32)
    return decode.trace(weights, state, method, passes).lower()


def table(found: list[Collective]) -> Counter:
    """How many collectives of every kind and shape."""
    return Counter((c.op, c.arrays) for c in found)


def in_step(text: str) -> str:
    """What of a compiled decode loop runs once a step: the loop's body and what it calls."""
    blocks = re.split(r"^(?=(?:ENTRY )?%?[\w.-]+ \(.*\{$)", text, flags=re.MULTILINE)
    named = {re.match(r"(?:ENTRY )?%?([\w.-]+)", b)[1]: b for b in blocks if "{" in b}
    called = {name: set(re.findall(r"%([\w.-]+)", b)) & set(named) for name, b in named.items()}
    todo, found = set(re.findall(r"\bbody=%?([\w.-]+)", text)), set()
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= called[name] - found
    return "".join(named[name] for name in sorted(found))
