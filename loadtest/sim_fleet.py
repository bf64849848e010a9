"""Replicas on clocks of their own, driven event by event in the order of time.

Owns the order of events alone: a request reaches a replica when it arrives, a replica takes in what
has reached it when its step ends, readers and router see tokens when the step that made them ends.
What a step is and how long it takes is the engines' business; who gets a request, the choice's.

    replica 0   |---step---|---step---|      |--step--|
    replica 1      |------step------|--step--|
                      ^ arrives here: joins at the end of the step that runs
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.outputs import RequestOutput
from deployments.execution.cost_model import CostModel
from deployments.protocol import GenerateRequest, RequestRefused, SamplingParams
from deployments.replica_choice import EXPECTED_OUTPUT_TOKENS
from loadtest.measures import RequestRecord
from loadtest.routing_workload import Arrival, Choice
from loadtest.sim_quiet import QuietSteps
from loadtest.sim_watch import QuietRun, ReplicaWatch

_UNKNOWN_LENGTH = SamplingParams(max_tokens=EXPECTED_OUTPUT_TOKENS)


@dataclass(slots=True)
class SimReplica:
    """One engine with its clock, and what is on its way to it."""

    engine: Engine
    clock: VirtualClock
    watch: ReplicaWatch
    cost_model: CostModel
    quiet: QuietSteps | None
    """None: each step is made by itself."""
    inbox: list[_Open] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    due_s: float | None = None
    """When its step ends or it stops waiting for more prompts; None: it is idle."""
    is_stepping: bool = False
    quiet_start_s: float = 0.0
    quiet_ends_s: list[float] = field(default_factory=list)
    """Of the quiet steps that it runs, if it does."""

    @property
    def num_waiting(self) -> int:
        """Requests that it has and does not run."""
        return self.watch.num_waiting + len(self.inbox)


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: GenerateRequest
    arrived_s: float
    added_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request's record and how long it waited for its first step, in seconds since arrival; None
    if it was refused.
    """

    record: RequestRecord
    queued_s: float | None


