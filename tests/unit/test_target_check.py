"""What is wrong with a server is told in one line before any load is sent."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from loadtest.client import Ask, Target
from loadtest.target_check import TargetError, check_target
from tests.unit.openai_stub import MODEL, Handler, complete, list_models, serving

ASK = Ask("hello", 2)


def check(
    handler: Handler = complete,
    models: Handler = list_models,
    model: str | None = None,
    endpoint: str = "/v1/completions",
) -> Target:
    async def scene() -> Target:
        async with serving(handler, models) as url:
            return (await check_target(Target(url, endpoint, ""), model, ASK)).target

    return asyncio.run(scene())


async def _html(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>It works!</html>", content_type="text/html")


async def _no_page(_: web.Request) -> web.StreamResponse:
    return web.Response(status=404, text="no such page")


async def _no_models(_: web.Request) -> web.StreamResponse:
    return web.json_response({"data": []})


async def _wants_key(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no key"}}, status=401)


async def _fails(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "out of\nmemory"}}, status=500)


async def _refuses_running_usage(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if "continuous_usage_stats" in body["stream_options"]:
        return web.json_response({"detail": "extra fields not permitted"}, status=422)
    return await complete(request)


def test_the_model_is_the_servers_own_unless_named() -> None:
    """A run without --model has no model, or one that is served is refused."""
    assert check().model == MODEL
    assert check(model=MODEL).model == MODEL
    assert check(models=_no_page, model="any").model == "any"


def test_a_server_that_refuses_running_usage_is_asked_without() -> None:
    """A strict server cannot be measured, or an open one loses its exact counts."""
    assert not check(_refuses_running_usage).has_running_usage
    assert check().has_running_usage


@pytest.mark.parametrize(
    ("handlers", "model", "message"),
    [
        (
            (complete, list_models),
            "gpt-9",
            r"does not serve 'gpt-9' but stub-model; change --model",
        ),
        ((complete, _no_models), None, r"names no model; give one as --model"),
        ((complete, _no_page), None, r"names no model; give one as --model"),
        ((complete, _html), None, r"does not answer as an OpenAI-compatible server"),
        ((_html, list_models), None, r"does not answer as an OpenAI-compatible server .*text/html"),
        ((_no_page, list_models), None, r"is not there \(.*\); change --base-url or --endpoint"),
        ((complete, _wants_key), None, r"wants an API key \(no key\); set OPENAI_API_KEY"),
        ((_fails, list_models), None, r"a first request: status 500 \(out of memory\)"),
    ],
)
def test_each_fault_is_one_line(
    handlers: tuple[Handler, Handler], model: str | None, message: str
) -> None:
    """A target that cannot work is measured all the same, or ends in a traceback."""
    with pytest.raises(TargetError, match=message) as error:
        check(*handlers, model)
    assert "\n" not in str(error.value)


def test_a_server_that_is_down_is_one_line() -> None:
    """A closed port ends in a traceback."""

    async def scene() -> None:
        async with serving() as url:
            pass
        with pytest.raises(TargetError, match=r"refuses connections; start the server"):
            await check_target(Target(url, "/v1/completions", ""), None, ASK)
        with pytest.raises(TargetError, match=r"cannot connect .*; change --base-url"):
            await check_target(Target("nowhere", "/v1/completions", ""), None, ASK)

    asyncio.run(scene())
