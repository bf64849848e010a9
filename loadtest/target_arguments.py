"""The flags that say which server is asked, and how; named as `vllm bench serve` names them.

Owns what a request carries beside its prompt and length. Asks no server: `target_check` does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from typing import Any

from loadtest.client import Target
from loadtest.number_types import finite_number

API_KEY_VARIABLE = "OPENAI_API_KEY"
ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""The route of each `--backend`, unless `--endpoint` gives another."""
SAMPLING: dict[str, Callable[[str], float]] = {
    "temperature": finite_number,
    "top_p": finite_number,
    "top_k": int,
    "min_p": finite_number,
    "frequency_penalty": finite_number,
    "presence_penalty": finite_number,
    "repetition_penalty": finite_number,
}


class ArgumentsError(ValueError):
    """Flags that do not go together; the message is one line and says what to change."""


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """What `target_of` reads."""
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", help="by default http://HOST:PORT")
    group.add_argument("--host", default="127.0.0.1", help="where there is no --base-url")
    group.add_argument("--port", type=int, default=8000, help="where there is no --base-url")
    group.add_argument(
        "--backend", choices=list(ENDPOINTS), default="openai", help="openai-chat asks in chats"
    )
    group.add_argument(
        "--endpoint",
        help="by default that of the backend; one that ends in /chat/completions is asked in chats",
    )
    group.add_argument(
        "--model", "--served-model-name", help="by default the first that the server serves"
    )
    group.add_argument(
        "--header", nargs="*", default=[], metavar="KEY=VALUE", help="sent with each request"
    )
    group.add_argument(
        "--insecure", action="store_true", help="take any certificate of an https server"
    )
    group.add_argument("--timeout-s", type=float, default=3600.0, help="of one request")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        help="wait so long for a server that is yet to start",
    )
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers of full length; --no-ignore-eos lets the model end them",
    )
    for name, kind in SAMPLING.items():
        text = "0 unless given" if name == "temperature" else "the server's own unless given"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    group.add_argument("--extra-body", default="{}", help="JSON object, added to each body")


def target_of(arguments: argparse.Namespace) -> Target:
    """The target, whose model the server is yet to confirm.

    Raises:
        ArgumentsError: the base URL is none, the extra body is no JSON object, a header has no
            name, or a time is no time.
    """
    if not 0.0 < arguments.timeout_s < math.inf:
        raise ArgumentsError(f"--timeout-s must be above 0, not {arguments.timeout_s:g}")
    if not 0.0 <= arguments.ready_check_timeout_sec < math.inf:
        raise ArgumentsError("--ready-check-timeout-sec must be 0 or more")
    given = {name: getattr(arguments, name) for name in SAMPLING}
    sampling = {name: value for name, value in given.items() if value is not None}
    base_url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
    if not base_url.startswith(("http://", "https://")):
        raise ArgumentsError(f"--base-url begins with http:// or https://, unlike {base_url!r}")
    endpoint = arguments.endpoint or ENDPOINTS[arguments.backend]
    return Target(
        base_url=base_url,
        endpoint="/" + endpoint.lstrip("/"),
        model=arguments.model or "",
        api_key=os.environ.get(API_KEY_VARIABLE),
        headers=pairs_of("--header", arguments.header),
        extra_body={**sampling, **_json_object(arguments.extra_body)},
        ignores_eos=arguments.ignore_eos,
        verifies_tls=not arguments.insecure,
        timeout_s=arguments.timeout_s,
    )


def pairs_of(flag: str, entries: list[str]) -> dict[str, str]:
    """From `KEY=VALUE` each.

    Raises:
        ArgumentsError: one is not of that form.
    """
    pairs = [entry.partition("=") for entry in entries]
    for (key, equals, _), entry in zip(pairs, entries, strict=True):
        if not (key.strip() and equals):
            raise ArgumentsError(f"{flag} takes KEY=VALUE, not {entry!r}")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentsError(f"--extra-body takes a JSON object, not {text!r}")
    return value
