"""Tile sizes of kernels per generation of devices: the table that `tune` writes."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.base.dispatch import default_device, gpu_capability

PATH = Path(__file__).with_name("tiles.json")
DEFAULT = "hopper"  # the generation to lower for where there is no GPU
SMALLEST, LARGEST = 16, 256  # slots of a tile: the least a matrix unit takes, the most it can hold
MOST_ROWS = 128  # query rows of a program: more logits do not fit beside the rows of narrow heads
WIDE = 1024  # bytes of a row; shared memory has room for only one tile of wider rows at a time
BLOCKS_PER_SPLIT = 4  # with fewer, starting a program costs more than reading
SLOTS_PER_ROW = 8  # with fewer, a part writes and reads more in float32 than it reads of 8 bits


@dataclasses.dataclass(frozen=True)
class Tile:
    """One row of the table.

    Attributes:
      tile_bytes: bytes of a tile of keys; a tile of values is as large.
      warps: groups of 32 threads of a program.
      stages: tiles that a program loads at a time.
      programs: most programs per core; decides into how many parts a head's slots are split.
      cores: cores of the device that the row was measured on, for use where there is no device.
      query_bytes: most bytes of a program's queries: 64 rows of 128 channels in bfloat16 are as
        many as a matrix unit takes at a time. The output takes twice as much, in float32.
    """

    tile_bytes: int
    warps: int
    stages: int
    programs: int
    cores: int
    query_bytes: int = 16_384

    def block(self, row_bytes: int, slots: int) -> int:
        """Returns the slots of a tile: a power of two, no larger than needed to cover all slots."""
        fitting = 1 << max(self.tile_bytes // row_bytes, 1).bit_length() - 1
        return max(SMALLEST, min(fitting, LARGEST, power_of_two(slots)))

    def rows(self, row_bytes: int, rows: int) -> int:
        """Returns the query rows of a program: a power of two, no larger than covers all rows."""
        return max(SMALLEST, min(self.query_bytes // row_bytes, power_of_two(rows), MOST_ROWS))

    def stages_of(self, row_bytes: int) -> int:
        """Returns how many tiles of rows are loaded at a time."""
        return self.stages if row_bytes <= WIDE else 1

    def splits(self, programs: int, slots: int, block: int, rows: int) -> int:
        """Returns how many programs share a head's slots.

        `programs` is the number of heads times that of row tiles, `rows` are those of a tile. No
        more programs are started than are wanted: one that has to wait for a core would double the
        time of all.
        """
        wanted = self.programs * self.cores // programs
        least = max(block * BLOCKS_PER_SPLIT, rows * SLOTS_PER_ROW)
        return max(1, min(wanted, -(-slots // least)))


class Launch(NamedTuple):
    """Says how a kernel for GPUs is started: its tile sizes, and whether it is interpreted."""

    tile: Tile
    interpret: bool


def launch_of(operation: str, implementation: str) -> Launch:
    """Returns how a kernel for GPUs is started, given the result of `choose_implementation`."""
    return Launch(tile_of(operation), implementation == "interpret")


def tile_of(operation: str) -> Tile:
    """Returns an operation's tile sizes for the default GPU, or for the default generation."""
    tile = Tile(**table()[generation(gpu_capability())][operation])
    device = default_device()
    return tile if device is None else dataclasses.replace(tile, cores=device.core_count)


def generation(capability: tuple[int, int] | None) -> str:
    """Returns the name of a compute capability's generation.

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
    """Returns the table of the file: sizes by generation and operation."""
    return json.loads(PATH.read_text())


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below a number.

    Example:
      >>> from pallas_kernels.base.tiles import power_of_two
      >>> [power_of_two(n) for n in (1, 80, 96, 128)]
      [1, 128, 128, 128]
    """
    return 1 << max(number - 1, 0).bit_length()
