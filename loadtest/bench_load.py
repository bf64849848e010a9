"""Load any OpenAI-compatible server and tell its latencies, with the flags of `vllm bench serve`.

    chunkserve bench load --base-url http://127.0.0.1:8000 --request-rate 4 --num-prompts 200 \\
        --random-input-len 512 --random-output-len 64 --goodput ttft:300 tpot:50 --save-result
    chunkserve bench load --dataset-name trace --dataset-path azure_llm_2023_conv_5min
    chunkserve bench load --dataset-name trace --dataset-path trace.jsonl --time-scale 2

The wiring alone: flags are `load_arguments`', requests `load_sources`', the run `load_session`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path

from loadtest.client import Ask
from loadtest.load_arguments import LoadSettings, add_arguments, settings_of
from loadtest.load_result import Json, RunState, result_of, table_of
from loadtest.load_session import Load, LoadSession
from loadtest.load_sources import due_times, prompts_of, read_requests
from loadtest.load_tally import LoadTally
from loadtest.load_workload import plan_requests
from loadtest.provenance import keep_result
from loadtest.target_check import wait_for_target

__all__ = ["add_arguments", "main", "run_load"]

PROBE_TOKENS = 2
INTERRUPTED = 130
"""Exit status of a command that was ended by Ctrl-C."""


async def run_load(settings: LoadSettings) -> tuple[Json, Path | None]:
    """Check the target, send the load; its result, and the file it is to be kept in, if any.

    Raises:
        ValueError: the flags, the trace or the server are not fit for a load; one line says why.
        OSError: a file cannot be read or written.
    """
    # What cannot be told afterwards is refused before.
    result_of(settings, LoadTally(settings.result.slo).snapshot(0.0), RunState("", 0, False))
    trace = read_requests(settings.workload)
    requests = trace.requests
    prompts = prompts_of(settings.workload, settings.target, trace.hash_block_tokens)
    times_s = due_times(requests, settings.pace)
    first = next(iter(requests))
    probe = Ask(prompts.prompt(first, -1), min(PROBE_TOKENS, first.output_length))
    checked = await wait_for_target(settings.target, settings.model, probe, settings.ready_s)
    if checked.num_prompt_tokens is not None:
        prompts = prompts.fitted(first, checked.num_prompt_tokens)
    load = Load(
        planned=plan_requests(requests, prompts, times_s),
        num_planned=len(requests),
        # Prompts of their own: what they leave in the prefix cache is of no use to the load.
        warmups=plan_requests(
            repeat(first, settings.num_warmups), prompts, repeat(None), count(-2, -1)
        ),
    )
    session = LoadSession(replace(settings, target=checked.target), load)
    return await session.run(), session.result_path


def main(arguments: argparse.Namespace) -> int:
    """Run it and print its result; 1 if no request completed, 130 if it was interrupted."""
    settings = settings_of(arguments)
    try:
        result, path = asyncio.run(run_load(settings))
    except KeyboardInterrupt:
        print("interrupted before the load began", file=sys.stderr)
        return INTERRUPTED
    # Told before it is kept: a full disk does not take it.
    print(table_of(result, settings.result))
    if path is not None:
        keep_result(path, result)
        print(f"saved to {path}", file=sys.stderr)
    if result["interrupted"]:
        return INTERRUPTED
    return 0 if result["completed"] else 1


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
