"""How kernels cut their work, per generation of devices: the table that `tune` writes."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from pallas_kernels.base.dispatch import default_device, gpu_capability

PATH = Path(__file__).with_name("tiles.json")
DEFAULT = "hopper"  # what is lowered for where no GPU says otherwise
SMALLEST, LARGEST = 16, 256  # slots of a tile: what a matrix unit takes at least, and keeps in hand
WIDE = 1024  # bytes of a row; of wider ones, shared memory has room for one tile at a time
BLOCKS_PER_SPLIT = 4  # with fewer, starting a program costs more than reading


@dataclasses.dataclass(frozen=True)
class Tile:
    """One row of the table.

    Attributes:
      tile_bytes: of one tile of keys; the tile of values is as large.
      warps, stages: of a program: its threads by 32, and how many tiles are under way at a time.
      programs: how many are wanted per core, which decides how often the slots of a head are split.
      cores: of the device that the row was measured on, where the device itself is not there.
      query_bytes: of a program's queries, at most: 64 rows of 128 channels in bfloat16 are as many
        as a matrix unit takes at a time. The output takes twice as much, in float32.
    """

    tile_bytes: int
    warps: int
    stages: int
    programs: int
    cores: int
    query_bytes: int = 16_384

    def block(self, row_bytes: int, slots: int) -> int:
        """Slots of a tile, a power of two: no more than cover all of them."""
        fitting = 1 << max(self.tile_bytes // row_bytes, 1).bit_length() - 1
        return max(SMALLEST, min(fitting, LARGEST, power_of_two(slots)))

    def rows(self, row_bytes: int, rows: int) -> int:
        """Query rows of a program, a power of two: no more than cover all of them."""
        return max(SMALLEST, min(self.query_bytes // row_bytes, power_of_two(rows)))

    def stages_of(self, row_bytes: int) -> int:
        """How many tiles of rows are under way at a time."""
        return self.stages if row_bytes <= WIDE else 1

    def splits(self, programs: int, slots: int, block: int) -> int:
        """How many programs share the slots of a head, with `programs` heads and row tiles."""
        wanted = -(-self.programs * self.cores // programs)
        return max(1, min(wanted, -(-slots // (block * BLOCKS_PER_SPLIT))))


def tile_of(operation: str) -> Tile:
    """The tile sizes of an operation on the default GPU, or for the default generation."""
    tile = Tile(**table()[generation(gpu_capability())][operation])
    device = default_device()
    return tile if device is None else dataclasses.replace(tile, cores=device.core_count)


def generation(capability: tuple[int, int] | None) -> str:
    """The name of a compute capability's generation.

    Example:
      >>> from pallas_kernels.base.tiles import generation
      >>> generation((8, 6)), generation((8, 9)), generation((9, 0))
      ('ampere', 'ada', 'hopper')
    """
    if capability is None:
        return DEFAULT
    if capability < (9, 0):
        return "ada" if capability >= (8, 9) else "ampere"
    return "hopper" if capability < (10, 0) else "blackwell"


@functools.cache
def table() -> dict[str, dict[str, dict[str, int]]]:
    """The table as it stands in the file: generation, operation, sizes."""
    return json.loads(PATH.read_text())


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number.

    Example:
      >>> from pallas_kernels.base.tiles import power_of_two
      >>> [power_of_two(n) for n in (1, 80, 96, 128)]
      [1, 128, 128, 128]
    """
    return 1 << max(number - 1, 0).bit_length()
