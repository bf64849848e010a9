"""The running decodes of one replica, advanced together: the same records as row by row, sooner.

While blocks suffice, each step is to a decode as the one before, with a token more, until it ends.
So nothing is written for a token: a request remembers the step that it joined at, and gets its
tokens and their times when it ends or when somebody must look at it.

    step      0    1    2    3    4    5
    a         |----+----+----|                   joined at 0, its last token is that of step 2
    b                   |----+----+----+--       joined at 2: its tokens came at ends_s[2:]
    ends_s    .1   .2   .3   .4   .5             of all steps since the oldest member joined

Owns what a step does to decodes and their blocks. Does not decide whether there is a step.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.request import Request
from deployments.execution.cost_model import StepShape
from deployments.execution.sim_executor import SAMPLED_TOKEN_ID

MIN_KEPT_TIMES = 4096
"""Ends of steps that are kept whether anybody needs them or not."""


@dataclass(eq=False, slots=True)
class _Member:
    """A decode and the step it joined at; `block_due` is the step that needs its next block."""

    request: Request
    joined_at: int
    block_due: int
    has_left: bool = False


class RunningDecodes:
    """Decodes that all get a token in each step.

    Args:
        kv: their blocks.
        block_size: tokens of each.
        on_tokens: is told of tokens that a request got, and when.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        block_size: int,
        on_tokens: Callable[[str, Sequence[float]], None],
    ) -> None:
        self._kv = kv
        self._block_size = block_size
        self._on_tokens = on_tokens
        self._members: dict[Request, _Member] = {}
        self._num_steps = 0
        self._needing_block: dict[int, list[_Member]] = {}  # by the step that needs it
        self._ending: dict[int, list[_Member]] = {}  # by the first step they are not in
        self._ends_s = array("d")  # compact: a fleet has thousands of them at hand
        self._first_kept = 0  # the step that ends at _ends_s[0]
        self._max_kept = MIN_KEPT_TIMES
        self._num_context_tokens = 0  # that the next step reads, its own included
        # Lengths less the steps so far, the longest first: the order of decodes that grow alike.
        self._longest: list[tuple[int, int, _Member]] = []
        self._num_joined = 0

    def __len__(self) -> int:
        return len(self._members)

    def join(self, request: Request) -> None:
        """A request decodes from the next step on."""
        now, length = self._num_steps, len(request.token_ids)
        num_held_tokens = len(self._kv.block_table(request)) * self._block_size
        member = _Member(request, now, block_due=now + num_held_tokens + 1 - length)
        self._members[request] = member
        self._needing_block.setdefault(member.block_due, []).append(member)
        self._ending.setdefault(now + request.max_num_tokens - length, []).append(member)
        self._num_context_tokens += length
        self._num_joined += 1
        heapq.heappush(self._longest, (now - length, self._num_joined, member))

    def shape(self) -> StepShape:
        """Of the next step, without a chunk."""
        longest, num_decodes = self._longest, len(self._members)
        while longest and longest[0][2].has_left:
            heapq.heappop(longest)
        most = self._num_steps - longest[0][0] if longest else 0
        context = self._num_context_tokens
        return StepShape(num_decodes, context, skew_tokens=num_decodes * most - context)

    def find_num_steps(self, most: int) -> int:
        """For how many steps, up to `most`, blocks suffice and nobody ends before the last."""
        num_free = self._kv.num_free_blocks
        if num_free < len(self._members) * self._kv.num_blocks_for(most):
            most = min(most, self._block_size)  # whoever needs two blocks is told of one so far
        for step in range(self._num_steps, self._num_steps + most):
            num_free -= len(self._needing_block.get(step, ()))
            if num_free < 0:
                return step - self._num_steps
            if step + 1 in self._ending:
                return step + 1 - self._num_steps
        return most

    def take_blocks(self, num_steps: int) -> None:
        """Take the blocks that the next steps need; call once before they are booked."""
        for step in range(self._num_steps, self._num_steps + num_steps):
            for member in self._needing_block.pop(step, ()):
                if not member.has_left:
                    self._kv.append_block(member.request)
                    member.block_due = step + self._block_size
                    self._needing_block.setdefault(member.block_due, []).append(member)

    def book(self, ends_s: Sequence[float]) -> list[Request]:
        """Book steps that ended at these moments; returns who has all tokens now and left."""
        self._ends_s.extend(ends_s)
        self._num_steps += len(ends_s)
        self._num_context_tokens += len(self._members) * len(ends_s)
        ended = [each for each in self._ending.pop(self._num_steps, ()) if not each.has_left]
        for member in ended:
            self._leave(member)
        if len(self._ends_s) > self._max_kept:
            self._forget_times()
        return [member.request for member in ended]

    def leave_all(self) -> None:
        """Bring every request up to date; nobody is a member any more."""
        for member in list(self._members.values()):
            self._leave(member)

    def _leave(self, member: _Member) -> None:
        request = member.request
        member.has_left = True
        del self._members[request]
        num_new = self._num_steps - member.joined_at
        if num_new:
            self._give_tokens(request, self._ends_s[member.joined_at - self._first_kept :])
        self._num_context_tokens -= len(request.token_ids)

    def _give_tokens(self, request: Request, times_s: Sequence[float]) -> None:
        num_computed = request.num_computed_tokens
        request.num_computed_tokens += len(times_s)
        request.token_ids += [SAMPLED_TOKEN_ID] * len(times_s)
        self._kv.publish(request, num_computed)
        before_s = times_s[-2] if len(times_s) > 1 else request.last_token_s
        request.token_gap_s = None if before_s is None else times_s[-1] - before_s
        request.last_token_s = request.ready_since_s = times_s[-1]
        self._on_tokens(request.request_id, times_s)

    def _forget_times(self) -> None:
        """Drop the ends of steps that no member was in."""
        oldest = min((each.joined_at for each in self._members.values()), default=self._num_steps)
        del self._ends_s[: oldest - self._first_kept]
        self._first_kept = oldest
        self._max_kept = max(MIN_KEPT_TIMES, 2 * len(self._ends_s))
