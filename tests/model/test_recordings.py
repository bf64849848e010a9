"""What is recorded of decode steps when a model is loaded, in which order and memory, and what is
served where that fails. How a CUDA graph itself is recorded: test_graph_recorder.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from graph_doubles import (
    Again,
    Held,
    HeldPlans,
    LongAndShort,
    MakeExecutor,
    executor_maker,
    plain_tokens,
)
from tiny_models import greedy, make_executor, make_model, make_prompt, run
from torch import Tensor

from deployments.execution.graph_recorder import Replay
from deployments.execution.input_batch import InputBatch
from deployments.execution.model_forward import ModelForward
from deployments.execution.step_runner import EagerRunner, Room, graph_sizes


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeExecutor:
    return executor_maker(monkeypatch)


class FailsAt(Again):
    """Records a few, then fails as a CUDA graph does: its end raises an error over the first."""

    def __init__(self, num_recorded: int, error: RuntimeError) -> None:
        super().__init__()
        self._num_left = num_recorded
        self._error = error

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        self._num_left -= 1
        if self._num_left >= 0:
            return super().record(compute)
        try:
            raise self._error
        finally:
            raise RuntimeError("operation failed due to a previous error\nCompile with DSA")


def not_permitted() -> RuntimeError:
    return RuntimeError("operation not permitted when stream is capturing")


def out_of_memory() -> RuntimeError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_without_recordings_decodes_run_plainly(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that cannot be recorded is served all the same, and the log says so once."""
    request = greedy(make_prompt(9), "mine", max_tokens=6)
    with caplog.at_level(logging.WARNING):
        executor = make(HeldPlans(), FailsAt(2, not_permitted()))
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("(after: operation not permitted when stream is capturing)")
    assert "decodes run without CUDA graphs" in line
    assert "\n" not in line
    assert not executor._forward._runner._recordings
    assert run(executor, [request]).tokens("mine") == plain_tokens(make, request)


class Forgets:
    """Replays as a CUDA graph does, which keeps no tensor that it reads."""

    def __init__(self) -> None:
        self.read: list[weakref.ref[Tensor]] = []

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        cells = [cell.cell_contents for cell in compute.__closure__ or ()]  # type: ignore[attr-defined]
        self.read += [weakref.ref(held) for held in cells if isinstance(held, Tensor)]
        self.read += [weakref.ref(held.kept) for held in cells if isinstance(held, Held)]
        out = compute()
        return lambda: out


def test_a_recording_keeps_what_it_reads(make: Any) -> None:
    """A graph that outlived the indices of its rows read whatever came to lie there; so it would
    with the tables of its plan, and write over it with its logits.
    """
    recorder = Forgets()
    executor = make(HeldPlans(), recorder)
    gc.collect()
    assert len(recorder.read) == 6 * len(graph_sizes(9))
    assert all(held() is not None for held in recorder.read)
    executor.close()


