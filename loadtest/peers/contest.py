"""All turns of a benchmark: starts the services, lets them take turns, ends them.

Owns which service runs when. One is measured at a time; the others are paused meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from loadtest.load_prompts import Prompts
from loadtest.peers.process import ServerFailed
from loadtest.peers.services import SETTLE_S, Service
from loadtest.peers.summary import Entrant
from loadtest.peers.turns import Quiet, Turn, TurnResult, interleaved, no_wait, take_turn
from loadtest.peers.workloads import (
    OWN_CAPACITY_SHARES,
    Sizes,
    Workload,
    at_rate,
    build_workload,
)

CAPACITY, CAPACITY_FIGURE = "W2cap", "requests/s"
WARM_UPS = ("W5", "W6chunk")
"""Played once after a start and not counted: caches are filled, kernels made."""
WARM_UP_ROUND = 9_000
"""Its prompts are those of no round."""


@dataclass(frozen=True, slots=True)
class ContestSettings:
    """What is played.

    Args:
        workloads: by name, in their order within a round.
        num_rounds: how often each is played.
        sizes: of the workloads.
        max_others: cores that others may use before a turn is dropped.
    """

    workloads: tuple[str, ...]
    num_rounds: int
    sizes: Sizes
    max_others: float = 0.1


@dataclass(frozen=True, slots=True)
class PromptForms:
    """The same prompts in both forms, for services that take token ids and those that do not."""

    token_ids: Prompts
    text: Prompts

    def fit(self, service: Service) -> Prompts:
        """In the form that a service takes."""
        return self.token_ids if service.has_token_ids else self.text


@dataclass(slots=True)
class Contest:
    """The services' turns.

    Args:
        settings: what is played.
        services: in the order of their turns; the first is ours.
        prompts: that all are asked.
        tell: is given a line on each start and turn.
        quiet: entered around each turn and start.
    """

    settings: ContestSettings
    services: Sequence[Service]
    prompts: PromptForms
    tell: Callable[[str], None]
    quiet: Quiet = no_wait
    results: list[TurnResult] = field(default_factory=list)
    entrants: list[Entrant] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Who did not come up or ended on the way, and why."""

    def run(self, on_turn: Callable[[], object] = lambda: None) -> None:
        """Play everything; `on_turn` is called after each turn, with the results so far in place.
        A service that does not come up, or ends on the way, is left out from there on, and told.

        Raises:
            ServerFailed: ours did not come up, and there is nothing to compare with.
        """
        with ExitStack() as ends:
            # Each is ended, also when another's end is interrupted.
            for service in self.services:
                ends.callback(service.end)
            ours, *others = self.services
            if not self._start(ours):
                raise ServerFailed(self.left_out[ours.name])
            present = {each.name: each for each in [ours, *filter(self._start, others)]}
            turns = interleaved(list(present), self.settings.workloads, self.settings.num_rounds)
            for turn in turns:
                service = present[turn.service]
                if service.name not in self.left_out and service.can_take(turn.workload):
                    self._take(turn, service)
                    on_turn()

    def _start(self, service: Service) -> bool:
        self.tell(f"starting {service.name}")
        try:
            with self.quiet():
                start_s = service.start()
                for workload in WARM_UPS:
                    self._warm_up(service, workload)
                service.pause()
        except ServerFailed as error:
            self._leave_out(service, error)
            return False
        self.tell(f"{service.name} was ready after {start_s:.0f} s")
        entrant = Entrant(service.name, service.dtype, service.weight_bytes, start_s)
        self.entrants.append(entrant)
        return True

    def _leave_out(self, service: Service, error: ServerFailed) -> None:
        self.left_out[service.name] = str(error)
        self.tell(f"{service.name} is left out: {error}")
        service.end()

    def _warm_up(self, service: Service, name: str) -> None:
        workload = build_workload(name, self.settings.sizes, WARM_UP_ROUND)
        turn = Turn(WARM_UP_ROUND, name, service.name)
        prompts = self.prompts.fit(service)
        result = asyncio.run(take_turn(turn, service, workload, prompts, float("inf")))
        if result.num_failed:
            raise ServerFailed(f"{service.name} fails: {'; '.join(result.errors.values())}")

    def _take(self, turn: Turn, service: Service) -> None:
        try:
            workload = self._workload(turn)
            with self.quiet():
                service.resume()
                result = asyncio.run(self._settled(turn, service, workload))
                service.pause()
        except ServerFailed as error:
            self._leave_out(service, error)
            return
        self.results.append(result)
        self.tell(_line_of(result))

    async def _settled(self, turn: Turn, service: Service, workload: Workload) -> TurnResult:
        # What was due while it was paused (health checks, timers) is done before the turn.
        await asyncio.sleep(SETTLE_S)
        prompts = self.prompts.fit(service)
        return await take_turn(turn, service, workload, prompts, self.settings.max_others)

    def _workload(self, turn: Turn) -> Workload:
        sizes = self.settings.sizes
        if turn.workload in OWN_CAPACITY_SHARES:
            share = OWN_CAPACITY_SHARES[turn.workload]
            sizes = at_rate(sizes, share * self._capacity(turn.service))
        return build_workload(turn.workload, sizes, turn.round_number)

    def _capacity(self, service: str) -> float:
        """Of the first time that it played W2cap, so that it is the same in all rounds.

        Raises:
            ServerFailed: it completed no request of it.
            ValueError: it was not asked.
        """
        for result in self.results:
            if (result.turn.service, result.turn.workload) == (service, CAPACITY):
                if CAPACITY_FIGURE not in result.figures:
                    raise ServerFailed(f"{service} failed {CAPACITY}, whose rate is needed")
                return result.figures[CAPACITY_FIGURE]
        raise ValueError(f"W2half and W2most need {CAPACITY} before them: add it to --workloads")


def _line_of(result: TurnResult) -> str:
    turn, share = result.turn, result.share
    figures = ", ".join(f"{name} {value:.3g}" for name, value in result.figures.items())
    end = f"; dropped: {result.dropped}" if result.dropped else ""
    if result.num_failed:
        end += f"; {result.num_failed} failed: {'; '.join(result.errors.values())}"
    return (
        f"round {turn.round_number} {turn.workload} {turn.service}: {figures} "
        f"({share.taken_s:.1f} s, others {share.others_cores:.2f} cores){end}"
    )
