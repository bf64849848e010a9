"""Takes in the requests of a run as they end, and keeps what the result needs of them.

Memory is bounded however long the run is: `measures` folds what it counts, a fault's words are kept
once a kind, and single requests go to a file if one is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

import orjson

from loadtest.load_run import EndedRequest
from loadtest.measures import Measures, RequestRecord, Slo, Summary
from loadtest.timeline import Timeline, TimelineCounts

MAX_KINDS = 100
"""Of faults whose words are kept; a server may make up any number of statuses."""


def record_of(ended: EndedRequest, start_s: float) -> RequestRecord:
    """The request as `measures` counts it; times are seconds from `start_s`."""
    answer, planned = ended.answer, ended.planned
    streamed = answer.streamed
    counted = None if streamed is None else streamed.num_prompt_tokens
    return RequestRecord(
        intended_s=ended.intended_s - start_s,
        sent_s=answer.sent_s - start_s,
        # The server's own count where it gives one: templates and special tokens are prompt too.
        num_prompt_tokens=planned.num_prompt_tokens if counted is None else counted,
        token_times_s=[time_s - start_s for time_s in streamed.token_times_s] if streamed else (),
        end_s=answer.end_s - start_s,
        num_cached_tokens=streamed.num_cached_tokens if streamed else 0,
        error=None if answer.fault is None else answer.fault.kind,
        priority=planned.ask.priority,
    )


@dataclass(frozen=True, slots=True)
class TallySnapshot:
    """What the ended requests came to at one moment; later ones do not change it.

    Args:
        summary: of their latencies, tokens and errors.
        timeline: when they came and ended.
        counted_by: answers by how their tokens were counted.
        first_faults: the words of the first fault of each kind.
    """

    summary: Summary
    timeline: TimelineCounts
    counted_by: Mapping[str, int]
    first_faults: Mapping[str, str]


class LoadTally:
    """What the ended requests of one run come to.

    Args:
        slo: what a good request keeps.
        log: gets one JSON line a request, if there is one.
    """

    def __init__(self, slo: Slo, log: IO[bytes] | None = None) -> None:
        self._measures = Measures(slo)
        self._timeline = Timeline()
        self._log = log
        self.num_ended = 0
        self.num_failed = 0
        self.num_output_tokens = 0
        self.last_end_s = 0.0
        """Of the request that ended last, seconds from the start."""
        self.counted_by: Counter[str] = Counter()
        """Answers by how their tokens were counted."""
        self.first_faults: dict[str, str] = {}
        """The words of the first fault of each kind."""

    def add(self, ended: EndedRequest, start_s: float) -> None:
        """Take in a request of the run that began at `start_s`.

        Raises:
            OSError: the log cannot be written.
        """
        record = record_of(ended, start_s)
        self._measures.add(record)
        self._timeline.add(record)
        self.num_ended += 1
        self.num_output_tokens += len(record.token_times_s)
        self.last_end_s = max(self.last_end_s, record.end_s)
        answer = ended.answer
        if answer.fault is not None:
            self.num_failed += 1
            if len(self.first_faults) < MAX_KINDS:
                self.first_faults.setdefault(answer.fault.kind, str(answer.fault))
        if answer.streamed is not None:
            self.counted_by[answer.streamed.counted_by.value] += 1
        if self._log is not None:
            self._log.write(_line_of(record))

    def snapshot(self, duration_s: float) -> TallySnapshot:
        """What all came to so far, in a run of so many seconds."""
        return TallySnapshot(
            self.summary(duration_s),
            self._timeline.counts(),
            dict(self.counted_by),
            dict(self.first_faults),
        )

    def summary(self, duration_s: float) -> Summary:
        """The latencies, tokens and errors of it alone."""
        return self._measures.summary(duration_s)


def _line_of(record: RequestRecord) -> bytes:
    row = {
        "intended_s": round(record.intended_s, 6),
        "sent_s": round(record.sent_s, 6),
        "end_s": round(record.end_s, 6),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "priority": record.priority,
        "error": record.error,
        "token_times_s": [round(time_s, 6) for time_s in record.token_times_s],
    }
    return orjson.dumps(row) + b"\n"
