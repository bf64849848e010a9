"""One simulated replica: an engine on a clock of its own, and how its next steps are made.

    quiet steps      all who run decode and nobody may start: nothing is decided until one of them
                     ends, so they are booked together, and cut short if somebody arrives
    a joint step     the scheduler decides the prompt chunks; the decodes go along, booked together
    an engine step   all else, such as preemption: the engine's own step, row by row

All three come to the same; most steps of a fleet are of the first two. Owns which it is. What a
step does to decodes is the business of `sim_decodes`; when things happen, the fleet's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.outputs import ModelOutput, RequestOutput, SchedulerOutput
from deployments.engine.request import Request
from deployments.engine.step_scheduler import StepScheduler
from deployments.execution.cost_model import CostModel
from deployments.execution.sim_executor import SAMPLED_TOKEN_ID
from deployments.protocol import GenerateRequest
from loadtest.sim_decodes import RunningDecodes
from loadtest.sim_watch import QuietRun, ReplicaWatch, SimStep

MAX_QUIET_STEPS = 64
"""Looked ahead at once: whoever arrives ends them, and what was looked at beyond is in vain."""


class SimScheduler(StepScheduler, Protocol):
    """A scheduler whose decodes can be booked together."""

    @property
    def running(self) -> Sequence[Request]:
        """Who runs, most urgent first: a live view."""
        ...

    def may_start_anybody(self) -> bool:
        """Whether anybody who waits may start in the next step, or take the place of others."""
        ...

    def schedule_beside(
        self, num_decodes: int, take_blocks: Callable[[], None]
    ) -> SchedulerOutput | None:
        """The prompt chunks of a step that all decodes are in; None if more is to be decided.

        Args:
            num_decodes: of the step.
            take_blocks: takes the decodes' blocks; called before chunks are chosen, if they are.
        """
        ...

    def finish_whole(self, request: Request) -> RequestOutput:
        """End a request that has all its tokens."""
        ...


class SimReplica:
    """A replica of a fleet.

    Args:
        engine: over `scheduler`, on `clock`.
        watch: is told of every step, however it is made.
        decodes: None: each step is the engine's own.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: SimScheduler,
        clock: VirtualClock,
        cost_model: CostModel,
        watch: ReplicaWatch,
        decodes: RunningDecodes | None,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._clock = clock
        self._cost_model = cost_model
        self._watch = watch
        self._decodes = decodes
        self._outputs: list[RequestOutput] = []
        self._quiet_start_s = 0.0
        self._quiet_ends_s: list[float] = []

    @property
    def num_waiting(self) -> int:
        """Requests that it has and, as of its last step, does not run."""
        return self._watch.num_waiting

    @property
    def num_preemptions(self) -> int:
        """So far."""
        return self._engine.step_log.num_preemptions

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; not while a step runs.

        Raises:
            RequestRefused: it can never be served, or not now.
        """
        self._engine.add(request)

    def find_hold_s(self) -> float:
        """For how many seconds to wait for more prompts before the next step; 0 almost always."""
        return self._engine.find_hold_s()

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to step for."""
        return self._engine.has_requests

    def advance_to(self, now_s: float) -> None:
        """It is so late."""
        self._clock.advance_to(now_s)

    def begin(self) -> float:
        """Begin the next step, or several quiet ones; returns when the last of them ends."""
        if self._decodes is None:
            return self._step_engine()
        return (
            self._begin_quiet_steps(self._decodes)
            or self._step_jointly(self._decodes)
            or self._step_engine()
        )

    def cut_short(self, now_s: float) -> float | None:
        """Somebody has arrived: the quiet steps end with the one that runs now. Returns when; None
        if it runs no quiet steps, so that nothing changes.
        """
        ends_s = self._quiet_ends_s
        if not ends_s:
            return None
        del ends_s[bisect_right(ends_s, now_s) + 1 :]
        return ends_s[-1]

    def end(self) -> list[RequestOutput]:
        """What ended just now; returns what it means to each request's reader."""
        if self._decodes is not None and self._quiet_ends_s:
            return self._end_quiet_steps(self._decodes)
        outputs, self._outputs = self._outputs, []
        return outputs

    # --- the three ways ---------------------------------------------------------------------------

    def _begin_quiet_steps(self, decodes: RunningDecodes) -> float | None:
        num_decodes = len(decodes)
        if num_decodes == 0 or num_decodes < len(self._scheduler.running):
            return None
        num_steps = decodes.find_num_steps(MAX_QUIET_STEPS)
        if num_steps == 0 or self._scheduler.may_start_anybody():
            return None
        start_s = self._quiet_start_s = self._clock.now()
        steps_s = self._cost_model.decode_steps_s(decodes.shape(), num_steps)
        self._quiet_ends_s = list(accumulate(steps_s, initial=start_s))[1:]
        self._watch.num_waiting = self._scheduler.num_waiting
        return self._quiet_ends_s[-1]

    def _end_quiet_steps(self, decodes: RunningDecodes) -> list[RequestOutput]:
        ends_s, self._quiet_ends_s = self._quiet_ends_s, []
        num_decodes = len(decodes)
        decodes.take_blocks(len(ends_s))
        ended = self._book(decodes, ends_s)
        run = QuietRun(self._quiet_start_s, ends_s, num_decodes, len(ended))
        self._watch.on_quiet_steps(run, self._scheduler.num_free_blocks)
        return ended

    def _step_jointly(self, decodes: RunningDecodes) -> float | None:
        num_decodes = len(decodes)
        if num_decodes == 0 or decodes.find_num_steps(1) == 0:
            return None
        scheduler, start_s = self._scheduler, self._clock.now()
        chunks = scheduler.schedule_beside(num_decodes, lambda: decodes.take_blocks(1))
        if chunks is None:
            return None
        rows = [(row.num_scheduled_tokens, row.num_computed_tokens) for row in chunks.scheduled]
        shape = replace(decodes.shape(), prefills=tuple(rows))
        self._clock.advance(self._cost_model.step_s(shape))
        end_s = self._clock.now()
        self._outputs = self._book(decodes, [end_s])
        sampling = [row.request for row in chunks.scheduled if row.samples_token]
        tokens = {request.request_id: SAMPLED_TOKEN_ID for request in sampling}
        self._outputs += scheduler.update_from_output(chunks, ModelOutput(tokens))
        self._join(decodes, sampling)
        self._watch.on_sim_step(
            SimStep(
                start_s,
                end_s - start_s,
                chunks.num_prefill_tokens,
                num_decodes,
                scheduler.num_running,
                scheduler.num_waiting,
                scheduler.num_free_blocks,
            )
        )
        return end_s

    def _step_engine(self) -> float:
        if self._decodes is not None:
            self._decodes.leave_all()
        self._outputs = self._engine.step()
        if self._decodes is not None:
            self._join(self._decodes, self._scheduler.running)
        return self._clock.now()

    def _book(self, decodes: RunningDecodes, ends_s: Sequence[float]) -> list[RequestOutput]:
        ended = decodes.book(ends_s)
        if len(ended) > 1:
            ended = [request for request in self._scheduler.running if request in ended]
        return [self._scheduler.finish_whole(request) for request in ended]

    def _join(self, decodes: RunningDecodes, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.is_decode and not request.is_finished:
                decodes.join(request)
