"""Recorded decode steps: padding, fixed memory, which steps are replayed, and what happens where
nothing can be recorded. A double replays in place of a CUDA graph: it computes again, over the
same fixed inputs.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    greedy,
    make_executor,
    make_model,
    make_prompt,
    run,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.execution.attention.backend import AttentionCall
from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.input_batch import NULL_TABLE, BatchRow, InputBatch
from deployments.execution.kv_cache import LayerCache
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_forward import ModelForward
from deployments.execution.static_plans import StaticPlans, StaticShape
from deployments.execution.step_runner import (
    EagerRunner,
    GraphedRunner,
    Replay,
    StepRunner,
    choose_graphs,
    graph_sizes,
)

CPU = torch.device("cpu")
LARGEST = StaticShape(9, 0, MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)


@dataclass
class Held:
    """A plan in a fixed place."""

    batch: InputBatch


class HeldPlans:
    """The reference backend, with plans that can be replaced where they stand."""

    name = "held"

    def __init__(self) -> None:
        self._reference = ReferenceAttention()

    def supports(self, spec: object) -> bool:
        return True

    def plan(self, batch: InputBatch, windows: Collection[int | None]) -> Held:
        return Held(batch)

    def attend(self, call: AttentionCall, cache: LayerCache, plan: Held) -> Tensor:
        return self._reference.attend(call, cache, plan.batch)

    def plan_kind(self, plan: Held) -> int:
        return 0

    def make_static(self, shape: StaticShape) -> Held:
        rows = tuple(BatchRow(index, 1, 0, NULL_TABLE) for index in range(shape.num_rows))
        nothing = torch.empty(0, dtype=torch.int64)
        counts = (len(rows), (), (), shape.block_size)
        return Held(InputBatch(nothing, nothing, nothing, nothing, rows, *counts))

    def fill_static(self, static: Held, plan: Held) -> None:
        static.batch = plan.batch


class Again:
    """Records by remembering; counts."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        self.num_recorded += 1
        out = compute()

        def replay() -> Tensor:
            self.num_replayed += 1
            return out.copy_(compute())

        return replay


class CannotRecord:
    """As where a kernel is not allowed in a graph."""

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")


def held() -> Any:
    return HeldPlans()


def triton() -> Any:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from tiny_models import _COMMON

    from deployments.execution.attention.triton_backend import TritonAttention
    from deployments.execution.kv_cache import LayerSpec

    dim = _COMMON["head_dim"]
    return TritonAttention([LayerSpec(4, 2, dim, dim, None, None, False)], torch.float32, CPU, 1)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], ModelExecutor]:
    """Makes an executor over a backend and a recorder; without one it runs plainly."""

    def made(backend: Any, recorder: Any) -> ModelExecutor:
        where = "deployments.execution.model_executor"
        monkeypatch.setattr(f"{where}.choose_backend", lambda *given: backend)

        def runner(forward: ModelForward) -> StepRunner:
            if recorder is None:
                return EagerRunner(forward)
            return GraphedRunner(forward, backend, recorder, LARGEST)

        monkeypatch.setattr(f"{where}.choose_tapes", lambda *given: runner)
        return make_executor(make_model("llama"))

    return made


def test_graph_sizes_reach_the_most_rows() -> None:
    """Every number of decodes has a size to be padded to, the largest included."""
    assert graph_sizes(1) == (1,)
    assert graph_sizes(9) == (1, 2, 4, 8, 9)
    assert graph_sizes(24) == (1, 2, 4, 8, 16, 24)


@pytest.mark.parametrize(
    ("backend", "count"), [*((held, count) for count in (1, 2, 3, 5, 9)), (triton, 3)]
)
def test_replayed_decodes_are_the_plain_ones(make: Any, backend: Any, count: int) -> None:
    """So many decodes, padded, replayed from fixed memory: the same tokens and logits, while rows
    come and go and blocks are added.
    """
    requests = [
        greedy(make_prompt(5 + 3 * i, i), f"r{i}", max_tokens=4 + i % 4) for i in range(count)
    ]
    recorder = Again()
    plain = run(make(backend(), None), requests, max_num_seqs=9)
    graphed = run(make(backend(), recorder), requests, max_num_seqs=9)
    for request in requests:
        assert graphed.tokens(request.request_id) == plain.tokens(request.request_id)
        torch.testing.assert_close(
            graphed.logits[request.request_id],
            plain.logits[request.request_id],
            atol=1e-5,
            rtol=1e-5,
        )
    assert 0 < recorder.num_recorded <= 5
    assert recorder.num_replayed >= 3


