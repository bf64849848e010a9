"""The loop body of a replica: schedule, execute, update. Synchronous; threads and time come from
outside.

    engine thread   | schedule n | model n ............. | update n, record n | schedule n + 1 | ...
    event loop      | tokens of n - 1 to their readers |                      | tokens of n ...

`execute` is one call and not a launch and a collect. What does not depend on the tokens of a step
and costs anything, the way of the tokens before to their clients, runs beside the model already: on
the event loop's thread, while torch works without the interpreter's lock. What is left on this
thread is schedule, update and record, 3 us a running request; of those only the record could wait
until the next step runs, 0.4 us. A step planned before the tokens of the last are known would save
the rest, at the price of rows with unknown tokens, of steps computed for requests that have ended,
and of aborts and failures one step late. That pays where a step takes a few milliseconds, not here.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from deployments.config import CacheConfig, SchedulerConfig
from deployments.engine.block_pool import BlockPool
from deployments.engine.clock import Clock
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import (
    ModelLimits,
    ModelOutput,
    OutOfDeviceMemory,
    RequestOutput,
    SchedulerOutput,
)
from deployments.engine.scheduler import Scheduler
from deployments.engine.stats import (
    EngineObserver,
    StepLog,
    StepStats,
    chunk_records,
    decode_records,
    step_tokens,
)
from deployments.engine.step_budget import FixedBudget, ShrinkingBudget
from deployments.engine.step_scheduler import StepScheduler
from deployments.protocol import EngineStats, ErrorInfo, ErrorKind, GenerateRequest

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""So many steps may raise in a row before the engine gives itself up."""
NUM_LOGGED_STEPS = 1024


class StepExecutor(Protocol):
    """What an engine needs of an executor: the limits of its model, and the tokens of a step."""

    @property
    def limits(self) -> ModelLimits: ...

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        """Compute a step and sample where a row asks for it.

        Raises:
            OutOfDeviceMemory: the step does not fit; nothing of it counts, and a smaller one may.
        """
        ...


class EngineFailed(RuntimeError):
    """Too many steps failed in a row; the engine cannot go on."""


def _log_chunks(step_index: int, step: SchedulerOutput) -> None:
    """One line for each prefill chunk: proof of their order, and of which were forced."""
    for row in step.scheduled[step.num_decode_tokens :]:
        logger.debug(
            "step %d: %s tokens [%d, %d) %s%s",
            step_index,
            row.request.request_id,
            row.num_computed_tokens,
            row.num_computed_tokens + row.num_scheduled_tokens,
            row.reason.value,
            " forced" if row.is_forced else "",
        )


