"""Steps in which a scheduler has nothing to decide, booked together: the same records, sooner.

While every running request decodes, blocks suffice and nobody who waits may start, each step is the
one before with one more token for everybody, until one of them ends. Most steps of a fleet are such
steps. Owns when that is so and what it does to requests and blocks. As soon as anything is to be
decided, the scheduler decides it in a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from itertools import accumulate

from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import RequestOutput
from deployments.engine.request import Request
from deployments.engine.scheduler import Scheduler
from deployments.execution.cost_model import CostModel
from deployments.execution.sim_executor import SAMPLED_TOKEN_ID
from deployments.protocol import FinishReason

MAX_QUIET_STEPS = 64
"""Looked ahead at once: whoever arrives ends them, and what was looked at beyond is in vain."""


class QuietSteps:
    """The quiet steps of one scheduler.

    Args:
        running: its running requests, a live view.
        waiting: those that wait, a live view.
        kv: the blocks.
        may_start: whether anybody who waits may start in the next step.
        finish: ends a request that has all its tokens.
    """

    def __init__(
        self,
        running: Sequence[Request],
        waiting: Sized,
        kv: KVCacheManager,
        may_start: Callable[[], bool],
        finish: Callable[[Request], RequestOutput],
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._kv = kv
        self._may_start = may_start
        self._finish = finish

    def num_steps(self) -> int:
        """For how many steps from now on nothing is to be decided, if nobody arrives: until a
        request ends at the latest. 0 if there is something to decide now.
        """
        if not self._running or self._may_start():
            return 0
        for request in self._running:
            if not request.is_decode:
                return 0
        num_left = min([r.max_num_tokens - len(r.token_ids) for r in self._running])
        num_steps = min(num_left, MAX_QUIET_STEPS)
        most_new_blocks = len(self._running) * self._kv.num_blocks_for(num_steps)
        if most_new_blocks > self._kv.num_free_blocks:
            num_new_blocks = sum(self._num_new_blocks(num_steps))
            return num_steps if num_new_blocks <= self._kv.num_free_blocks else 0
        return num_steps

    def find_ends_s(self, cost_model: CostModel, start_s: float, num_steps: int) -> list[float]:
        """When each of these steps ends, if the first begins at `start_s`."""
        context = sum([request.num_computed_tokens + 1 for request in self._running])
        steps_s = cost_model.decode_steps_s(len(self._running), context, num_steps)
        return list(accumulate(steps_s, initial=start_s))[1:]

    @property
    def num_waiting(self) -> int:
        """Requests that wait while these steps run."""
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Of the pool."""
        return self._kv.num_free_blocks

    def request_ids(self) -> list[str]:
        """Of those who get a token in each of these steps."""
        return [request.request_id for request in self._running]

    def book(self, ends_s: Sequence[float]) -> list[RequestOutput]:
        """Book so many quiet steps, which ended at these moments, the last of them now; returns the
        outputs of the requests that have ended.
        """
        num_steps, last_s = len(ends_s), ends_s[-1]
        for request, num_new in zip(self._running, self._num_new_blocks(num_steps), strict=True):
            for _ in range(num_new):
                self._kv.append_block(request)
            num_computed = request.num_computed_tokens
            request.num_computed_tokens += num_steps
            request.token_ids += [SAMPLED_TOKEN_ID] * num_steps
            self._kv.publish(request, num_computed)
            before_s = ends_s[-2] if num_steps > 1 else request.last_token_s
            request.token_gap_s = None if before_s is None else last_s - before_s
            request.last_token_s = request.ready_since_s = last_s
        ended = [r for r in self._running if len(r.token_ids) >= r.max_num_tokens]
        return [self._finish(request) for request in ended]

    def _num_new_blocks(self, num_steps: int) -> list[int]:
        kv = self._kv
        num_more = num_steps - 1  # the token that the last step samples is in no block yet
        return [
            max(0, kv.num_blocks_for(request.num_tokens + num_more) - len(kv.block_table(request)))
            for request in self._running
        ]


class QuietScheduler(Scheduler):
    """The service's scheduler, whose quiet steps can be booked together."""

    def quiet_steps(self) -> QuietSteps:
        """Its quiet steps."""
        return QuietSteps(
            self._running, self._waiting, self._kv, self._may_start_anybody, self._end
        )

    def _end(self, request: Request) -> RequestOutput:
        return self._finish(request, FinishReason.LENGTH, token_id=SAMPLED_TOKEN_ID)

    def _may_start_anybody(self) -> bool:
        head = self._waiting.find_head(self._clock.now()) if self._waiting else None
        if head is None:
            return False
        is_full = len(self._running) >= self._config.max_num_seqs
        return not is_full or head.priority < self._running[-1].priority
