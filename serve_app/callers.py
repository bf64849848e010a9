"""Who asks: the caller of a request, and what follows from it for priority and for the prefix
cache.

Does not know keys or HTTP headers: `api_keys` finds the caller, `key_guard` puts it into the
request's scope.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from starlette.types import Scope

CALLER_STATE = "caller"
"""Where the request's state holds its caller: `request.state.caller`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One holder of an API key, or everybody where there are no keys.

    `priority` is the most urgent class this caller may ask for (0 is most urgent). `salt` names the
    tenant whose cached prefixes it may share; None where there are no tenants. Limits that are None
    are no limits of the caller's own; those of the whole service hold for everybody.
    """

    name: str
    priority: int = 0
    salt: str | None = None
    requests_per_s: float | None = None
    tokens_per_min: int | None = None
    burst: int | None = None
    """Requests that may come at once; by default those of one second."""

    @property
    def request_burst(self) -> float:
        """Requests that may come at once; at least one."""
        return float(self.burst or max(1.0, self.requests_per_s or 1.0))


ANONYMOUS = Caller("anonymous")
"""Everybody, where no keys are configured."""


def caller_of(scope: Scope) -> Caller:
    """The caller that `ApiKeyGuard` found for a request.

    Raises:
        KeyError: no guard stands before the application, which is a fault of its wiring.
    """
    caller: Caller = scope["state"][CALLER_STATE]
    return caller


def effective_priority(caller: Caller, asked: int | None) -> int:
    """The class a request runs in: what it asked for, but never more urgent than its caller may."""
    return caller.priority if asked is None else max(asked, caller.priority)


def effective_salt(caller: Caller, salt: str, isolate: bool) -> str:
    """The cache salt a request is sent with: equal for equal tenant and equal own salt, else
    different.

    Without isolation, or without tenants, it is the request's own salt. The two parts are encoded
    as a JSON array before they are hashed: no tenant and salt spell what another pair does.
    """
    if not isolate or caller.salt is None:
        return salt
    parts = json.dumps(["chunkserve cache salt", caller.salt, salt])
    return hashlib.sha256(parts.encode("ascii")).hexdigest()
