"""Which requests may run now, what a refusal says, and that nothing refused is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.config import AdmissionConfig, ConfigError, parse_service_config
from serve_app.admission import AdmissionController, Demand, PrefillQueue, Ticket, make_admission
from serve_app.api_keys import KeyRing, parse_key_list
from serve_app.callers import ANONYMOUS, Caller, caller_of
from serve_app.errors import ApiError, install_error_handlers
from serve_app.key_guard import ApiKeyGuard, open_paths
from serve_app.rate_limit import LocalLimit


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(
    clock: Clock, class_of: Callable[[int], str] = str, num_ingress: int = 1, **config: Any
) -> AdmissionController:
    return make_admission(AdmissionConfig(**config), clock, None, num_ingress, class_of)


def demand(
    num_prompt_tokens: int = 10, max_tokens: int = 10, priority: int = 0, num_requests: int = 1
) -> Demand:
    return Demand(num_requests, num_prompt_tokens, max_tokens, priority)


async def admit(admission: AdmissionController, caller: Caller, asked: Demand) -> Ticket:
    entry = await admission.enter(caller, asked.num_requests)
    return await admission.admit(entry, asked)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def refusal(
    admission: AdmissionController, asked: Demand, caller: Caller = ANONYMOUS
) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await admit(admission, caller, asked)
    return refused.value


async def num_admitted(
    admission: AdmissionController, attempts: int, caller: Caller = ANONYMOUS
) -> int:
    count = 0
    for _ in range(attempts):
        try:
            await admit(admission, caller, demand())
            count += 1
        except ApiError as error:
            assert error.status == 429
    return count


def test_ten_times_the_limit_is_429_with_retry_after_at_once() -> None:
    """B61: under overload the queue grows without bound, or the refusal is a bare 503 or 500."""

    async def scenario() -> None:
        clock = Clock()
        admission = make(clock, requests_per_s=10, burst=5)
        assert await num_admitted(admission, 100) == 5
        error = await refusal(admission, demand())
        assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 1)
        clock.now_s += 0.3
        assert await num_admitted(admission, 100) == 3

    run(scenario())


def test_retry_after_is_computed_from_the_bucket() -> None:
    """Retry-After is always 1, so that clients of a slow limit come again and again in vain."""

    async def scenario() -> None:
        clock = Clock()
        admission = make(clock, requests_per_s=0.1, burst=1)
        await admit(admission, ANONYMOUS, demand())
        clock.now_s = 2.5
        assert (await refusal(admission, demand())).retry_after_s == 8
        clock.now_s = 10.0
        await admit(admission, ANONYMOUS, demand())

    run(scenario())


def test_the_default_is_a_thousand_requests_a_second() -> None:
    """The guide's limit does not hold unless it is configured."""
    assert run(num_admitted(make(Clock()), 1200)) == 1000


def test_no_limit_is_no_limit() -> None:
    """A limit that was switched off holds all the same."""
    assert run(num_admitted(make(Clock(), requests_per_s=None), 3000)) == 3000


def test_a_callers_own_rate_holds_for_it_alone() -> None:
    """One caller uses up what belongs to the others, or has two limits by having two keys."""

    async def scenario() -> None:
        admission = make(Clock(), requests_per_s=100, burst=20)
        slow, fast = Caller("slow", requests_per_s=2, burst=3), Caller("fast")
        assert await num_admitted(admission, 10, slow) == 3
        # What was refused by the caller's own limit cost the service's nothing.
        assert await num_admitted(admission, 30, fast) == 17

    run(scenario())


def test_each_prompt_and_each_choice_counts_as_a_request() -> None:
    """A batch of prompts or a large n gets around the rate."""

    async def scenario() -> None:
        admission = make(Clock(), requests_per_s=1, burst=10)
        await admit(admission, ANONYMOUS, demand(num_requests=8))
        assert (await refusal(admission, demand(num_requests=3))).status == 429
        await admit(admission, ANONYMOUS, demand(num_requests=2))
        never = await refusal(admission, demand(num_requests=11))
        assert never.status == 400 and never.retry_after_s is None

    run(scenario())


def test_tokens_are_reserved_and_what_was_not_used_comes_back() -> None:
    """A client that sets no max_tokens is billed for a whole context; or for nothing but its
    prompt, however much it generates.
    """

    async def scenario() -> None:
        admission = make(Clock(), tokens_per_min=1000)
        ticket = await admit(admission, ANONYMOUS, demand(300, 600))
        error = await refusal(admission, demand(200, 1))
        assert (error.status, error.type) == (429, "tokens")
        ticket.add_output(100)
        ticket.release()
        ticket.release()
        # 300 and 100 were used.
        await admit(admission, ANONYMOUS, demand(300, 300))
        assert (await refusal(admission, demand(1, 1))).status == 429

    run(scenario())


def test_a_refusal_gives_back_what_it_had_taken() -> None:
    """A request that was refused by its tokens or by the queue uses up requests a second."""

    async def scenario() -> None:
        admission = make(
            Clock(), requests_per_s=1, burst=3, tokens_per_min=100, max_queued_prefill_tokens=50
        )
        await admit(admission, ANONYMOUS, demand(30, 10))
        for _ in range(5):
            assert (await refusal(admission, demand(30, 40))).status == 429
            assert (await refusal(admission, demand(30, 10))).status == 503
        await admit(admission, ANONYMOUS, demand(20, 40))

    run(scenario())


def test_the_queue_of_a_class_is_bounded_in_prompt_tokens() -> None:
    """B61: requests of huge prompts pile up, each within the rate; or one class fills the queue of
    another.
    """

    async def scenario() -> None:
        admission = make(Clock(), max_queued_prefill_tokens=100)
        first = await admit(admission, ANONYMOUS, demand(60))
        error = await refusal(admission, demand(41))
        assert (error.status, error.code, error.retry_after_s) == (503, "overloaded", 1)
        await admit(admission, ANONYMOUS, demand(41, priority=1))
        first.prefilled(60)
        await admit(admission, ANONYMOUS, demand(100))

    run(scenario())


