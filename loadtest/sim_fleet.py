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
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from deployments.engine.outputs import RequestOutput
from deployments.protocol import GenerateRequest, RequestRefused, SamplingParams
from deployments.replica_choice import EXPECTED_OUTPUT_TOKENS
from loadtest.measures import RequestRecord
from loadtest.routing_workload import Arrival, Choice
from loadtest.sim_replica import SimReplica

_UNKNOWN_LENGTH = SamplingParams(max_tokens=EXPECTED_OUTPUT_TOKENS)


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: GenerateRequest
    arrived_s: float
    added_s: float = 0.0
    token_times_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class _Place:
    """A replica's place in the fleet: what is on its way to it, and when it is next due."""

    replica: SimReplica
    inbox: list[_Open] = field(default_factory=list)
    due_s: float | None = None
    """When its step ends or it stops waiting for more prompts; None: it is idle."""
    is_stepping: bool = False

    @property
    def num_waiting(self) -> int:
        """Requests that it has and does not run."""
        return self.replica.num_waiting + len(self.inbox)


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
        self._places = [_Place(replica) for replica in replicas]
        self._choice = choice
        self._on_end = on_end
        self._open: dict[str, _Open] = {}
        self._due: list[tuple[float, int]] = []
        self._now_s = 0.0

    def num_waiting(self) -> int:
        """Requests that have arrived and run on no replica."""
        return sum([place.num_waiting for place in self._places])

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
            place = self._places[index]
            if place.due_s != due_s:
                continue  # somebody came before
            self._now_s = due_s
            self._deliver(place.replica)
            self._proceed(index)

    def _arrive(self, arrival: Arrival) -> None:
        self._now_s = arrival.at_s
        index = self._choose(arrival.request)
        opened = _Open(arrival.request, arrival.at_s)
        self._open[arrival.request.request_id] = opened
        place = self._places[index]
        place.inbox.append(opened)
        if not place.is_stepping:
            self._proceed(index)
        elif (end_s := place.replica.cut_short(arrival.at_s)) is not None:
            self._await(index, end_s)

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
        place = self._places[index]
        replica = place.replica
        replica.advance_to(self._now_s)
        if place.inbox:
            inbox, place.inbox = place.inbox, []
            for opened in inbox:
                self._add(replica, opened)
        hold_s = replica.find_hold_s()
        place.is_stepping = hold_s == 0.0 and replica.has_requests
        if place.is_stepping:
            self._await(index, replica.begin())
        elif hold_s > 0.0:
            # A moment later, or rounding could have it wait again for no time at all, for ever.
            self._await(index, math.nextafter(self._now_s + hold_s, math.inf))
        else:
            place.due_s = None

    def _await(self, index: int, due_s: float) -> None:
        self._places[index].due_s = due_s
        heappush(self._due, (due_s, index))

    def _add(self, replica: SimReplica, opened: _Open) -> None:
        opened.added_s = self._now_s
        try:
            replica.add(opened.request)
        except RequestRefused as refused:
            self._end(opened, queued_s=None, error=refused.info.kind.value)

    def take_tokens(self, request_id: str, times_s: Sequence[float]) -> None:
        """A request got tokens at these moments."""
        self._open[request_id].token_times_s.extend(times_s)

    def _deliver(self, replica: SimReplica) -> None:
        now_s, open_requests = self._now_s, self._open
        for output in replica.end():
            if output.token_id is not None:
                open_requests[output.request_id].token_times_s.append(now_s)
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
