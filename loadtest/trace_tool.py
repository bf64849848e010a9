"""`chunkserve trace`: what a trace is like; any known file, changed or not, and mixes as a trace.

    chunkserve trace describe azure_llm_2023_code.csv
    chunkserve trace convert lengths.csv out.jsonl --request-rate 5 --burstiness 0.5
    chunkserve trace convert conversation.jsonl short.jsonl --spread-ticks 3 --length-scale 0.05
    chunkserve trace synthesize mix.jsonl --num-prompts 1000 --request-rate 20 --mix-prefixes 4

A stretch is cut out first, then come the changes of `trace_changes`, then new arrivals.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from loadtest.arrivals import arriving_at, ramping_up, within
from loadtest.block_scale import ScaledTrace
from loadtest.converters import LoadedTrace, find_trace, open_trace
from loadtest.mix_arguments import add_mix_arguments, mix_of
from loadtest.send_times import RampStrategy, RampUp
from loadtest.synthetic import synthesize
from loadtest.trace import HASH_BLOCK_TOKENS, TraceError, TraceRequest, write_trace
from loadtest.trace_changes import add_scale_arguments, changes_of, first_requests
from loadtest.trace_stats import describe, description_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The commands and their flags."""
    commands = parser.add_subparsers(dest="action", required=True)
    told = commands.add_parser("describe", help="counts, rates, lengths, burstiness, sharing")
    told.add_argument("file", help="a path, or a file of the folder $CHUNKSERVE_TRACES")
    told.add_argument("--json", action="store_true", help="for programs")
    converted = commands.add_parser("convert", help="write it as Mooncake's JSON lines")
    converted.add_argument("file", help="a path, or a file of the folder $CHUNKSERVE_TRACES")
    converted.add_argument("output", help="the trace to write")
    for command in (told, converted):
        _add_changes(command)
    made = commands.add_parser("synthesize", help="write a mix of short and long requests")
    made.add_argument("output", help="the trace to write")
    made.add_argument("--num-prompts", type=int, default=1000)
    made.add_argument("--request-rate", type=float, default=1.0, help="per second")
    made.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson")
    made.add_argument("--seed", type=int, default=0, help="of lengths and arrivals")
    add_mix_arguments(made.add_argument_group("the mix"))


def _add_changes(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("changes")
    group.add_argument("--from-s", type=float, default=0.0, help="a stretch of the file's time")
    group.add_argument("--to-s", type=float, default=math.inf, help="where it ends")
    group.add_argument("--num-prompts", type=int, help="the first so many requests")
    add_scale_arguments(group)
    group.add_argument("--request-rate", type=float, help="new arrivals, per second")
    group.add_argument("--ramp-up-strategy", choices=[kind.value for kind in RampStrategy])
    group.add_argument("--ramp-up-start-rps", type=float, help="new arrivals of a rate that grows")
    group.add_argument("--ramp-up-end-rps", type=float, help="or falls to this")
    group.add_argument("--burstiness", type=float, default=1.0, help="of them; 1 is Poisson")
    group.add_argument("--seed", type=int, default=0, help="of ticks and arrivals")


def main(arguments: argparse.Namespace) -> int:
    """Run one of them.

    Raises:
        TraceError: the file or a flag cannot be used.
        SendTimesError: a rate, burstiness or ramp that makes no times.
        OSError: a file cannot be read or written.
    """
    if arguments.action == "synthesize":
        return _synthesize(arguments)
    loaded = open_trace(arguments.file)
    trace = _changed(loaded, arguments)
    if arguments.action == "describe" and arguments.json:
        print(json.dumps(describe(trace), indent=2))
        return 0
    if arguments.action == "convert":
        _refuse_own_source(find_trace(arguments.file), Path(arguments.output))
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        write_trace(arguments.output, trace.requests)
    print("\n".join(description_lines(describe(trace))))
    for note in _notes(loaded, trace, arguments):
        print(note, file=sys.stderr)
    return 0


def _synthesize(arguments: argparse.Namespace) -> int:
    requests = synthesize(
        mix_of(arguments),
        arguments.num_prompts,
        arguments.request_rate,
        arguments.burstiness,
        arguments.seed,
    )
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    write_trace(arguments.output, requests)
    print("\n".join(description_lines(describe(ScaledTrace(requests, HASH_BLOCK_TOKENS)))))
    return 0


def _refuse_own_source(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        raise TraceError(f"{target} is the trace itself, and would be lost: give another output")


def _changed(loaded: LoadedTrace, arguments: argparse.Namespace) -> ScaledTrace:
    requests = loaded.requests
    if (arguments.from_s, arguments.to_s) != (0.0, math.inf):
        requests = within(requests, arguments.from_s, arguments.to_s)
    trace = changes_of(arguments).apply(first_requests(requests, arguments.num_prompts))
    return replace(trace, requests=_arriving(trace.requests, arguments))


def _arriving(
    requests: Collection[TraceRequest], arguments: argparse.Namespace
) -> Collection[TraceRequest]:
    """At the times of the rate or the ramp that is asked for, else at their own."""
    ends = (arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    if arguments.ramp_up_strategy is None:
        if ends != (None, None):
            raise TraceError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        if arguments.request_rate is None:
            return requests
        rate, burstiness = arguments.request_rate, arguments.burstiness
        return arriving_at(requests, rate, burstiness, arguments.seed)
    if None in ends or arguments.request_rate is not None:
        raise TraceError(
            "a ramp-up goes from --ramp-up-start-rps to --ramp-up-end-rps, without --request-rate"
        )
    ramp_up = RampUp(RampStrategy(arguments.ramp_up_strategy), *ends)
    return ramping_up(requests, ramp_up, arguments.burstiness, arguments.seed)


def _notes(loaded: LoadedTrace, trace: ScaledTrace, arguments: argparse.Namespace) -> list[str]:
    notes = []
    if loaded.num_left_out:
        notes.append(f"{loaded.num_left_out} rows without a prompt or an answer were left out")
    if not loaded.has_arrivals and arguments.request_rate is arguments.ramp_up_strategy is None:
        notes.append("the file has no times, so all come at once; --request-rate gives them some")
    block = trace.hash_block_tokens
    if block != HASH_BLOCK_TOKENS and any(request.hash_ids for request in trace.requests):
        notes.append(
            f"a hash id stands for {block} tokens now, not {HASH_BLOCK_TOKENS}: give "
            f"--hash-block-tokens {block} with this trace"
        )
    return notes
