"""How much memory and how many threads a replica takes when nobody says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deployments.config import CacheConfig, SchedulerConfig
from deployments.execution.kv_cache import (
    FreeMemory,
    LayerSpec,
    OutOfMemory,
    num_block_bytes,
    num_blocks_that_fit,
    num_free_cpu_bytes,
)
from deployments.execution.model_loader import default_num_threads

GB = 1024**3


def fit(num_free: float, *, cache: dict | None = None, scheduler: dict | None = None, **other: Any):
    fields = {"max_model_len": 1000, "default_max_gb": None, **other}
    return num_blocks_that_fit(
        FreeMemory(int(num_free)),
        1 << 20,
        CacheConfig(**(cache or {})),
        SchedulerConfig(**{"gpu_mem_reserve_gb": 4.0, **(scheduler or {})}),
        **fields,
    )


def test_the_pool_is_what_memory_leaves_after_the_reserve() -> None:
    """Blocks = (free - reserve) / bytes a block, within max_gb, the default bound and what can be
    used.
    """
    assert fit(5 * GB) == 1024
    assert fit(5 * GB + (1 << 20) - 1) == 1024
    assert fit(5 * GB, scheduler={"gpu_mem_reserve_gb": 4.5}) == 512
    assert fit(9 * GB, cache={"max_gb": 0.25}) == 256
    assert fit(9 * GB, default_max_gb=0.5) == 512
    assert fit(9 * GB, cache={"max_gb": 1.0}, default_max_gb=0.5) == 1024
    assert fit(4 * GB + (2 << 20)) == 2
    # 64 requests of 63 blocks each, and the null block, is all that can ever be used.
    assert fit(900 * GB) == 1 + 64 * 63
    assert fit(900 * GB, scheduler={"max_num_seqs": 2}, max_model_len=16) == 3
    assert fit(0, cache={"num_blocks": 77}) == 77


@pytest.mark.parametrize("num_free", [0, 3 * GB, 4 * GB, 4 * GB + (2 << 20) - 1])
def test_no_room_for_a_pool_says_what_to_change(num_free: int) -> None:
    """Fewer than two blocks are an error that names the reserve and the other ways out."""
    with pytest.raises(OutOfMemory, match=r"Lower gpu_mem_reserve_gb.*set cache.num_blocks"):
        fit(num_free)


def test_a_block_counts_keys_and_values_of_all_layers() -> None:
    """Layers of different shapes add up; key and value sizes may differ."""
    specs = [LayerSpec(4, 2, 12, 12, None, None, False), LayerSpec(4, 1, 20, 16, 8, None, True)]
    assert num_block_bytes(specs, 16, torch.bfloat16) == (2 * 24 + 36) * 16 * 2


def test_free_memory_is_the_lesser_of_machine_and_cgroup(tmp_path) -> None:
    """A container's limit counts where it is tighter than the machine."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   2000 kB\n")
    assert num_free_cpu_bytes(tmp_path) == 2000 * 1024
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5000\n")
    assert num_free_cpu_bytes(tmp_path) == 2000 * 1024
    (cgroup / "memory.max").write_text("6000\n")
    assert num_free_cpu_bytes(tmp_path) == 1000
    (cgroup / "memory.max").write_text("4000\n")
    assert num_free_cpu_bytes(tmp_path) == 0
    # Page cache counts as used, but is given up on demand.
    (cgroup / "memory.stat").write_text("anon 10\ninactive_file 3000\nactive_file 7\n")
    assert num_free_cpu_bytes(tmp_path) == 2000


def test_threads_default_to_one_less_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress keeps a core, and one core is still one thread."""
    for cores, want in ((1, 1), (2, 1), (8, 7)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, n=cores: set(range(n)))
        assert default_num_threads() == want


def test_threads_keep_to_the_quota_of_a_container(tmp_path, monkeypatch) -> None:
    """A pod with two CPUs on a node of 64 would start 63 threads, which stall each other."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    for text, want in (("200000 100000", 1), ("800000 100000", 7), ("max 100000", 63)):
        quota.write_text(text + "\n")
        assert default_num_threads(tmp_path) == want