def test_all_is_recorded_at_load_from_the_largest_on(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """From the smallest on, each size would take memory that no other fits into; a kind that is
    left out would run plainly for good.
    """
    recorder = Again()
    with caplog.at_level(logging.INFO, logger="deployments.execution.step_runner"):
        executor = make(LongAndShort(), recorder)
    assert recorder.sizes == [9, 8, 4, 4, 2, 2, 1, 1]
    kinds = {size: sorted(made) for size, made in executor._forward._runner._recordings.items()}
    assert kinds == {9: [0], 8: [0], 4: [0, 1], 2: [0, 1], 1: [0, 1]}
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("CUDA graphs of 5 of 5 sizes recorded in ")
    assert line.endswith(" s; they take 0.00 GB")


def test_nothing_is_recorded_while_serving(make: Any) -> None:
    """A recording takes seconds and memory, in the middle of everybody's stream."""
    recorder = Again()
    executor = make(LongAndShort(), recorder)
    num_recorded = len(recorder.sizes)
    requests = [greedy(make_prompt(12 + i, i), f"r{i}", max_tokens=14) for i in range(3)]
    got = run(executor, requests)
    assert [got.tokens(r.request_id) for r in requests] == [plain_tokens(make, r) for r in requests]
    assert recorder.num_replayed > 10
    assert len(recorder.sizes) == num_recorded


def test_all_recordings_leave_their_logits_in_one_place(make: Any) -> None:
    """A row of logits is large: kept by each size for itself, they took more than the rest."""
    runner = make(HeldPlans(), Again())._forward._runner
    places = {
        recording.logits.untyped_storage().data_ptr()
        for kinds in runner._recordings.values()
        for recording in kinds.values()
    }
    assert len(places) == 1


def test_out_of_memory_while_recording_ends_it(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It was taken for a model that cannot be recorded, or ended the load; what was recorded before
    is of use, and steps of the other sizes are not padded up to it.
    """
    recorder = FailsAt(3, out_of_memory())
    with caplog.at_level(logging.WARNING):
        executor = make(LongAndShort(), recorder)
    # Of size 4 one kind was recorded and one was not: the size is not half there.
    assert sorted(executor._forward._runner._recordings) == [8, 9]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("3 of 5 sizes of decodes run without CUDA graphs")
    for change in ("gpu_mem_reserve_gb", "max_num_seqs", "execution.cuda_graphs to off"):
        assert change in line
    few = [greedy(make_prompt(9 + i, i), f"r{i}") for i in range(3)]
    got = run(executor, few)
    assert recorder.num_replayed == 0
    many = [greedy(make_prompt(9 + i, i), f"r{i}") for i in range(7)]
    got = run(executor, many, max_num_seqs=9)
    assert recorder.num_replayed > 0
    assert [got.tokens(r.request_id) for r in many] == [plain_tokens(make, r) for r in many]


def test_what_was_half_recorded_is_let_go(make: Any) -> None:
    """Its memory stayed with the error, or with the size that was never whole."""
    recorder = Forgets()
    inner = recorder.record
    left = iter(range(3))

    def record(compute: Callable[[], Tensor]) -> Replay:
        replay = inner(compute)
        if next(left, None) is None:
            raise out_of_memory()
        return replay

    recorder.record = record  # type: ignore[method-assign]
    executor = make(LongAndShort(), recorder)
    assert len(executor._forward._runner._recordings) == 2
    assert sum(held() is not None for held in recorder.read) == 2 * 6


def test_recordings_leave_the_largest_step_its_memory(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs that took all of the reserve would make every large step fail."""
    gb = 1 << 30
    recorder = Again()
    num_free = [5 * gb]

    def find_num_free() -> int:
        return num_free[0] - len(recorder.sizes) * gb

    with caplog.at_level(logging.WARNING):
        executor = make(HeldPlans(), recorder, Room(find_num_free, 3 * gb))
    assert sorted(executor._forward._runner._recordings) == [8, 9]
    [line] = [record.getMessage() for record in caplog.records]
    assert "2.00 GB would be left to the largest step, which takes 3.00" in line


class Watched(EagerRunner):
    """Tells what holds while it is prepared and run."""

    def __init__(self, forward: ModelForward, told: Callable[[str], None]) -> None:
        super().__init__(forward)
        self._told = told

    def prepare(self) -> None:
        assert self._forward._cache.num_blocks == 128
        assert torch.is_inference_mode_enabled()
        self._told("prepare")

    def run(self, batch: InputBatch, plan: Any) -> Tensor:
        self._told("run")
        return super().run(batch, plan)


def test_the_executor_prepares_once_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the second GPU of a machine, kernels were launched on the first: threads have a current
    device each, and nobody had set it.
    """
    calls: list[str] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        calls.append(f"in {device}")
        yield
        calls.append("out")

    where = "deployments.execution.model_executor"
    monkeypatch.setattr(f"{where}.on_device", on_device)
    monkeypatch.setattr(
        f"{where}.choose_tapes", lambda *given: lambda forward: Watched(forward, calls.append)
    )
    executor = make_executor(make_model("llama"))
    assert calls == ["in cpu", "prepare", "out"]
    run(executor, [greedy(make_prompt(5), "mine", max_tokens=2)])
    assert calls[3:] == ["in cpu", "run", "out"] * 2
