"""How the grouped expert matmul is cut into pieces: frozen, validated, chosen by the row count."""

import math
from dataclasses import dataclass

FLAGS = 256  # blocks of a grid at most: each has a flag
SHARED_BYTES = 232_448  # of one block on Hopper


def _require(ok, name: str, value, what: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {what}")


@dataclass(frozen=True)
class ExpertConfig:
    """Tiles and pipeline of one launch.

    `tiles` are the row counts a work item may have, ascending: a slot runs in the smallest that
    holds it. `scale` says where INT4 scales are applied for tiles of 8 rows: to every bf16
    "weight", or to the sums of each "group" of inputs, weights made signed before or, cheapest,
    their offset taken from the sums as a "bias". Larger tiles have no registers for four sums.
    `balance` shares the last items out among all blocks, by steps (`expert_schedule`).
    """

    tiles: tuple[int, ...] = (8,)
    warpgroups: int = 4
    stages: int = 8
    scale: str = "bias"
    ctas: int = 132
    balance: bool = True

    def __post_init__(self):
        ok = self.tiles and list(self.tiles) == sorted(set(self.tiles))
        ok = ok and all(n % 8 == 0 and 8 <= n <= 256 for n in self.tiles)
        _require(ok, "tiles", self.tiles, "ascending multiples of 8 up to 256")
        _require(self.warpgroups in (2, 4), "warpgroups", self.warpgroups, "2 or 4")
        _require(2 <= self.stages <= 16, "stages", self.stages, "from 2 to 16")
        ok = self.scale in ("weight", "group", "bias")
        _require(ok, "scale", self.scale, "weight, group or bias")
        _require(1 <= self.ctas <= FLAGS, "ctas", self.ctas, f"from 1 to {FLAGS}")
        self.check_shared(packed=True)

    def check_shared(self, packed: bool) -> None:
        """Raise unless the stages fit: INT4 ones hold 128 inputs in 18 KiB, bf16 ones 64 in 32."""
        n, depth, weights = self.tiles[-1], 128 if packed else 64, 18 if packed else 32
        stage = weights * 1024 + n * depth * 2 + 128 + 16
        size = self.stages * stage + min(n, 32) * 260 * 4 + 2048
        _require(size <= SHARED_BYTES, "stages", self.stages, f"fewer: {size} bytes do not fit")

    def scale_of(self, rows: int) -> str:
        return self.scale if rows == 8 else "weight"

    @property
    def biased(self) -> bool:
        return self.scale == "bias" and self.tiles[0] == 8

    @property
    def feeder_registers(self) -> int:
        return 32 if self.warpgroups == 4 else 40

    @property
    def multiplier_registers(self) -> int:
        # What the launch gave out is shared anew: 32 + 4 x 112 = 5 x 96, 40 + 2 x 232 = 3 x 168.
        return 112 if self.warpgroups == 4 else 232


def choose_config(pairs: int, experts: int, packed: bool) -> ExpertConfig:
    """The shipped configuration for so many routed rows over so many experts.

    Few rows an expert: one tile of 8, in which any row has the same bits in any batch. More: the
    tile that holds most experts' rows, and smaller ones so that no expert pays for the rest.
    """
    each = pairs / experts
    for limit, config in PACKED if packed else DENSE:
        if each <= limit:
            return config
    raise AssertionError("the last limit is infinite")


# Rows an expert up to which a configuration serves, ascending.
PACKED = (
    (4, ExpertConfig((8,), stages=8)),
    (12, ExpertConfig((8, 16), stages=8)),
    (40, ExpertConfig((8, 16, 32), stages=6)),
    (math.inf, ExpertConfig((32, 96), stages=4)),
)
DENSE = (
    (4, ExpertConfig((8,), stages=6)),
    (40, ExpertConfig((8, 32), stages=5)),
    (math.inf, ExpertConfig((32, 96), stages=4)),
)
