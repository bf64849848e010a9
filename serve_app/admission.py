"""Whether a request may run now: rates of the service and of its caller, and a bound on the prompt
tokens that wait.

The order of one admission:

    enter  1. requests a second, of the caller, then of the service      else 429
             (the prompts are tokenized)
    admit  2. tokens a minute, of the caller, then of the service        else 429
           3. prompt tokens of its class still before their first token  else 503

What was taken before a refusal is given back. Limits on the size of one request are `limits`'; how
a limit is shared between ingress replicas is `rate_limit`'s.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from deployments.config import AdmissionConfig
from serve_app.callers import Caller
from serve_app.errors import ApiError
from serve_app.rate_limit import LeasedLimit, LeaseSource, Limit, LocalLimit
from serve_app.token_bucket import BucketSpec, RateLimited, request_limit, token_limit


@dataclass(frozen=True, slots=True)
class Demand:
    """What one HTTP request will cost.

    `num_requests`: prompts times n. `num_prompt_tokens`: of all prompts, each counted once however
    large n is. `max_tokens`: bound of each answer. `priority`: the class it will run in.
    """

    num_requests: int
    num_prompt_tokens: int
    max_tokens: int
    priority: int

    @property
    def num_output_tokens(self) -> int:
        """The most that all answers together may have."""
        return self.num_requests * self.max_tokens

    @property
    def num_tokens(self) -> int:
        """The most that all prompts and answers together may have."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that its caller's rate and the service's let in, and whose prompts nobody has
    looked at yet.
    """

    num_requests: int
    request_limits: tuple[Limit, ...]
    token_limits: tuple[Limit, ...]


class PrefillQueue:
    """Counts, by class, the prompt tokens that were admitted and have no first token yet.

    Args:
        max_tokens: of one class; None: no bound.
    """

    def __init__(self, max_tokens: float | None) -> None:
        self._max_tokens = max_tokens
        self._num_tokens: dict[str, int] = {}

    def num_tokens(self, service_class: str) -> int:
        """Prompt tokens of a class that wait."""
        return self._num_tokens.get(service_class, 0)

    def enter(self, service_class: str, num_tokens: int) -> None:
        """Count a request's prompt tokens. Where nothing waits, any length may enter.

        Raises:
            ApiError: 503, they would exceed the bound.
        """
        queued = self.num_tokens(service_class)
        if self._max_tokens is not None and queued and queued + num_tokens > self._max_tokens:
            message = f"{queued} prompt tokens wait already; the service is full, try again later."
            raise ApiError(503, message, code="overloaded", retry_after_s=1)
        self._num_tokens[service_class] = queued + num_tokens

    def leave(self, service_class: str, num_tokens: int) -> None:
        """Count them no more: their first token came, or their request ended before it."""
        self._num_tokens[service_class] -= num_tokens


class Ticket:
    """The right to run one admitted request. Release it whichever way the request ends; once is
    enough, more is harmless.
    """

    def __init__(
        self,
        demand: Demand,
        queue: PrefillQueue,
        service_class: str,
        token_limits: tuple[Limit, ...],
    ) -> None:
        self._queue = queue
        self._class = service_class
        self._token_limits = token_limits
        self._num_queued = demand.num_prompt_tokens
        self._num_unused = demand.num_output_tokens

    def prefilled(self, num_prompt_tokens: int) -> None:
        """The first token of a prompt of so many tokens has come. Call it once for each prompt,
        however many answers it gets."""
        leaving = min(num_prompt_tokens, self._num_queued)
        self._num_queued -= leaving
        self._queue.leave(self._class, leaving)

    def add_output(self, num_tokens: int) -> None:
        """So many tokens of an answer have come."""
        self._num_unused = max(0, self._num_unused - num_tokens)

    def release(self) -> None:
        """The request has ended: what it reserved and did not use is free for others."""
        self.prefilled(self._num_queued)
        unused, self._num_unused = self._num_unused, 0
        if unused:
            for limit in self._token_limits:
                limit.give_back(unused)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class AdmissionController:
    """Says of each request whether it may run now.

    Args:
        config: the limits.
        make_limit: a limit of this process, or its part of one shared with others.
        queue: prompt tokens that wait, counted by this process.
        class_of: the service class that a priority is served by.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        make_limit: Callable[[BucketSpec], Limit],
        queue: PrefillQueue,
        class_of: Callable[[int], str],
    ) -> None:
        self._make_limit = make_limit
        self._queue = queue
        self._class_of = class_of
        self._service_specs = _specs(
            "service", config.requests_per_s, config.request_burst, config.tokens_per_min
        )
        self._limits: dict[BucketSpec, Limit] = {}
        self._limits_by_caller: dict[Caller, tuple[Limit, ...]] = {}

    async def enter(self, caller: Caller, num_requests: int) -> Entry:
        """Count a request before any work is done for it; it stays counted if it turns out to be a
        bad one.

        Args:
            num_requests: prompts times n.

        Raises:
            ApiError: 400, it is more than a limit ever allows; 429 (`rate_limit_exceeded`), a rate
                is reached.
        """
        limits = self._limits_of(caller)
        by_requests = tuple(limit for limit in limits if limit.spec.unit == "requests")
        by_tokens = tuple(limit for limit in limits if limit.spec.unit == "tokens")
        await _take(by_requests, num_requests)
        return Entry(num_requests, by_requests, by_tokens)

    async def admit(self, entry: Entry, demand: Demand) -> Ticket:
        """Let a request that has entered run. A refusal for what is no fault of its own gives back
        what it took on entering.

        Raises:
            ApiError: 400, it is larger than a limit ever allows; 429 (`rate_limit_exceeded`), a
                rate is reached; 503 (`overloaded`), too many prompt tokens of its class wait.
        """
        service_class = self._class_of(demand.priority)
        try:
            await _take(entry.token_limits, demand.num_tokens)
            try:
                self._queue.enter(service_class, demand.num_prompt_tokens)
            except BaseException:
                _give_back(entry.token_limits, demand.num_tokens)
                raise
        except BaseException:
            # A client that leaves meanwhile cancels this, too.
            _give_back(entry.request_limits, entry.num_requests)
            raise
        return Ticket(demand, self._queue, service_class, entry.token_limits)

    def _limits_of(self, caller: Caller) -> tuple[Limit, ...]:
        limits = self._limits_by_caller.get(caller)
        if limits is None:
            own = _specs(
                f"caller/{caller.name}",
                caller.requests_per_s,
                caller.request_burst,
                caller.tokens_per_min,
            )
            limits = tuple(self._limit(spec) for spec in (*own, *self._service_specs))
            self._limits_by_caller[caller] = limits
        return limits

    def _limit(self, spec: BucketSpec) -> Limit:
        if spec not in self._limits:
            self._limits[spec] = self._make_limit(spec)
        return self._limits[spec]


