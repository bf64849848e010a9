"""Drives a scheduler and a PagedFakeExecutor by hand, and checks all invariants in each step.

Between `schedule` and `update_from_output` anything may happen that happens in a replica: aborts,
arrivals, an executor that raises, a row without a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from doubles import PagedFakeExecutor, oracle_tokens
from schedule_checks import Before, StepChecks, Tracked

from deployments.config import SchedulerConfig
from deployments.engine.block_pool import BlockPool
from deployments.engine.clock import VirtualClock
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import ModelLimits, ModelOutput, RequestOutput, SchedulerOutput
from deployments.engine.scheduler import Scheduler
from deployments.engine.step_budget import FixedBudget
from deployments.protocol import (
    ErrorInfo,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    RequestRefused,
)

STEP_FAILED = ErrorInfo(ErrorKind.ENGINE, "the step failed")


@dataclass(frozen=True)
class Setup:
    """What a net is built over."""

    limits: ModelLimits
    config: SchedulerConfig
    enable_prefix_caching: bool = True
    eos_one_in: int = 0


@dataclass(frozen=True)
class Fate:
    """What happens to a step between being scheduled and being booked."""

    duration_s: float = 0.0
    raises: bool = False
    bad_row: int | None = None
    """Of the rows that sample, the one (modulo their number) that comes out unusable."""
    meanwhile: tuple[Callable[[], object], ...] = ()


class ScheduleNet:
    """A scheduler under watch. Every method raises where an invariant is broken."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = VirtualClock()
        limits = setup.limits
        self.kv = KVCacheManager(
            BlockPool(limits.num_blocks), limits.block_size, setup.enable_prefix_caching
        )
        budget = FixedBudget(setup.config.token_budget)
        self.scheduler = Scheduler(setup.config, limits, self.kv, budget, self.clock)
        self.executor = PagedFakeExecutor(limits, setup.eos_one_in)
        self.live: dict[str, Tracked] = {}
        self.num_steps = 0
        self.num_finished = 0
        self.num_preemptions = 0
        self._checks = StepChecks(setup.config, limits, self.kv)
        self._num_seeds = 0

    def add(self, incoming: GenerateRequest) -> bool:
        """Submit; false if it was refused, which must be right."""
        limits = self.setup.limits
        fits = 0 < len(incoming.prompt_token_ids) < limits.max_num_tokens
        self._num_seeds += 1
        try:
            self.scheduler.add(incoming, seed=self._num_seeds)
        except RequestRefused:
            assert not fits, "refused although it fits"
            return False
        assert fits, "accepted although it can never run"
        request = self.scheduler._requests[incoming.request_id]
        self.live[incoming.request_id] = Tracked(
            incoming, request, self._num_seeds, self.clock.now()
        )
        return True

    def abort(self, index: int) -> None:
        """End the live request at this place (modulo their number), if there is any."""
        if not self.live:
            return
        request_id = list(self.live)[index % len(self.live)]
        output = self.scheduler.abort(request_id)
        assert output is not None and output.finish_reason is FinishReason.ABORT
        assert output.token_id is None, "a token comes with an abort"
        self._book(output)
        assert self.scheduler.abort(request_id) is None, "aborted twice"

    def step(self, fate: Fate | None = None) -> SchedulerOutput:
        """One step, with all checks before, between and after."""
        fate = fate or Fate()
        before = Before.look(self.clock.now(), self.live.values())
        step = self.scheduler.schedule()
        self.num_steps += 1
        self.num_preemptions += len(step.preempted)
        for request in step.preempted:
            self.live[request.request_id].ready_since_s = request.arrival_s
        self._checks.check(before, step, self.live)
        self.clock.advance(fate.duration_s)
        if fate.raises:
            self._fail(step)
        else:
            self._finish_step(step, fate)
        self.scheduler.check_integrity()
        assert set(self.scheduler.request_ids) == set(self.live)
        return step

    def _finish_step(self, step: SchedulerOutput, fate: Fate) -> None:
        result = self._execute(step, fate)
        for event in fate.meanwhile:
            event()
        alive = [row for row in step.scheduled if row.request.request_id in self.live]
        alive = [row for row in alive if self.live[row.request.request_id].request is row.request]
        outputs = self.scheduler.update_from_output(step, result)
        for row in alive:
            self.live[row.request.request_id].ready_since_s = self.clock.now()
        answered = [output.request_id for output in outputs]
        sampled = [row.request.request_id for row in alive if row.samples_token]
        assert answered == sampled, "answers for other rows than those that sampled"
        for output in outputs:
            assert (output.token_id is None) == (output.request_id in result.errors)
            self._book(output)

    def _execute(self, step: SchedulerOutput, fate: Fate) -> ModelOutput:
        result = self.executor.execute(step)
        sampling = [row for row in step.scheduled if row.samples_token]
        if fate.bad_row is not None and sampling:
            row = sampling[fate.bad_row % len(sampling)]
            self.executor.scribble(row)
            del result.token_ids[row.request.request_id]
            result.errors[row.request.request_id] = "not a number"
        return result

    def _fail(self, step: SchedulerOutput) -> None:
        for row in step.scheduled:
            self.executor.scribble(row)
        outputs = self.scheduler.fail_step(step, STEP_FAILED)
        failed = [row.request.request_id for row in step.scheduled]
        assert [output.request_id for output in outputs] == failed
        for output in outputs:
            assert output.finish_reason is FinishReason.ERROR and output.error is STEP_FAILED
            self._book(output)

    def _book(self, output: RequestOutput) -> None:
        item = self.live[output.request_id]
        if output.token_id is not None:
            item.token_ids.append(output.token_id)
        if output.finish_reason is None:
            return
        del self.live[output.request_id]
        self.num_finished += 1
        setup = self.setup
        expected, reason = oracle_tokens(
            item.incoming, setup.limits, seed=item.seed, eos_one_in=setup.eos_one_in
        )
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            expected = expected[: len(item.token_ids)]
        else:
            assert output.finish_reason is reason
        assert item.token_ids == expected, f"{output.request_id}: not the oracle's tokens"

    def drain(self) -> None:
        """Run what is left; each request must end within a bound, and all blocks be free then."""
        items = self.live.values()
        work = sum(
            len(item.incoming.prompt_token_ids) + item.incoming.sampling_params.max_tokens
            for item in items
        )
        for _ in range(20 + 3 * work):
            if not self.live:
                break
            self.step(Fate(duration_s=0.001))
        assert not self.live, f"{sorted(self.live)} do not end"
        assert not self.scheduler.has_requests
        assert self.scheduler.num_free_blocks == self.setup.limits.num_blocks - 1


def run_fates(net: ScheduleNet, fates: Sequence[Fate]) -> None:
    """Step with each fate in turn, as long as there are requests."""
    for fate in fates:
        if net.live:
            net.step(fate)
