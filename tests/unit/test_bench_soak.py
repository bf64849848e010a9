"""What the soak takes for a fault: a check that cannot fail would find none."""

from __future__ import annotations

import pytest

from loadtest.bench_soak import find_fault, find_growth
from loadtest.words import WORDS


def answer(*texts: str, end: str = '"finish_reason":"length"', tail: str = "data: [DONE]") -> bytes:
    events = "".join(f'data: {{"text":"{text}"}}\n\n' for text in texts)
    return f"HTTP/1.1 200 OK\r\n\r\n{events}{end}\n\n{tail}".encode()


def test_a_right_answer_has_no_fault_however_it_is_cut() -> None:
    """Tokens that came together are taken for lost ones."""
    assert find_fault(answer(*WORDS[:3]), 3) is None
    assert find_fault(answer(WORDS[0] + WORDS[1], WORDS[2]), 3) is None


@pytest.mark.parametrize(
    "bad, fault",
    [
        (answer(WORDS[0], WORDS[2]), "wrong text"),
        (answer(WORDS[0], WORDS[1], WORDS[1]), "wrong text"),
        (answer(WORDS[1], WORDS[0], WORDS[2]), "wrong text"),
        (answer(*WORDS[:2]), "wrong text"),
        (answer(*WORDS[:3], end=""), "wrong end"),
        (answer(*WORDS[:3], tail=""), "wrong end"),
        (answer(*WORDS[:3], tail='data: {"error":{}}'), "error event"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "status b'503'"),
    ],
)
def test_whatever_is_lost_doubled_or_broken_off_is_a_fault(bad: bytes, fault: str) -> None:
    """A soak passes although tokens are missing."""
    assert find_fault(bad, 3) == fault


def series(*rss_mb: int) -> list[dict[str, dict[str, int]]]:
    return [{"ingress": {"rss_mb": value}} for value in rss_mb]


def test_memory_that_grows_is_found_and_a_warm_up_is_not() -> None:
    """A leak passes, or the first requests' memory counts as one."""
    assert find_growth(series(100, 200, 205, 203, 204, 206, 204)) == []
    assert find_growth(series(100, 200, 205, 220, 240, 260, 280)) == ["ingress"]
