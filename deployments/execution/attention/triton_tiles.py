"""How a layer's queries and keys are cut into tiles, and how many programs share a decode. Plain
arithmetic: neither torch nor Triton.

    batch              decode | decode | chunk of 5 queries
    decode tiles       1 query| 1 query|
    chunk tiles                        | 2 queries | 2 queries | 1 query
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_TILE_ROWS = 16
"""The least a matrix unit takes."""
MAX_NUM_SPLITS = 16
MIN_SPLIT_KEYS = 512
"""A split of fewer keys costs more to merge than it saves."""
PROGRAMS_PER_PROCESSOR = 2
"""A multiprocessor hides one program's memory waits behind another's work."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The shape of one launch's programs."""

    num_rows: int
    """Of the query tile: queries times the heads of a group, a power of two."""
    num_keys: int
    """Read at once, a power of two."""
    num_warps: int
    num_stages: int
    """Key tiles on their way from memory at once."""

    def num_queries(self, group: int) -> int:
        """Queries in a tile, each with all heads of its group."""
        return self.num_rows // group


def next_power_of_two(number: int) -> int:
    """The least one that is not smaller; at least 1."""
    return 1 << max(0, number - 1).bit_length()


def num_lanes(dim: int) -> int:
    """The width that holds a head: a power of two that a matrix unit takes."""
    return max(MIN_TILE_ROWS, next_power_of_two(dim))


def decode_tiles(group: int, widest_dim: int, element_bytes: int) -> Tiles:
    """For rows of one query: as few rows as hold a group, since reading keys is all the work."""
    rows = max(MIN_TILE_ROWS, next_power_of_two(group))
    keys = 64 if num_lanes(widest_dim) * element_bytes <= 256 else 32
    return Tiles(rows, keys, num_warps=4, num_stages=3 if keys == 64 else 2)


def chunk_tiles(group: int, widest_dim: int, element_bytes: int) -> Tiles:
    """For rows of several queries: as many rows as registers hold, since each key read serves
    all.
    """
    bytes_per_lane = num_lanes(widest_dim) * element_bytes
    if element_bytes > 2:  # no matrix unit takes them: what is multiplied lies in registers
        rows, keys, warps, stages = 16, 32, 8, 1
    elif bytes_per_lane <= 256:  # a head of 128 in half precision
        rows, warps, stages = 128, 8, 3
        keys = 64 if num_lanes(widest_dim) == widest_dim else 32  # masks take registers too
    elif bytes_per_lane <= 512:
        rows, keys, warps, stages = 64, 32, 8, 2
    else:
        rows, keys, warps, stages = 32, 32, 8, 1
    return Tiles(max(rows, next_power_of_two(group)), keys, warps, stages)


def choose_num_splits(num_programs: int, num_visible_keys: int, num_processors: int) -> int:
    """How many programs share the keys of each decode; 1: they are not split.

    Args:
        num_programs: of the launch without splits: decodes times KV heads.
        num_visible_keys: of the longest decode.
        num_processors: multiprocessors of the device.
    """
    wanted = PROGRAMS_PER_PROCESSOR * num_processors // max(1, num_programs)
    useful = num_visible_keys // MIN_SPLIT_KEYS
    return max(1, min(wanted, useful, MAX_NUM_SPLITS))
