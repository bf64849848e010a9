"""What a run keeps of its requests, and what it writes of each."""

from __future__ import annotations

import io
import json

from loadtest.client import Answer, Ask
from loadtest.load_run import EndedRequest, PlannedRequest
from loadtest.load_tally import MAX_KINDS, LoadTally, record_of
from loadtest.measures import Slo
from loadtest.stream_reader import AnswerFault, StreamedAnswer, TokenCount

PLANNED = PlannedRequest(Ask("hi", 4, priority=1), num_prompt_tokens=7, due_s=1.0)


def good(num_prompt_tokens: int | None = 9) -> EndedRequest:
    streamed = StreamedAnswer([102.0, 103.0], TokenCount.USAGE, num_prompt_tokens, 5)
    return EndedRequest(PLANNED, 101.0, Answer(101.5, 104.0, streamed, None))


def failed(kind: str, detail: str = "") -> EndedRequest:
    return EndedRequest(PLANNED, 101.0, Answer(101.5, 102.0, None, AnswerFault(kind, detail)))


def test_records_count_from_the_start_of_the_run() -> None:
    """Times of a record are those of the machine's clock, or its prompt is the workload's guess."""
    record = record_of(good(), start_s=100.0)
    assert (record.intended_s, record.sent_s, record.end_s) == (1.0, 1.5, 4.0)
    assert list(record.token_times_s) == [2.0, 3.0]
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.priority) == (9, 5, 1)
    assert record_of(good(num_prompt_tokens=None), 100.0).num_prompt_tokens == 7
    assert record_of(failed("timeout"), 100.0).error == "timeout"


def test_faults_are_counted_and_their_first_words_kept() -> None:
    """A result says that requests failed, and nothing of why; or keeps the words of all."""
    tally = LoadTally(Slo(None, None, None, None))
    for ended in (good(), failed("status 500", "first"), failed("status 500", "second")):
        tally.add(ended, 100.0)
    assert (tally.num_ended, tally.num_failed, tally.num_output_tokens) == (3, 2, 2)
    assert tally.first_faults == {"status 500": "first"}
    assert tally.counted_by == {"usage": 1}
    assert tally.last_end_s == 4.0
    for number in range(2 * MAX_KINDS):
        tally.add(failed(f"status {number}"), 100.0)
    assert len(tally.first_faults) == MAX_KINDS


def test_each_request_is_a_line_of_the_log() -> None:
    """A detailed log lacks requests, or what a report needs of them."""
    log = io.BytesIO()
    tally = LoadTally(Slo(None, None, None, None), log)
    tally.add(good(), 100.0)
    tally.add(failed("timeout"), 100.0)
    first, second = map(json.loads, log.getvalue().splitlines())
    assert first["token_times_s"] == [2.0, 3.0] and first["error"] is None
    assert second["token_times_s"] == [] and second["error"] == "timeout"
