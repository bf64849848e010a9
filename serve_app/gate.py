"""What every generation passes on its way in, and is counted by on its way out.

Puts `limits`, `callers`, `admission` and `metrics` in their order; owns none of their rules.

    enter     the size of what is asked and the rate of requests, before anything is tokenized
    bound     the caller's class, tenant and bounds, put into the prepared requests
    admit     the rate of tokens and the queues, before anything runs
    Passage   first tokens, output and the one end, told to whoever counts them
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from starlette.types import Scope

from deployments.config import ServiceConfig
from serve_app.admission import AdmissionController, Demand, Entry, Ticket, make_admission
from serve_app.api_models import GenerationRequest
from serve_app.callers import Caller, caller_of, effective_salt
from serve_app.intake import PreparedCall, PreparedRequest
from serve_app.limits import RequestLimits, RequestShape
from serve_app.metrics import IngressMetrics, route_template
from serve_app.pool_routes import PoolRoutes
from serve_app.rate_limit import LeaseSource
from serve_app.streaming import TextDelta


@dataclass(frozen=True, slots=True)
class Arrival:
    """An HTTP request as it came in: `at_s` on the clock of the metrics, before tokenizing."""

    caller: Caller
    route: str
    at_s: float
    entry: Entry


class Passage:
    """One admitted HTTP request. Release it when its answer has ended, whichever way.

    Args:
        ticket: the right to run it.
        call: what was admitted.
    """

    def __init__(self, ticket: Ticket, call: PreparedCall) -> None:
        self._ticket = ticket
        self._num_choices_each = call.num_choices_each
        self._waiting = dict(enumerate(call.prompt_lengths))
        """Length of each prompt none of whose choices has begun."""

    async def watch(
        self, index: int, deltas: AsyncGenerator[TextDelta, None]
    ) -> AsyncGenerator[TextDelta, None]:
        """The choice of this index as it was, counted on its way. Closing this closes `deltas`."""
        num_counted = 0
        try:
            async for delta in deltas:
                self._leave_queue(index // self._num_choices_each)
                self._ticket.add_output(delta.num_output_tokens - num_counted)
                num_counted = delta.num_output_tokens
                yield delta
        finally:
            await deltas.aclose()

    def release(self) -> None:
        """Its answer has ended."""
        self._ticket.release()

    def _leave_queue(self, prompt: int) -> None:
        num_tokens = self._waiting.pop(prompt, None)
        if num_tokens is not None:
            self._ticket.prefilled(num_tokens)


class Gate:
    """What stands before the pools of one ingress replica.

    Args:
        config: of the service.
        admission: rates and queues.
        metrics: counts what passes.
    """

    def __init__(
        self, config: ServiceConfig, admission: AdmissionController, metrics: IngressMetrics
    ) -> None:
        self.metrics = metrics
        self._admission = admission
        self._limits = RequestLimits(config.admission)
        self._isolates = config.admission.cache_isolation
        self._routes = PoolRoutes(config)

    async def enter(self, scope: Scope, body: GenerationRequest) -> Arrival:
        """Note who asks for what, and when; refuse what is too large or comes too often, before any
        work is done for it.

        Raises:
            ApiError: 400 or 429, see `RequestLimits` and `AdmissionController.enter`.
        """
        at_s, caller = self.metrics.now(), caller_of(scope)
        self._check(body)
        entry = await self._admission.enter(caller, body.num_prompts * body.num_choices_each)
        return Arrival(caller, route_template(scope), at_s, entry)

    def _check(self, body: GenerationRequest) -> None:
        self._limits.check_shape(
            RequestShape(
                num_prompts=body.num_prompts,
                n=body.num_choices_each,
                max_tokens=body.asked_max_tokens,
                max_tokens_param=body.client_names.get("max_tokens", "max_tokens"),
                stop_strings=body.stop_strings,
                num_stop_token_ids=len(body.stop_token_ids or ()),
                num_logit_bias=len(body.logit_bias or ()),
            )
        )

    def bound(self, arrival: Arrival, call: PreparedCall, prompt_param: str) -> PreparedCall:
        """The same, in the class and the tenant of its caller and within the service's bounds;
        `prompt_param` is what the client calls a prompt.

        Raises:
            ApiError: 400, a prompt is longer than the service takes.
        """
        for num_tokens in call.prompt_lengths:
            self._limits.check_prompt(num_tokens, prompt_param)
        requests = tuple(self._bound_one(arrival.caller, request) for request in call.requests)
        return replace(call, requests=requests)

    def _bound_one(self, caller: Caller, prepared: PreparedRequest) -> PreparedRequest:
        asked = prepared.generate
        params = asked.sampling_params
        max_tokens = self._limits.default_max_tokens(params.max_tokens)
        generate = replace(
            asked,
            priority=max(asked.priority, caller.priority),
            cache_salt=effective_salt(caller, asked.cache_salt, self._isolates),
            sampling_params=replace(params, max_tokens=max_tokens),
        )
        return replace(prepared, generate=generate)

    async def admit(self, arrival: Arrival, call: PreparedCall) -> Passage:
        """Let it run, now.

        Raises:
            ApiError: 400, 429 or 503, see `AdmissionController.admit`.
        """
        first = call.requests[0].generate
        demand = Demand(
            num_requests=len(call.requests),
            num_prompt_tokens=sum(call.prompt_lengths),
            max_tokens=first.sampling_params.max_tokens,
            priority=first.priority,
        )
        return Passage(await self._admission.admit(arrival.entry, demand), call)

    def watch(
        self,
        arrival: Arrival,
        passage: Passage,
        index: int,
        prepared: PreparedRequest,
        deltas: AsyncGenerator[TextDelta, None],
    ) -> AsyncGenerator[TextDelta, None]:
        """The choice of this index as it was, counted on its way. Closing this closes `deltas`."""
        pool = self._routes.find_route(prepared.generate.priority)[0]
        counted = passage.watch(index, deltas)
        return self.metrics.watch(counted, arrival.route, pool, arrival.at_s)


def make_gate(config: ServiceConfig, replica: str, leases: LeaseSource | None = None) -> Gate:
    """The gate of one ingress replica.

    Args:
        replica: its name on the metrics' page.
        leases: the way to what all ingress replicas share; None: this one is alone.
    """
    routes = PoolRoutes(config)
    admission = make_admission(
        config.admission,
        time.monotonic,
        leases,
        config.ingress.num_replicas,
        lambda priority: routes.find_route(priority)[0],
    )
    metrics = IngressMetrics(config.model.name, routes.names, replica)
    return Gate(config, admission, metrics)
