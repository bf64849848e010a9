"""What chunked prefill does for short requests beside long ones, on this machine's real service.

Two services of the same model run side by side, one with the chunk size of the config, one that
takes every prompt whole (chunk_size = the model's context). They take turns under the same load:
short requests in an open loop, and every so often a long prompt. Figures are those of the short
requests; `alone` is the chunked service without the long ones.

    chunkserve bench chunking --config configs/local.yaml --rounds 2 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from deployments.config import SchedulerConfig
from loadtest.client import Ask, Client, Target
from loadtest.load_prompts import WordPrompts
from loadtest.load_run import LoadRun, PlannedRequest
from loadtest.load_tally import LoadTally
from loadtest.load_workload import plan_requests
from loadtest.local_service import changed_config, local_service
from loadtest.measures import DEFINITIONS, Slo, Summary, result_json
from loadtest.provenance import check_can_keep, keep_result, origin
from loadtest.send_times import steady_times
from loadtest.target_check import check_target
from loadtest.trace import TraceRequest

WHOLE = "whole"
CHUNKED = "chunked"
ALONE = "alone"
METRICS = ("ttft", "itl", "worst_gap", "e2el")
PERCENTILES = (50.0, 99.0)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChunkingSettings:
    """The load of one round: short requests at a rate, long ones at a period."""

    config: Path
    context: int
    num_rounds: int
    round_s: float
    short: TraceRequest
    short_rate: float
    long: TraceRequest
    long_period_s: float


class Contest:
    """The services' turns under the same load.

    Args:
        settings: of the load.
        targets: by name.
    """

    def __init__(self, settings: ChunkingSettings, targets: dict[str, Target]) -> None:
        self._settings = settings
        self._targets = targets
        self._prompts = WordPrompts(seed=0)
        # Never the same prompt twice: nothing is found in a prefix cache.
        self._numbers = count()
        self._short = {name: LoadTally(Slo()) for name in (ALONE, CHUNKED, WHOLE)}
        self._long = {name: LoadTally(Slo()) for name in (CHUNKED, WHOLE)}
        self._busy_s = dict.fromkeys(self._short, 0.0)

    async def run(self) -> Json:
        """All rounds; what the requests came to."""
        for number in range(self._settings.num_rounds):
            await self._turn(ALONE, number)
            await self._turn(CHUNKED, number)
            await self._turn(WHOLE, number)
        return {
            "short": {name: self._result(name, self._short) for name in self._short},
            "long": {name: self._result(name, self._long) for name in self._long},
        }

    async def _turn(self, name: str, round_number: int) -> None:
        short = self._short[name]
        async with Client(self._targets[CHUNKED if name == ALONE else name]) as client:
            runs = [self._load(client, short, self._plan_short(round_number))]
            if name != ALONE:
                runs.append(self._load(client, self._long[name], self._plan_long()))
            await asyncio.gather(*runs)
        self._busy_s[name] += short.last_end_s

    async def _load(
        self, client: Client, tally: LoadTally, planned: Iterator[PlannedRequest]
    ) -> None:
        run = LoadRun(client, lambda ended: tally.add(ended, run.start_s))
        await run.run(planned)

    def _plan_short(self, seed: int) -> Iterator[PlannedRequest]:
        settings = self._settings
        num_requests = max(1, round(settings.short_rate * settings.round_s))
        times_s = steady_times(num_requests, settings.short_rate, seed=seed)
        requests = [settings.short] * num_requests
        return plan_requests(requests, self._prompts, times_s, self._numbers)

    def _plan_long(self) -> Iterator[PlannedRequest]:
        settings = self._settings
        times_s: list[float] = []
        while (due_s := settings.long_period_s * (len(times_s) + 0.5)) < settings.round_s:
            times_s.append(due_s)
        requests = [settings.long] * len(times_s)
        return plan_requests(requests, self._prompts, times_s, self._numbers)

    def _result(self, name: str, tallies: dict[str, LoadTally]) -> Json:
        summary: Summary = tallies[name].summary(self._busy_s[name])
        result = result_json(summary, METRICS, PERCENTILES)
        names = ("completed", "failed", "errors", "total_input_tokens", "total_output_tokens")
        figures = [
            f"{key}_{metric}_ms" for metric in METRICS for key in ("mean", "p50", "p99", "max")
        ]
        return {key: result[key] for key in (*names, *figures)}


def configs_of(settings: ChunkingSettings) -> dict[str, Json]:
    """The Serve configs of both services, by name.

    Raises:
        ValueError: the config has no application, or several.
    """
    chunked = changed_config(settings.config, {})
    scheduler = chunked["applications"][0]["args"].get("scheduler") or {}
    # Room for a whole prompt beside as many decodes as there may be.
    max_num_seqs = scheduler.get("max_num_seqs", SchedulerConfig().max_num_seqs)
    whole: Json = {
        "chunk_size": settings.context,
        "overlap_ratio": 0.0,
        "max_num_batched_tokens": settings.context + max_num_seqs,
    }
    return {CHUNKED: chunked, WHOLE: changed_config(settings.config, {"scheduler": whole})}


def run_bench(settings: ChunkingSettings) -> Json:
    """Start both services, load them in turns, end them; the result.

    Raises:
        ServiceFailed: one did not come up.
        ValueError: the config is not fit for it; one line says why.
    """
    configs = configs_of(settings)
    with ExitStack() as stack:
        urls = {name: stack.enter_context(local_service(c)) for name, c in configs.items()}
        figures = asyncio.run(_contest(settings, urls))
    return {
        **origin(),
        "scheduler": {
            name: config["applications"][0]["args"].get("scheduler")
            for name, config in configs.items()
        },
        **figures,
        "definitions": DEFINITIONS,
    }


async def _contest(settings: ChunkingSettings, urls: dict[str, str]) -> Json:
    targets = {}
    for name, url in urls.items():
        target = Target(url, "/v1/completions", "", ignores_eos=True)
        targets[name] = (await check_target(target, None, Ask("Hello", 2))).target
    return await Contest(settings, targets).run()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    parser.add_argument("--context", type=int, default=8192, help="of the model, in tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="of sending, per round")
    parser.add_argument("--short-input-len", type=int, default=64)
    parser.add_argument("--short-output-len", type=int, default=32)
    parser.add_argument("--short-rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--long-input-len", type=int, default=3000)
    parser.add_argument("--long-output-len", type=int, default=8)
    parser.add_argument("--long-period-s", type=float, default=30.0, help="one in so many seconds")
    parser.add_argument("--save-result", type=Path, help="write the result to this file as well")


def settings_of(arguments: argparse.Namespace) -> ChunkingSettings:
    """What the arguments come to.

    Raises:
        ValueError: one is not above 0.
    """
    for name, value in vars(arguments).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    return ChunkingSettings(
        config=arguments.config,
        context=arguments.context,
        num_rounds=arguments.rounds,
        round_s=arguments.seconds,
        short=TraceRequest(0.0, arguments.short_input_len, arguments.short_output_len),
        short_rate=arguments.short_rate,
        long=TraceRequest(0.0, arguments.long_input_len, arguments.long_output_len),
        long_period_s=arguments.long_period_s,
    )


def main(arguments: argparse.Namespace) -> int:
    """Run it and print the figures as JSON; 1 if a request failed."""
    check_can_keep(arguments.save_result)
    result = run_bench(settings_of(arguments))
    if arguments.save_result is not None:
        keep_result(arguments.save_result, result)
    print(json.dumps(result, indent=2))
    return int(any(part["failed"] for kind in ("short", "long") for part in result[kind].values()))


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