def test_a_class_is_a_pool_not_a_number_of_the_client() -> None:
    """A client gets an empty queue with each priority that it makes up."""

    async def scenario() -> None:
        admission = make(Clock(), lambda priority: f"pool-{min(priority, 1)}",
                         max_queued_prefill_tokens=100)  # fmt: skip
        await admit(admission, ANONYMOUS, demand(60, priority=1))
        assert (await refusal(admission, demand(60, priority=7))).status == 503

    run(scenario())


def test_a_prompt_longer_than_the_bound_runs_alone() -> None:
    """What is longer than the bound is told to come again, for ever."""

    async def scenario() -> None:
        admission = make(Clock(), max_queued_prefill_tokens=100, num_ingress=4)
        ticket = await admit(admission, ANONYMOUS, demand(90))
        assert (await refusal(admission, demand(1))).status == 503
        ticket.release()
        await admit(admission, ANONYMOUS, demand(1))
        await admit(admission, ANONYMOUS, demand(24))

    run(scenario())


def test_the_prompts_of_a_batch_leave_the_queue_one_by_one() -> None:
    """The first token of one prompt frees the places of all; or a second release counts twice."""
    queue = PrefillQueue(None)
    queue.enter("a", 100)
    asked = demand(60, num_requests=2)
    queue.enter("a", 60)
    ticket = Ticket(asked, queue, "a", ())
    ticket.prefilled(20)
    assert queue.num_tokens("a") == 140
    ticket.prefilled(50)
    assert queue.num_tokens("a") == 100
    ticket.release()
    assert queue.num_tokens("a") == 100


def test_a_ticket_is_released_however_its_request_ends() -> None:
    """A request that failed keeps its place in the queue and its tokens for ever."""

    async def scenario() -> None:
        admission = make(Clock(), tokens_per_min=100, max_queued_prefill_tokens=80)
        for _ in range(3):
            with pytest.raises(RuntimeError), await admit(admission, ANONYMOUS, demand(20, 40)):
                raise RuntimeError("the engine failed")
        # The prompts are paid for; the answers never came.
        await admit(admission, ANONYMOUS, demand(10, 30))
        assert (await refusal(admission, demand(1, 1))).status == 429

    run(scenario())


def test_a_client_that_leaves_while_it_is_admitted_counts_nothing() -> None:
    """Cancelled between two limits, a request keeps what the first gave it."""

    class Slow(LocalLimit):
        async def take(self, amount: float) -> float:
            await asyncio.Event().wait()
            return 0.0

    async def scenario() -> None:
        clock = Clock()
        limits: dict[str, LocalLimit] = {}

        def make_limit(spec: Any) -> LocalLimit:
            kind = Slow if spec.name == "service/tokens" else LocalLimit
            return limits.setdefault(spec.name, kind(spec, clock))

        config = AdmissionConfig(requests_per_s=1, burst=1, tokens_per_min=100)
        admission = AdmissionController(config, make_limit, PrefillQueue(None), str)
        admitting = asyncio.ensure_future(admit(admission, ANONYMOUS, demand()))
        await asyncio.sleep(0)
        assert await limits["service/requests"].take(1) > 0.0
        admitting.cancel()
        await asyncio.wait({admitting})
        assert await limits["service/requests"].take(1) == 0.0

    run(scenario())


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 5.0), st.integers(1, 40), st.integers(1, 40), st.integers(0, 50)),
        max_size=60,
    )
)
def test_what_runs_and_what_has_run_stays_within_the_token_rate(
    steps: list[tuple[float, int, int, int]],
) -> None:
    """B61 for tokens: giving back lets more through than a minute's rate and burst."""

    async def scenario() -> None:
        clock = Clock()
        admission = make(clock, requests_per_s=None, tokens_per_min=120)
        used = 0
        for wait_s, prompt, most, output in steps:
            clock.now_s += wait_s
            try:
                with await admit(admission, ANONYMOUS, demand(prompt, most)) as ticket:
                    ticket.add_output(output)
                    used += prompt + min(output, most)
            except ApiError as error:
                assert error.status == 429
            assert used <= 2.0 * clock.now_s + 120 + 1e-6

    run(scenario())


def test_a_refusal_reaches_the_client_in_openais_shape() -> None:
    """The guard, the controller and the error handlers do not fit together."""
    api = FastAPI()
    install_error_handlers(api)
    admission = make(Clock(), requests_per_s=1, burst=1)

    @api.post("/v1/completions")
    async def completions(request: Request) -> str:
        with await admit(admission, caller_of(request.scope), demand()):
            return "text"

    keys = KeyRing(parse_key_list("ann:sk-1"))
    api.add_middleware(ApiKeyGuard, keys=keys, open_paths=open_paths(AdmissionConfig()))
    client = TestClient(api, headers={"Authorization": "Bearer sk-1"})
    assert client.post("/v1/completions").json() == "text"
    answer = client.post("/v1/completions")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"max_body_byte": 5}, "did you mean 'max_body_bytes'"),
        ({"requests_per_s": 0}, "admission.requests_per_s"),
        ({"max_n": 0}, "admission.max_n"),
        ({"burst": 0}, "admission.burst"),
    ],
)
def test_a_limit_that_would_refuse_everything_is_no_configuration(
    data: dict[str, Any], expected: str
) -> None:
    """A misspelled limit does not hold; or one of 0 takes the service down."""
    with pytest.raises(ConfigError, match=expected):
        parse_service_config({"admission": data})
