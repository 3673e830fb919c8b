"""How the grouped expert matmul is cut into pieces: frozen, validated, chosen by the row count."""

from dataclasses import dataclass

SHARED_BYTES = 232_448  # of one block on Hopper


@dataclass(frozen=True)
class ExpertConfig:
    """Tiles and pipeline of one launch.

    `tiles` are the row counts a work item may have, ascending: a slot runs in the smallest that
    holds it. `scale` says where INT4 scales are applied for tiles of 8 rows: to every bf16
    "weight", or to the sums of each "group" of inputs, weights made signed before or, cheapest,
    their offset taken from the sums as a "bias". Larger tiles have no registers for four sums.
    """

    tiles: tuple[int, ...] = (8,)
    warpgroups: int = 4
    stages: int = 8
    scale: str = "bias"
    ctas: int = 132

    def __post_init__(self):
        ok = self.tiles and list(self.tiles) == sorted(set(self.tiles))
        ok = ok and all(n % 8 == 0 and 8 <= n <= 256 for n in self.tiles)
        _require(ok, "tiles", self.tiles, "ascending multiples of 8 up to 256")
        _require(self.warpgroups in (2, 4), "warpgroups", self.warpgroups, "2 or 4")
        _require(2 <= self.stages <= 16, "stages", self.stages, "from 2 to 16")
        ok = self.scale in ("weight", "group", "bias")
        _require(ok, "scale", self.scale, "weight, group or bias")
        _require(self.ctas >= 1, "ctas", self.ctas, "positive")

    def scale_of(self, rows: int) -> str:
        return self.scale if rows == 8 else "weight"

    @property
    def feeder_registers(self) -> int:
        return 32 if self.warpgroups == 4 else 40

    @property
    def multiplier_registers(self) -> int:
        # What the launch gave out is shared anew: 32 + 4 x 112 = 5 x 96, 40 + 2 x 232 = 3 x 168.
        return 112 if self.warpgroups == 4 else 232


def _require(ok, name: str, value, what: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {what}")