class Fleet:
    """Replicas behind one router.

    Args:
        replicas: with clocks that stand no later than the first arrival.
        choice: which of them gets a request, by number; None where there is but one.
        on_end: called with each request as it ends.
    """

    def __init__(
        self,
        replicas: Sequence[SimReplica],
        choice: Choice | None,
        on_end: Callable[[EndedRequest], None],
    ) -> None:
        self._replicas = replicas
        self._choice = choice
        self._on_end = on_end
        self._open: dict[str, _Open] = {}
        self._due: list[tuple[float, int]] = []
        self._now_s = 0.0

    def num_waiting(self) -> int:
        """Requests that have arrived and run on no replica."""
        return sum([replica.num_waiting for replica in self._replicas])

    def run(self, arrivals: Iterable[Arrival]) -> float:
        """Serve all arrivals, given in order of time, to their ends; returns when the last one
        ended.
        """
        for arrival in arrivals:
            self._run_until(arrival.at_s)
            self._arrive(arrival)
        self._run_until(math.inf)
        return self._now_s

    def _run_until(self, moment_s: float) -> None:
        due = self._due
        while due and due[0][0] <= moment_s:
            due_s, index = heappop(due)
            replica = self._replicas[index]
            if replica.due_s != due_s:
                continue  # it waited for more prompts, and they came
            self._now_s = due_s
            self._deliver(replica)
            self._proceed(index)

    def _arrive(self, arrival: Arrival) -> None:
        self._now_s = arrival.at_s
        index = self._choose(arrival.request)
        opened = _Open(arrival.request, arrival.at_s)
        self._open[arrival.request.request_id] = opened
        replica = self._replicas[index]
        replica.inbox.append(opened)
        if replica.quiet_ends_s:
            self._cut_quiet_steps(index)
        elif not replica.is_stepping:
            self._proceed(index)

    def _choose(self, request: GenerateRequest) -> int:
        if self._choice is None:
            return 0
        # Nobody who routes knows how long an answer will be.
        return self._choice.choose(
            GenerateRequest(
                request.request_id,
                request.prompt_token_ids,
                _UNKNOWN_LENGTH,
                block_hashes=request.block_hashes,
            )
        )

    def _proceed(self, index: int) -> None:
        """Let a replica that runs no step take in what has come and begin its next one."""
        replica = self._replicas[index]
        replica.clock.advance_to(self._now_s)
        if replica.inbox:
            inbox, replica.inbox = replica.inbox, []
            for opened in inbox:
                self._add(replica, opened)
        engine = replica.engine
        if replica.quiet is not None and (num_steps := replica.quiet.num_steps()):
            replica.watch.num_waiting = replica.quiet.num_waiting
            replica.quiet_start_s = self._now_s
            replica.quiet_ends_s = replica.quiet.find_ends_s(
                replica.cost_model, self._now_s, num_steps
            )
            self._await(index, replica.quiet_ends_s[-1])
            return
        hold_s = engine.find_hold_s()
        replica.is_stepping = hold_s == 0.0 and engine.has_requests
        if replica.is_stepping:
            replica.outputs = engine.step()
            self._await(index, replica.clock.now())
        elif hold_s > 0.0:
            # A moment later, or rounding could have it wait again for no time at all, for ever.
            self._await(index, math.nextafter(self._now_s + hold_s, math.inf))
        else:
            replica.due_s = None

    def _await(self, index: int, due_s: float) -> None:
        self._replicas[index].due_s = due_s
        heappush(self._due, (due_s, index))

    def _cut_quiet_steps(self, index: int) -> None:
        """Somebody has arrived: what runs now ends, and then there is something to decide."""
        ends_s = self._replicas[index].quiet_ends_s
        del ends_s[bisect_right(ends_s, self._now_s) + 1 :]
        self._await(index, ends_s[-1])

    def _book_quiet_steps(self, replica: SimReplica, quiet: QuietSteps) -> None:
        ends_s, replica.quiet_ends_s = replica.quiet_ends_s, []
        replica.clock.advance_to(self._now_s)
        request_ids = quiet.request_ids()
        for request_id in request_ids:
            self._open[request_id].token_times_s.extend(ends_s)
        ended = quiet.book(ends_s)
        replica.watch.on_quiet_steps(
            QuietRun(replica.quiet_start_s, ends_s, len(request_ids), len(ended)),
            quiet.num_free_blocks,
        )
        for output in ended:
            self._close(output)

    def _add(self, replica: SimReplica, opened: _Open) -> None:
        opened.added_s = self._now_s
        try:
            replica.engine.add(opened.request)
        except RequestRefused as refused:
            self._end(opened, queued_s=None, error=refused.info.kind.value)

    def _deliver(self, replica: SimReplica) -> None:
        if replica.quiet is not None and replica.quiet_ends_s:
            self._book_quiet_steps(replica, replica.quiet)
        outputs, replica.outputs = replica.outputs, []
        now_s, open_requests = self._now_s, self._open
        for output in outputs:
            opened = open_requests[output.request_id]
            if output.token_id is not None:
                opened.token_times_s.append(now_s)
            if output.timings is not None:
                self._close(output)

    def _close(self, output: RequestOutput) -> None:
        """A request has ended on its replica."""
        opened = self._open[output.request_id]
        waited_s = 0.0 if output.timings is None else output.timings.queued_s
        queued_s = opened.added_s + waited_s - opened.arrived_s
        self._end(opened, queued_s, num_cached_tokens=output.num_cached_tokens)

    def _end(
        self,
        opened: _Open,
        queued_s: float | None,
        error: str | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        request = opened.request
        del self._open[request.request_id]
        if self._choice is not None:
            self._choice.end(request)
        record = RequestRecord(
            intended_s=opened.arrived_s,
            sent_s=opened.arrived_s,
            num_prompt_tokens=len(request.prompt_token_ids),
            token_times_s=opened.token_times_s,
            end_s=self._now_s,
            num_cached_tokens=num_cached_tokens,
            error=error,
            priority=request.priority,
        )
        self._on_end(EndedRequest(record, queued_s))
