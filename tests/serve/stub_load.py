"""Load on the service of stub_app: clients that ask without pause, and how their requests ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from conftest import Service
from stub_tools import CHAT

NUM_TOKENS = 40
NUM_CLIENTS = 24
LIMIT_S = 40.0
"""Longer than a replica takes to be replaced and a request to be served then."""


@dataclass
class Tally:
    """How the requests of a load ended."""

    texts: dict[int, set[str]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    num_sent: int = 0
    longest_s: float = 0.0

    def note(self, end: str) -> None:
        self.ends[end] += 1


async def ask(client: httpx.AsyncClient, number: int, tally: Tally) -> None:
    """One request, streamed or not; notes how it ended."""
    prompt = [1 + number % 7] * 30 + [1 + number % 11] * 10
    key = number % 77
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "priority": CHAT,
        "stream": number % 2 == 0,
    }
    tally.num_sent += 1
    began_s = time.monotonic()
    try:
        end, text = await read_answer(client, body)
        if text is not None:
            tally.texts.setdefault(key, set()).add(text)
        tally.note(end)
    except httpx.TimeoutException:
        tally.note("silence")
    except httpx.HTTPError as error:
        tally.note(f"connection lost: {type(error).__name__}")
    tally.longest_s = max(tally.longest_s, time.monotonic() - began_s)


async def read_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str | None]:
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        raw = (await answer.aread()).decode()
    if answer.status_code != 200:
        return f"status {answer.status_code}", None
    if not body["stream"]:
        choice = json.loads(raw)["choices"][0]
        return f"text, {choice['finish_reason']}", choice["text"]
    events = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data:")]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    if any("error" in event for event in parsed):
        return "error event", None
    choices = [choice for event in parsed for choice in event["choices"]]
    return f"text, {choices[-1]['finish_reason']}", "".join(choice["text"] for choice in choices)


async def ask_until(
    service: Service, is_over: Callable[[], bool], first: int, tally: Tally
) -> None:
    """One client: asks again and again until it is over, each time something else."""
    async with httpx.AsyncClient(base_url=service.url, timeout=LIMIT_S) as client:
        number = first
        while not is_over():
            await ask(client, number, tally)
            number += NUM_CLIENTS


async def load_until(service: Service, is_over: Callable[[], bool]) -> Tally:
    """How the requests of NUM_CLIENTS clients ended."""
    tally = Tally()
    await asyncio.gather(*(ask_until(service, is_over, n, tally) for n in range(NUM_CLIENTS)))
    return tally