def test_steps_with_chunks_run_plainly(make: Any) -> None:
    """A recording holds decodes alone: prompts that arrive meanwhile are computed as they come."""
    recorder = Again()
    executor = make(HeldPlans(), recorder)
    late = greedy(make_prompt(30, 7), "late", max_tokens=2)

    def arrive(engine: Any, step: int) -> None:
        if step == 3:
            engine.add(late)

    first = greedy(make_prompt(9), "first", max_tokens=12)
    mixed = run(executor, [first], arrive, chunk_size=8)
    assert mixed.num_mixed_steps >= 3
    alone = run(make(HeldPlans(), None), [first])
    assert mixed.tokens("first") == alone.tokens("first")
    assert recorder.num_replayed < mixed.engine.step_log.num_steps


def test_without_recordings_decodes_run_plainly(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that cannot be recorded is served all the same, and the log says so once."""
    request = greedy(make_prompt(9), "mine", max_tokens=6)
    with caplog.at_level(logging.WARNING):
        got = run(make(HeldPlans(), CannotRecord()), [request])
    assert got.tokens("mine") == run(make(HeldPlans(), None), [request]).tokens("mine")
    assert caplog.text.count("without CUDA graphs") == 1


class Forgets:
    """Replays as a CUDA graph does, which keeps no tensor that it reads."""

    def __init__(self) -> None:
        self.read: list[weakref.ref[Tensor]] = []

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        cells = [cell.cell_contents for cell in compute.__closure__ or ()]  # type: ignore[attr-defined]
        self.read += [weakref.ref(held) for held in cells if isinstance(held, Tensor)]
        out = compute()
        return lambda: out


def test_a_recording_keeps_what_it_reads(make: Any) -> None:
    """A graph that outlived the indices of its rows read whatever came to lie there."""
    recorder = Forgets()
    executor = make(HeldPlans(), recorder)
    run(executor, [greedy(make_prompt(9), "mine", max_tokens=4)])
    gc.collect()
    assert len(recorder.read) >= 4
    assert all(held() is not None for held in recorder.read)
    executor.close()


class HasNoMemory:
    """As where a graph's pool does not fit."""

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory_while_recording_is_told(make: Any) -> None:
    """It was taken for a model that cannot be recorded, and recordings were off for good."""
    executor = make(HeldPlans(), HasNoMemory())
    runner = executor._forward._runner
    batch = InputBatch.build([], BLOCK_SIZE, CPU, 1)
    with pytest.raises(torch.OutOfMemoryError):
        runner.run(batch, HeldPlans().plan(batch, ()))
    assert runner._sizes


def test_graphs_are_for_gpus_whose_backend_has_plans_for_them() -> None:
    """On a CPU, switched off, or with a backend that plans anew, nothing is recorded."""
    assert isinstance(HeldPlans(), StaticPlans)
    cuda = torch.device("cuda")
    assert choose_graphs("auto", HeldPlans(), CPU, LARGEST) is EagerRunner
    assert choose_graphs("off", HeldPlans(), cuda, LARGEST) is EagerRunner
    assert choose_graphs("auto", ReferenceAttention(), cuda, LARGEST) is EagerRunner


class RefusesToWait(TorchDispatchMode):
    """Fails what would make the host wait for a GPU."""

    WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing_within_a_forward(make: Any) -> None:
    """From the launch of a step to its logits nothing is read back, in prefill and in decode."""
    executor = make(triton(), None)
    forward = executor._forward.run

    def checked(scheduled: Any) -> Any:
        with RefusesToWait():
            return forward(scheduled)

    executor._forward.run = checked  # type: ignore[method-assign]
    got = run(executor, [greedy(make_prompt(20, i), f"r{i}") for i in range(3)], chunk_size=16)
    assert all(len(got.tokens(f"r{i}")) == 5 for i in range(3))
