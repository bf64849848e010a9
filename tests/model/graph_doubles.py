"""Doubles of what records decode steps: plans that stand in fixed memory, and recorders that
compute again in place of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, MAX_MODEL_LEN, make_executor, make_model, run
from torch import Tensor

from deployments.execution.attention.backend import AttentionCall
from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.graph_recorder import Replay
from deployments.execution.input_batch import NULL_TABLE, BatchRow, InputBatch
from deployments.execution.kv_cache import LayerCache
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_forward import ModelForward
from deployments.execution.static_plans import StaticShape
from deployments.execution.step_runner import EagerRunner, GraphedRunner, Room, StepRunner
from deployments.protocol import GenerateRequest

LARGEST = StaticShape(9, 0, MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)
AMPLE = Room(lambda: 1, 0)
MakeExecutor = Callable[..., ModelExecutor]
"""Of a backend, a recorder and, if need be, a room for recordings."""


@dataclass
class Held:
    """A plan in a fixed place."""

    batch: InputBatch
    kept: Tensor = field(default_factory=lambda: torch.zeros(1))
    """Stands for the tables of a real one."""


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

    def plan_kinds(self, shape: StaticShape) -> Sequence[int]:
        return (0,)

    def make_static(self, shape: StaticShape) -> Held:
        rows = tuple(BatchRow(index, 1, 0, NULL_TABLE) for index in range(shape.num_rows))
        nothing = torch.empty(0, dtype=torch.int64)
        counts = (len(rows), (), (), shape.block_size)
        return Held(InputBatch(nothing, nothing, nothing, nothing, rows, *counts))

    def fill_static(self, static: Held, plan: Held) -> None:
        static.batch = plan.batch


class LongAndShort(HeldPlans):
    """Plans of decodes of more than 20 keys, where few enough, are of a kind of their own."""

    def plan_kind(self, plan: Held) -> int:
        rows = plan.batch.rows
        return int(len(rows) <= 4 and max(row.num_keys for row in rows) > 20)

    def plan_kinds(self, shape: StaticShape) -> Sequence[int]:
        return (0, 1) if shape.num_rows <= 4 else (0,)


class Again:
    """Records by remembering; counts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_replayed = 0

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        out = compute()
        self.sizes.append(len(out))

        def replay() -> Tensor:
            self.num_replayed += 1
            return out.copy_(compute())

        return replay


def executor_maker(monkeypatch: pytest.MonkeyPatch) -> MakeExecutor:
    """Makes an executor over a backend and a recorder; without one it runs plainly."""

    def made(backend: Any, recorder: Any, room: Room = AMPLE) -> ModelExecutor:
        where = "deployments.execution.model_executor"
        monkeypatch.setattr(f"{where}.choose_backend", lambda *given: backend)

        def runner(forward: ModelForward) -> StepRunner:
            if recorder is None:
                return EagerRunner(forward)
            return GraphedRunner(forward, backend, recorder, LARGEST, room)

        monkeypatch.setattr(f"{where}.choose_tapes", lambda *given: runner)
        return make_executor(make_model("llama"))

    return made


def plain_tokens(make: Any, request: GenerateRequest) -> list[int]:
    """Of a request alone, without recordings."""
    return run(make(HeldPlans(), None), [request]).tokens(request.request_id)
