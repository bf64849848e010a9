"""One service after the other under the same workload, in turns: A B A B.

    round 0   W1: A B C   W5: A B C   ...
    round 1   W1: A B C   W5: A B C   ...

Owns the order and what is kept of each turn. While one service is measured the others are paused,
so that they cost nothing. Does not compute what turns come to (`figures`, `ratios`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from loadtest.client import Ask
from loadtest.load_prompts import Prompts
from loadtest.load_run import EndedRequest, PlannedRequest
from loadtest.load_tally import record_of
from loadtest.peers.figures import figures_of
from loadtest.peers.machine_share import MachineMeter, MachineShare
from loadtest.peers.services import Service
from loadtest.peers.workloads import Phase, Workload
from loadtest.records import RequestRecord
from loadtest.stream_reader import AnswerFault, TokenCount

Quiet = Callable[[], AbstractContextManager[object]]
"""Entered around each turn, for those who share the machine and agree on whose turn it is."""
WRONG_LENGTH, WRONG_PROMPT = "wrong length", "wrong prompt"
MAX_PROMPT_DIFFERENCE = 0.01
"""Of a prompt's tokens, beside one more: texts come back as other tokens where they were cut."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One service under one workload, once."""

    round_number: int
    workload: str
    service: str


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What a turn came to.

    Args:
        turn: which one.
        figures: by name.
        num_failed: requests that ended in an error.
        errors: the words of the first error of each kind.
        share: of the machine.
        counted_by: how its tokens were counted, each way that was needed.
        dropped: what disturbed it, so that it does not count; empty: nothing.
    """

    turn: Turn
    figures: Mapping[str, float]
    num_failed: int
    errors: Mapping[str, str]
    share: MachineShare
    counted_by: tuple[str, ...] = ()
    dropped: str = ""

    @property
    def counts(self) -> bool:
        """Whether it is in medians and ratios: who answers part of what is asked is not fast."""
        return not self.dropped and not self.num_failed


@dataclass(slots=True)
class _Ends:
    """The ends of one turn's requests, by label."""

    records: dict[str, list[RequestRecord]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    counted_by: set[str] = field(default_factory=set)
    num_failed: int = 0

    def add(self, label: str, ended: EndedRequest) -> None:
        fault, streamed = fault_of(ended), ended.answer.streamed
        if fault is not None:
            self.num_failed += 1
            self.errors.setdefault(fault.kind, str(fault))
            return
        if streamed is not None:
            self.counted_by.add(streamed.counted_by.value)
        # Seconds of the machine's clock: the phases of a turn are on one axis. The workload's own
        # count of the prompt, so that the same work is the same number for all.
        record = record_of(ended, 0.0)
        counted = replace(record, num_prompt_tokens=ended.planned.num_prompt_tokens)
        self.records.setdefault(label, []).append(counted)


def fault_of(ended: EndedRequest) -> AnswerFault | None:
    """Why a request is not what was asked for: it failed, its answer is shorter or longer, or the
    server read another prompt (its own tokenizer's, or a cut one).
    """
    streamed, planned = ended.answer.streamed, ended.planned
    if streamed is None:
        return ended.answer.fault
    num_tokens, num_wanted = len(streamed.token_times_s), planned.ask.max_tokens
    if num_tokens != num_wanted and streamed.counted_by is not TokenCount.EVENTS:
        return AnswerFault(WRONG_LENGTH, f"an answer of {num_tokens} tokens, not {num_wanted}")
    counted, sent = streamed.num_prompt_tokens, planned.num_prompt_tokens
    if counted is not None and abs(counted - sent) > MAX_PROMPT_DIFFERENCE * sent + 1:
        return AnswerFault(WRONG_PROMPT, f"a prompt of {sent} tokens was read as {counted}")
    return None


def interleaved(
    services: Sequence[str], workloads: Sequence[str], num_rounds: int
) -> Iterator[Turn]:
    """All turns in their order: within a workload every service before any comes again."""
    for round_number in range(num_rounds):
        for workload in workloads:
            for service in services:
                yield Turn(round_number, workload, service)


async def play(service: Service, workload: Workload, prompts: Prompts) -> _Ends:
    """Ask a service for a whole workload, phase after phase."""
    ends = _Ends()
    for phase in workload.phases:
        planned = _planned(phase, prompts)
        # By identity: equal requests of two labels are still two.
        labels = {id(plan): each.label for plan, each in zip(planned, phase.requests, strict=True)}
        for ended in await service.send(planned, phase.max_concurrency):
            ends.add(labels[id(ended.planned)], ended)
    return ends


def _planned(phase: Phase, prompts: Prompts) -> list[PlannedRequest]:
    """Made before the first is sent, so that making prompts takes nothing from the service."""
    return [
        PlannedRequest(
            Ask(prompts.prompt(each.lengths, each.number), each.lengths.output_length),
            each.lengths.input_length,
            each.due_s,
        )
        for each in phase.requests
    ]


async def take_turn(
    turn: Turn, service: Service, workload: Workload, prompts: Prompts, max_others: float
) -> TurnResult:
    """Play a workload and tell what it came to.

    Args:
        turn: which one.
        service: resumed already.
        workload: to play.
        prompts: in the form that the service takes.
        max_others: cores that others may have used on average; more drops the turn.
    """
    meter = MachineMeter(service.tree)
    ends = await play(service, workload, prompts)
    share = meter.share()
    dropped = ""
    if share.others_cores + share.stolen_cores > max_others:
        others = share.others_cores + share.stolen_cores
        dropped = f"others used {others:.2f} cores, more than {max_others:g}"
    return TurnResult(
        turn=turn,
        figures=figures_of(turn.workload, ends.records),
        num_failed=ends.num_failed,
        errors=ends.errors,
        share=share,
        counted_by=tuple(sorted(ends.counted_by)),
        dropped=dropped,
    )


def no_wait() -> AbstractContextManager[object]:
    """A machine of one's own."""
    return nullcontext()
