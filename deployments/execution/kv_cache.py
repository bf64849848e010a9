"""The paged KV tensors of one replica and how many blocks of them fit.

Owns memory and its layout; which request holds which block is `KVCacheManager`'s business.

    layer.keys    [num_blocks, block_size, num_kv_heads, key_dim]
    layer.values  [num_blocks, block_size, num_kv_heads, value_dim]

                    block 0 (null)    block 1           block 2
    flat slots     | 0  1  2  3 |    4  5  6  7    |    8  9 10 11 |

    slot = block * block_size + offset

Block 0 belongs to nobody: padding reads it, so it must hold finite numbers; a fresh cache is all
zeros.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deployments.config import CacheConfig, SchedulerConfig

logger = logging.getLogger(__name__)

CPU_DEFAULT_MAX_GB = 4.0
"""Of the KV cache on a CPU, unless cache.max_gb says otherwise."""
_GB = 1024**3


class OutOfMemory(RuntimeError):
    """Not even a small KV cache fits; the message says what to change."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer asks of a backend and stores per token."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """Keys a query sees, itself included; None: all before it."""
    softcap: float | None
    has_sinks: bool

    @property
    def num_elements_per_token(self) -> int:
        """Keys and values of one token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer."""

    keys: Tensor
    """[num_blocks, block_size, num_kv_heads, key_dim]"""
    values: Tensor
    """[num_blocks, block_size, num_kv_heads, value_dim]"""

    @property
    def flat_keys(self) -> Tensor:
        """[num_slots, num_kv_heads, key_dim], a view."""
        return self.keys.flatten(0, 1)

    @property
    def flat_values(self) -> Tensor:
        """[num_slots, num_kv_heads, value_dim], a view."""
        return self.values.flatten(0, 1)

    def write(self, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Store the keys and values [num_tokens, num_kv_heads, dim] of tokens at their slots
        [num_tokens].
        """
        self.flat_keys.index_copy_(0, slot_mapping, keys)
        self.flat_values.index_copy_(0, slot_mapping, values)


class PagedKVCache:
    """Keys and values of all layers.

    Args:
        specs: one for each layer, in the model's order.
        num_blocks: the null block included.
        block_size: tokens per block.
        dtype: of keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.layers = tuple(
            LayerCache(
                *(
                    _zeros((num_blocks, block_size, spec.num_kv_heads, dim), dtype, device)
                    for dim in (spec.key_dim, spec.value_dim)
                )
            )
            for spec in specs
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves the zeroing to the kernel, page by page when first touched; torch writes every
    # byte of the pool now, which takes seconds of a start.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def num_block_bytes(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, in bytes."""
    return sum(spec.num_elements_per_token for spec in specs) * block_size * dtype.itemsize


def _read_int(path: Path) -> int | None:
    """A number from a kernel file; None where the file is missing or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _num_reclaimable(root: Path) -> int:
    """Bytes of page cache that count as used in a cgroup, but are given up on demand."""
    path = root / "sys/fs/cgroup/memory.stat"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def num_free_cpu_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still take: what the machine has, or its cgroup leaves if
    that is less.
    """
    meminfo = (root / "proc/meminfo").read_text()
    available = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
    limit = _read_int(root / "sys/fs/cgroup/memory.max")
    used = _read_int(root / "sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, limit - used + _num_reclaimable(root))
    return max(0, available)


def num_free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return num_free_cpu_bytes()


def used_bytes_reader(device: torch.device) -> Callable[[], int] | None:
    """Reads how much memory of a device is in use, by all that run on it; None where the device is
    no GPU, whose memory is the machine's.
    """
    if device.type != "cuda":
        return None

    def read() -> int:
        num_free, num_bytes = torch.cuda.mem_get_info(device)
        return num_bytes - num_free

    return read


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What a device has left beside the model."""

    num_bytes: int
    num_step_bytes: int = 0
    """Of these, what the largest step was seen to take."""


def num_blocks_that_fit(
    free: FreeMemory,
    block_bytes: int,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    max_model_len: int,
    default_max_gb: float | None,
) -> int:
    """Blocks for a pool, the null block included: free memory less the reserve, or less the largest
    step where that takes more, within what can be used.

    Args:
        free: on the device, the model loaded.
        block_bytes: of one block over all layers.
        default_max_gb: upper bound where the configuration names none.

    Raises:
        OutOfMemory: fewer than two blocks fit.
    """
    if cache.num_blocks is not None:
        if cache.num_blocks * block_bytes > free.num_bytes - free.num_step_bytes:
            logger.warning(
                "cache.num_blocks asks for %.1f GB of the %.1f GB that are free; lower it, or the "
                "process may be killed once the cache fills",
                cache.num_blocks * block_bytes / _GB,
                (free.num_bytes - free.num_step_bytes) / _GB,
            )
        return cache.num_blocks
    room = free.num_bytes - max(scheduler.gpu_mem_reserve_gb * _GB, free.num_step_bytes)
    max_gb = cache.max_gb if cache.max_gb is not None else default_max_gb
    if max_gb is not None:
        room = min(room, max_gb * _GB)
    fits = int(room // block_bytes)
    if fits < 2:
        raise OutOfMemory(_no_room(free, block_bytes, scheduler.gpu_mem_reserve_gb))
    most_usable = 1 + scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
    return min(fits, most_usable)


def _no_room(free: FreeMemory, block_bytes: int, reserve_gb: float) -> str:
    step_gb = free.num_step_bytes / _GB
    if step_gb > reserve_gb:
        holds = f"the largest step takes {step_gb:.1f}"
        change = "Lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
    else:
        holds = f"gpu_mem_reserve_gb holds back {reserve_gb:g}"
        change = "Lower gpu_mem_reserve_gb"
    return (
        f"{free.num_bytes / _GB:.1f} GB are free and {holds}: nothing is left for a KV cache of "
        f"{block_bytes} bytes a block. {change}, raise cache.max_gb, free memory, or set "
        "cache.num_blocks"
    )
