"""Before a load: is there a server, does it serve this model, and does it answer as OpenAI does?

What is wrong with the target ends here, in one line that says what to change, rather than in a
result of nothing but errors.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from loadtest.client import CANNOT_CONNECT, CONNECTION_REFUSED, Answer, Ask, Client, Target
from loadtest.stream_reader import NOT_OPENAI, AnswerFault

MODELS_PATH = "/v1/models"
MAX_NAMES = 5
READY_POLL_S = 1.0


class TargetError(ValueError):
    """The server cannot be measured; the message is one line and says what to change."""


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A target that answers.

    Args:
        target: with its model, and without running usage if the server refuses it.
        num_prompt_tokens: that it counted of the request it was asked; None if it does not say.
    """

    target: Target
    num_prompt_tokens: int | None


async def wait_for_target(
    target: Target, model: str | None, ask: Ask, ready_s: float
) -> CheckedTarget:
    """As `check_target`, again and again until the server is fit or the time is over.

    Args:
        target: what is to be measured.
        model: the name to send; None: the first that the server serves.
        ask: a request as the load will send them.
        ready_s: so long it may take; 0: the first answer counts.

    Raises:
        TargetError: the last one.
    """
    deadline_s = time.monotonic() + ready_s
    while True:
        try:
            return await check_target(target, model, ask)
        except TargetError:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(READY_POLL_S)


async def check_target(target: Target, model: str | None, ask: Ask) -> CheckedTarget:
    """Ask the server for its models, then for one answer.

    Args:
        target: what is to be measured; its model is not looked at.
        model: the name to send; None: the first that the server serves.
        ask: a request as the load will send them.

    Raises:
        TargetError: the server is down, serves another model, or does not answer as OpenAI does.
    """
    async with Client(target) as client:
        name = await _model_name(client, model)
    target = replace(target, model=name)
    answer = await _answer_to(target, ask)
    if _is_refusal_of_a_field(answer) and target.has_running_usage:
        # `continuous_usage_stats` is vLLM's; servers that are strict about fields refuse it.
        target = replace(target, has_running_usage=False)
        answer = await _answer_to(target, ask)
    if answer.fault is not None and _is_refusal_of_a_field(answer) and target.ignores_eos:
        detail = " ".join(str(answer.fault).split())
        raise TargetError(
            f"{target.url(target.endpoint)} refuses a first request: {answer.fault.kind} "
            f"({detail}); if it is for ignore_eos, give --no-ignore-eos"
        )
    if answer.fault is not None:
        raise _error_of(target, target.endpoint, answer.fault)
    return CheckedTarget(target, answer.streamed.num_prompt_tokens if answer.streamed else None)


def _is_refusal_of_a_field(answer: Answer) -> bool:
    return answer.fault is not None and answer.fault.kind in ("status 400", "status 422")


async def _answer_to(target: Target, ask: Ask) -> Answer:
    async with Client(target) as client:
        return await client.send(ask)


async def _model_name(client: Client, wanted: str | None) -> str:
    try:
        names = _names_of(await client.get_json(MODELS_PATH))
    except AnswerFault as fault:
        if fault.kind != "status 404":
            raise _error_of(client.target, MODELS_PATH, fault) from None
        # Not all servers have this page, and a name is good without it.
        names = [] if wanted is None else [wanted]
    if not names:
        raise TargetError(f"{client.target.url(MODELS_PATH)} names no model; give one as --model")
    if wanted is None or wanted in names:
        return wanted or names[0]
    more = ", …" if len(names) > MAX_NAMES else ""
    raise TargetError(
        f"{client.target.base_url} does not serve {wanted!r} but "
        f"{', '.join(names[:MAX_NAMES])}{more}; change --model, or leave it out"
    )


def _names_of(page: object) -> list[str]:
    rows = page.get("data") if isinstance(page, dict) else None
    if not isinstance(rows, list):
        raise AnswerFault(NOT_OPENAI, "the page of models has no data")
    return [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]


def _error_of(target: Target, path: str, fault: AnswerFault) -> TargetError:
    url, detail = target.url(path), " ".join(str(fault).split())
    match fault.kind:
        case kind if kind == CONNECTION_REFUSED:
            text = f"{target.base_url} refuses connections; start the server or change --base-url"
        case kind if kind == CANNOT_CONNECT:
            text = f"cannot connect to {target.base_url} ({detail}); change --base-url"
        case "status 401" | "status 403":
            text = f"{url} wants an API key ({detail}); set OPENAI_API_KEY"
        case "status 404":
            text = f"{url} is not there ({detail}); change --base-url or --endpoint"
        case kind if kind == NOT_OPENAI:
            text = (
                f"{url} does not answer as an OpenAI-compatible server ({detail}); "
                "change --base-url or --endpoint"
            )
        case kind:
            text = f"{url} does not serve a first request: {kind} ({detail})"
    return TargetError(text)
