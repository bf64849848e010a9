"""Prefix-aware routing inside a pool, as a request router of Ray Serve.

Owns the translation: Serve's replicas and callbacks to `ReplicaChooser`, which decides. It runs in
every process that holds a handle of the pool, on that handle's event loop, and each keeps a belief
of its own. What is no generation (a model card, say) goes by Serve's own rule; a relay goes to the
replica it names.

    choose_replicas     the request counts at its first choice at once: of a burst, nobody else has
                        been sent anywhere yet
    on_request_routed   a replica accepted it; it counts there from now on
    on_request_completed   it counts no more, whichever way it ended
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.protocol import GenerateRequest, OpenRelay
from deployments.replica_choice import ReplicaChooser, ReplicaReport

UNACCEPTED_AFTER_S = 10.0
"""A choice that no replica has accepted for so long counts no more until one does."""


def generate_request_of(pending: PendingRequest | None) -> GenerateRequest | None:
    """The generation that a call asks for; None for any other call."""
    args = pending.args if pending is not None else ()
    return args[0] if args and isinstance(args[0], GenerateRequest) else None


def replica_asked_by(pending: PendingRequest | None) -> str | None:
    """The one replica that a call is meant for; None for a call that any may take."""
    args = pending.args if pending is not None else ()
    return args[0].replica if args and isinstance(args[0], OpenRelay) else None


@dataclass(frozen=True, slots=True)
class _Choice:
    pending: PendingRequest
    chosen_s: float


class PrefixRouter(RequestRouter):
    """The replica that holds most of a prompt, within a bound on its load; see `ReplicaChooser`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once by Serve with the arguments of ReplicaChooser, from the deployment's
        RequestRouterConfig.
        """
        self._chooser = ReplicaChooser(**kwargs)
        self._choices: dict[str, _Choice] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All replicas as ranks of one, best first: Serve takes the first that is not full."""
        if pending_request is not None:
            # Or Serve asks again at once, for ever, while all are full.
            pending_request.routing_context.should_backoff = True
        if (only := replica_asked_by(pending_request)) is not None:
            return [[r for r in candidate_replicas if r.replica_id.unique_id == only]]
        request = generate_request_of(pending_request)
        if request is None or pending_request is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        self._drop_abandoned_choices()
        key = pending_request.metadata.internal_request_id
        self._chooser.end(key)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = [name for name in self._chooser.find_order(request) if name in by_name]
        if order:
            self._chooser.begin(order[0], key, request)
            self._choices[key] = _Choice(pending_request, time.monotonic())
        return [[by_name[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica accepted a request."""
        request = generate_request_of(pending_request)
        if request is not None:
            key = pending_request.metadata.internal_request_id
            self._choices.pop(key, None)
            self._chooser.begin(replica_id.unique_id, key, request)
            self._chooser.confirm(replica_id.unique_id, request)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request ended, or was rejected."""
        self._choices.pop(internal_request_id, None)
        self._chooser.end(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve tells which replicas run, and what they report."""
        super().update_replicas(replicas)
        self._chooser.set_replicas(self._names())
        for replica in replicas:
            stats = replica.routing_stats
            if stats:
                self._chooser.report(replica.replica_id.unique_id, ReplicaReport(**stats))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is gone."""
        super().on_replica_actor_died(replica_id)
        self._chooser.set_replicas(self._names())

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """A replica does not answer: it may be gone, or come back with an empty cache."""
        super().on_replica_actor_unavailable(replica_id)
        self._chooser.forget_cache(replica_id.unique_id)

    def _names(self) -> list[str]:
        return [replica_id.unique_id for replica_id in self.curr_replicas]

    def _drop_abandoned_choices(self) -> None:
        """Of a request whose client left before a replica had it, Serve says nothing."""
        oldest_s = time.monotonic() - UNACCEPTED_AFTER_S
        for key, choice in list(self._choices.items()):
            if choice.pending.future.cancelled() or choice.chosen_s < oldest_s:
                del self._choices[key]
                self._chooser.end(key)