async def _take(limits: tuple[Limit, ...], amount: int) -> None:
    """Take from all limits, or from none."""
    for limit in limits:
        limit.spec.refuse_impossible(amount)
    taken: list[Limit] = []
    try:
        for limit in limits:
            wait_s = await limit.take(amount)
            if wait_s > 0.0:
                raise RateLimited(limit.spec, wait_s)
            taken.append(limit)
    except BaseException:
        _give_back(taken, amount)
        raise


def _give_back(limits: Iterable[Limit], amount: int) -> None:
    for limit in limits:
        limit.give_back(amount)


def _specs(
    name: str, requests_per_s: float | None, burst: float, tokens_per_min: int | None
) -> tuple[BucketSpec, ...]:
    specs = []
    if requests_per_s is not None:
        specs.append(request_limit(name, requests_per_s, burst))
    if tokens_per_min is not None:
        specs.append(token_limit(name, tokens_per_min))
    return tuple(specs)


def one_class(_priority: int) -> str:
    """The class of every priority where one pool serves them all."""
    return "default"


def make_admission(
    config: AdmissionConfig,
    clock: Callable[[], float],
    leases: LeaseSource | None,
    num_ingress_replicas: int,
    class_of: Callable[[int], str] = one_class,
) -> AdmissionController:
    """The admission of one ingress replica.

    Args:
        clock: monotonic seconds.
        leases: the way to the lessor that all ingress replicas share; None: this one is alone.
        num_ingress_replicas: which share the bounds.
        class_of: the service class (pool) that a priority is served by.
    """
    make_limit: Callable[[BucketSpec], Limit]
    if leases is None:
        make_limit = partial(LocalLimit, clock=clock)
    else:
        make_limit = partial(
            LeasedLimit,
            source=leases,
            num_shares=num_ingress_replicas,
            lessee=uuid.uuid4().hex,
            clock=clock,
        )
    bound = config.max_queued_prefill_tokens
    queue = PrefillQueue(None if bound is None else bound / num_ingress_replicas)
    return AdmissionController(config, make_limit, queue, class_of)
