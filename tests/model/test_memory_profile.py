"""The largest step, what it is seen to take, and the blocks that follow from it. A double stands in
for the counters of a GPU.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_models import MAX_MODEL_LEN, load, make_model

from deployments.config import CacheConfig, ExecutionConfig, SchedulerConfig, ServiceConfig
from deployments.execution.kv_cache import OutOfMemory
from deployments.execution.memory_profile import (
    CudaPeakMeter,
    StepShape,
    find_peak_meter,
    largest_step,
    log_reserve,
)
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.sampler import Sampler

GB = 1024**3
SHAPE = StepShape(num_tokens=40, num_rows=4, max_model_len=MAX_MODEL_LEN, block_size=8)


class FixedPeak:
    """A meter that has seen so many bytes, and remembers how it was used."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> int:
        self.calls.append("stop")
        return self._num_bytes


def make(
    monkeypatch: pytest.MonkeyPatch, meter: Any, num_free: int, **cache: Any
) -> tuple[ModelExecutor, int]:
    """An executor on a device with this meter and so much memory, and the bytes of its blocks."""
    where = "deployments.execution.model_executor"
    monkeypatch.setattr(f"{where}.find_peak_meter", lambda device: meter)
    monkeypatch.setattr(f"{where}.num_free_bytes", lambda device: num_free)
    config = ServiceConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=40, gpu_mem_reserve_gb=1.0
        ),
        cache=CacheConfig(**{"block_size": 8, **cache}),
        execution=ExecutionConfig(device="cpu"),
    )
    executor = ModelExecutor(load(make_model("llama")), config)
    layers = executor._forward._cache.layers
    num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return executor, num_bytes // executor.limits.num_blocks


def test_the_largest_step_fills_the_budget_and_every_row_samples() -> None:
    """A step with fewer tokens or rows than a configuration allows would be measured too small."""
    rows = largest_step(SHAPE)
    assert [row.num_scheduled_tokens for row in rows] == [1, 1, 1, 37]
    assert all(row.samples_token for row in rows)
    ends = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
    assert ends == [MAX_MODEL_LEN, 1, 1, MAX_MODEL_LEN]
    assert all(set(row.block_table) == {0} for row in rows)
    assert [len(row.block_table) for row in rows] == [32, 1, 1, 32]


def test_a_chunk_is_not_longer_than_the_context() -> None:
    """Of a short context several chunks fill the budget, and no row passes its end."""
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=45)
    rows = largest_step(StepShape.of(scheduler, 20, 8))
    assert [row.num_scheduled_tokens for row in rows] == [5, 20, 20]
    rows = largest_step(StepShape.of(scheduler, 10, 8))
    assert [row.num_scheduled_tokens for row in rows] == [10, 10, 10]
    assert max(row.request.num_tokens for row in rows) == 10


def test_a_reserve_below_the_step_gives_fewer_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that take the memory of a step would make the first full step fail; the log names
    both figures.
    """
    meter, room = FixedPeak(3 * GB // 2), 1 << 18
    with caplog.at_level(logging.WARNING):
        executor, block_bytes = make(monkeypatch, meter, 3 * GB // 2 + room)
    assert executor.limits.num_blocks == room // block_bytes
    assert meter.calls == ["start", "stop"]
    assert "a step of 40 tokens in 4 rows takes 1.50 GB" in caplog.text
    assert "holds back 1: the KV cache gets 0.50 GB less" in caplog.text


def test_a_reserve_above_the_step_stands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reserve is the user's word: what a step leaves of it is not given away."""
    room = 1 << 18
    with caplog.at_level(logging.INFO):
        executor, block_bytes = make(monkeypatch, FixedPeak(GB // 4), GB + room)
    assert executor.limits.num_blocks == room // block_bytes
    assert "takes 0.25 GB beside the weights; gpu_mem_reserve_gb holds back 1" in caplog.text


def test_no_room_beside_the_step_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering the reserve would not help here, so that is not the advice."""
    with pytest.raises(OutOfMemory, match=r"takes 2\.0: .* Lower scheduler\.max_num_batched"):
        make(monkeypatch, FixedPeak(2 * GB), 2 * GB)


def test_configured_blocks_are_warned_of_where_a_step_does_not_fit_beside_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool of a configured size is what was asked for, but not silently too large."""
    with caplog.at_level(logging.WARNING):
        executor, _ = make(monkeypatch, FixedPeak(GB // 2), GB // 2 + 1000, num_blocks=30)
    assert executor.limits.num_blocks == 30
    assert "cache.num_blocks asks for" in caplog.text


def test_a_step_that_does_not_fit_at_all_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own error names neither the budget nor the rows."""

    class Full:
        def __init__(self, *given: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("deployments.execution.memory_profile.PackedForward", Full)
    with pytest.raises(OutOfMemory, match="lower scheduler.max_num_batched_tokens") as caught:
        make(monkeypatch, FixedPeak(0), GB)
    assert "\n" not in str(caught.value)


def test_the_real_step_is_computed_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of the largest step are sampled from while the meter runs, and the served cache
    comes later.
    """
    meter = FixedPeak(0)
    seen: list[tuple[int, ...]] = []
    inner = Sampler.sample

    def spy(self: Sampler, logits: Any, requests: Any) -> Any:
        assert meter.calls == ["start"]
        seen.append(tuple(logits.shape))
        return inner(self, logits, requests)

    monkeypatch.setattr(Sampler, "sample", spy)
    executor, _ = make(monkeypatch, meter, 4 * GB)
    assert seen == [(4, executor.limits.vocab_size)]


def test_the_meter_counts_what_was_taken_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lay there before, the weights, is not the step's; memory the allocator took from the
    device but gave nobody is.
    """
    calls: list[str] = []
    readings = {
        "memory_allocated": 100,
        "memory_reserved": 120,
        "max_memory_allocated": 170,
        "max_memory_reserved": 220,
    }
    for name, value in readings.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, name=name: calls.append(name))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: calls.append("empty_cache"))
    meter = CudaPeakMeter(torch.device("cuda"))
    meter.start()
    assert calls == ["empty_cache", "synchronize", "reset_peak_memory_stats"]
    assert meter.stop() == 100
    assert calls[3:] == ["synchronize", "empty_cache"]


def test_only_a_gpu_is_measured() -> None:
    """A CPU's memory is the machine's, and its allocator has no such counters."""
    assert find_peak_meter(torch.device("cpu")) is None
    assert isinstance(find_peak_meter(torch.device("cuda")), CudaPeakMeter)


def test_the_log_says_which_figure_is_larger(caplog: pytest.LogCaptureFixture) -> None:
    """Equal is enough."""
    with caplog.at_level(logging.INFO):
        log_reserve(4 * GB, SHAPE, 4.0)
    assert [record.levelname for record in caplog.records] == ["INFO"]
