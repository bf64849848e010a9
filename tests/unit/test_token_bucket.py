"""What a token bucket lets through, and what is said when it is empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import ApiError
from serve_app.token_bucket import RateLimited, TokenBucket, request_limit, token_limit

SLACK = 1e-6
"""Rounding, in permits."""

STEPS = st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 6)), max_size=80)
"""(seconds to wait, permits to ask for)"""


@given(st.floats(0.1, 50.0), st.integers(1, 20), STEPS)
def test_a_bucket_never_lets_more_through_than_rate_times_time_and_burst(
    rate_per_s: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    """B61: within some stretch of time more requests run than the limit allows."""
    now_s, bucket = 0.0, TokenBucket(rate_per_s, burst, 0.0)
    taken: list[tuple[float, int]] = []
    for wait_s, amount in steps:
        now_s += wait_s
        if bucket.take(amount, now_s) == 0.0:
            taken.append((now_s, amount))
    for start, (since_s, _) in enumerate(taken):
        total = 0
        for until_s, amount in taken[start:]:
            total += amount
            assert total <= rate_per_s * (until_s - since_s) + burst + SLACK


@given(st.floats(0.1, 50.0), st.integers(6, 20), STEPS)
def test_who_waits_as_long_as_it_was_told_gets_its_permits(
    rate_per_s: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    """Retry-After is shorter than the wait really is, so clients come in vain; or longer."""
    now_s, bucket = 0.0, TokenBucket(rate_per_s, burst, 0.0)
    for wait_s, amount in steps:
        now_s += wait_s
        told_s = bucket.take(amount, now_s)
        if told_s > 0.0:
            assert bucket.take(amount, now_s + told_s * 0.99 - 1e-6) > 0.0
            now_s += told_s
            assert bucket.take(amount, now_s) == 0.0


def test_a_bucket_fills_up_to_its_burst_and_no_further() -> None:
    """A quiet night saves up a whole night's requests; or what is given back piles up."""
    bucket = TokenBucket(10.0, 5.0, 0.0)
    assert bucket.level(1e6) == 5.0
    bucket.give_back(3.0, 1e6)
    assert bucket.level(1e6) == 5.0


def test_a_clock_that_steps_back_grants_nothing_and_takes_nothing() -> None:
    """Time that is seen twice fills the bucket twice."""
    bucket = TokenBucket(1.0, 2.0, 10.0)
    assert bucket.take(2.0, 10.0) == 0.0
    assert bucket.level(5.0) == 0.0
    assert bucket.level(10.0) == 0.0
    assert bucket.level(11.0) == 1.0


def test_retry_after_is_a_whole_number_of_at_least_one() -> None:
    """B61: a refusal without Retry-After, or with a fraction or 0 in it: clients hammer."""
    spec = request_limit("service", 1000.0, 1000.0)
    waits = {0.0003: "1", 1.0: "1", 1.2: "2", 61.5: "62"}
    for wait_s, expected in waits.items():
        answer = RateLimited(spec, wait_s).response()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, expected)
    error = RateLimited(spec, 1.0).body()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")


def test_what_no_wait_can_help_is_the_clients_to_change() -> None:
    """A request larger than the limit ever allows is told to come again, for ever."""
    spec = token_limit("service", 600)
    spec.refuse_impossible(600)
    with pytest.raises(ApiError, match="600 tokens a minute") as refused:
        spec.refuse_impossible(601)
    assert refused.value.status == 400