class Engine:
    """A scheduler and an executor, stepped together.

    Args:
        scheduler: decides what a step computes.
        executor: computes it.
        clock: where time comes from.
        budget: the scheduler's; made smaller where the device has too little memory.
        observers: are told of steps and ends.
        num_logged_steps: how many of the last steps are kept.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: StepExecutor,
        clock: Clock,
        budget: ShrinkingBudget,
        observers: Sequence[EngineObserver] = (),
        num_logged_steps: int = NUM_LOGGED_STEPS,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._observers = tuple(observers)
        self._budget = budget
        self._num_failed_in_a_row = 0
        self.step_log = StepLog(num_logged_steps)

    @classmethod
    def build(
        cls,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        executor: StepExecutor,
        clock: Clock,
        observers: Sequence[EngineObserver] = (),
    ) -> Engine:
        """An engine over a loaded model, composed from the configuration."""
        limits = executor.limits
        kv = KVCacheManager(
            BlockPool(limits.num_blocks), limits.block_size, cache.enable_prefix_caching
        )
        budget = ShrinkingBudget(FixedBudget(scheduler.token_budget))
        core = Scheduler(scheduler, limits, kv, budget, clock)
        return cls(core, executor, clock, budget, observers)

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to step for."""
        return self._scheduler.has_requests

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefused: it can never be served, or not now.
        """
        self._scheduler.add(request, seed=secrets.randbits(63))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free what it holds, at any moment between two steps or within one."""
        return self._count(self._scheduler.abort(request_id))

    def fail_all(self, error: ErrorInfo) -> list[RequestOutput]:
        """End every request with an error."""
        outputs = [
            self._scheduler.fail(request_id, error) for request_id in self._scheduler.request_ids
        ]
        return self._count_all(output for output in outputs if output is not None)

    def find_hold_s(self) -> float:
        """For how many seconds to wait for more prompts before the next step; 0 almost always."""
        until_s = self._scheduler.find_hold_until_s()
        return 0.0 if until_s is None else max(0.0, until_s - self._clock.now())

    def step(self, drain_commands: Callable[[], None] = lambda: None) -> list[RequestOutput]:
        """Run one step, and return what it means to each request's reader.

        `drain_commands` is called once the model has run and before its tokens are booked, so that
        a request aborted meanwhile gets none of them.

        Raises:
            EngineFailed: the executor raised in MAX_FAILED_STEPS steps in a row.
        """
        started_s = self._clock.now()
        step = self._scheduler.schedule()
        scheduled_s = self._clock.now()
        try:
            result = self._executor.execute(step)
        except OutOfDeviceMemory as error:
            return self._after_out_of_memory(step, error)
        except Exception as error:
            return self._after_failure(step, error)
        self._num_failed_in_a_row = 0
        self._budget.note_step_fitted()
        drain_commands()
        executed_s = self._clock.now()
        outputs = self._scheduler.update_from_output(step, result)
        self._log_step(step, started_s, scheduled_s, executed_s)
        return self._count_all(outputs)

    def _after_failure(self, step: SchedulerOutput, error: Exception) -> list[RequestOutput]:
        self._num_failed_in_a_row += 1
        logger.error("a step of %d requests failed", len(step.scheduled), exc_info=error)
        for observer in self._observers:
            observer.on_failed_step()
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineFailed(
                f"{MAX_FAILED_STEPS} steps failed in a row, the last with: {error!r}"
            ) from error
        info = ErrorInfo(
            ErrorKind.ENGINE, "the engine failed while it ran this request; it may be sent again"
        )
        return self._count_all(self._scheduler.fail_step(step, info))

    def _after_out_of_memory(
        self, step: SchedulerOutput, error: OutOfDeviceMemory
    ) -> list[RequestOutput]:
        """Nothing of the step was booked, so the next one computes the same with fewer tokens. Rows
        it has no room for keep their blocks: giving those up would free no memory of the device.
        """
        self.step_log.num_out_of_memory += 1
        logger.warning("a step of %d tokens is out of memory: %s", step.num_tokens, error)
        if step.num_tokens > 1:
            self._budget.shrink_below(step.num_tokens)
            return []
        info = ErrorInfo(
            ErrorKind.OVERLOADED,
            "the device has too little memory left for this request, even alone and one token at a "
            "time: try again later, or shorten the prompt",
        )
        return self._count_all(self._scheduler.fail_step(step, info))

    def _log_step(
        self, step: SchedulerOutput, started_s: float, scheduled_s: float, executed_s: float
    ) -> None:
        stats = StepStats(
            index=self.step_log.num_steps,
            started_s=started_s,
            schedule_s=scheduled_s - started_s,
            execute_s=executed_s - scheduled_s,
            update_s=self._clock.now() - executed_s,
            num_prefill_tokens=step.num_prefill_tokens,
            num_decode_tokens=step.num_decode_tokens,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=self._scheduler.num_free_blocks,
            num_preempted=len(step.preempted),
            tokens=step_tokens(step),
            decodes=decode_records(step),
            prefills=chunk_records(step.scheduled[step.num_decode_tokens :]),
        )
        self.step_log.add(stats)
        for observer in self._observers:
            observer.on_step(stats)
        if logger.isEnabledFor(logging.DEBUG):
            _log_chunks(self.step_log.num_steps, step)

    def _count(self, output: RequestOutput | None) -> RequestOutput | None:
        if output is not None and output.finish_reason is not None:
            self.step_log.num_finished[output.finish_reason.value] += 1
            self.step_log.num_cached_tokens += output.num_cached_tokens
            if output.timings is not None:
                for observer in self._observers:
                    observer.on_end(output.finish_reason, output.timings)
        return output

    def _count_all(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        counted = list(outputs)
        for output in counted:
            if output.finish_reason is not None:
                self._count(output)
        return counted

    def stats(self) -> EngineStats:
        """The state at this moment."""
        log = self.step_log
        return EngineStats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_free_blocks=self._scheduler.num_free_blocks,
            num_blocks=self._executor.limits.num_blocks - 1,
            num_steps=log.num_steps,
            num_prefill_tokens=log.num_prefill_tokens,
            num_decode_tokens=log.num_decode_tokens,
            num_cached_tokens=log.num_cached_tokens,
            num_preemptions=log.num_preemptions,
            num_forced_chunks=log.num_forced_chunks,
            num_finished=dict(log.num_finished),
        )

    def check_integrity(self) -> None:
        """Compare all records of the core.

        Raises:
            IntegrityError: they contradict each other.
        """
        self._scheduler.check_integrity()
