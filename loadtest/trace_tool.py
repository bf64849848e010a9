"""`chunkserve trace`: what a trace is like, and any known file, changed or not, as a trace.

    chunkserve trace describe azure_llm_2023_code.csv
    chunkserve trace convert lengths.csv out.jsonl --request-rate 5 --burstiness 0.5
    chunkserve trace convert conversation.jsonl short.jsonl --spread-ticks 3 --length-scale 0.05

Owns the flags and their order: first so many, ticks, times, lengths, new arrivals.
"""

from __future__ import annotations

import argparse
import json
import sys

from loadtest.arrivals import arriving_at, scale_times, spread_ticks
from loadtest.block_scale import ScaledTrace, scale_with_blocks
from loadtest.converters import LoadedTrace, open_trace
from loadtest.trace import HASH_BLOCK_TOKENS, TraceError, write_trace
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


def _add_changes(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("changes")
    group.add_argument("--num-prompts", type=int, help="the first so many requests")
    group.add_argument(
        "--spread-ticks", type=float, metavar="S", help="later by chance, so long at most"
    )
    group.add_argument("--time-scale", type=float, default=1.0, help="0.5: twice the rate")
    group.add_argument("--length-scale", type=float, default=1.0, help="hash blocks scale too")
    group.add_argument("--request-rate", type=float, help="new arrivals, per second")
    group.add_argument("--burstiness", type=float, default=1.0, help="of them; 1 is Poisson")
    group.add_argument("--seed", type=int, default=0, help="of ticks and arrivals")
    group.add_argument(
        "--hash-block-tokens", type=int, default=HASH_BLOCK_TOKENS, help="that an id stands for"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run one of them.

    Raises:
        TraceError: the file or a flag cannot be used.
        OSError: a file cannot be read or written.
    """
    loaded = open_trace(arguments.file)
    trace = _changed(loaded, arguments)
    if arguments.action == "describe" and arguments.json:
        print(json.dumps(describe(trace), indent=2))
        return 0
    if arguments.action == "convert":
        write_trace(arguments.output, trace.requests)
    print("\n".join(description_lines(describe(trace))))
    for note in _notes(loaded, trace, arguments):
        print(note, file=sys.stderr)
    return 0


def _changed(loaded: LoadedTrace, arguments: argparse.Namespace) -> ScaledTrace:
    requests = loaded.requests
    if arguments.num_prompts is not None:
        if not 1 <= arguments.num_prompts <= len(requests):
            raise TraceError(
                f"the trace has {len(requests)} requests; give --num-prompts from 1 to that"
            )
        requests = requests[: arguments.num_prompts]
    if arguments.hash_block_tokens < 1:
        raise TraceError("--hash-block-tokens must be at least 1")
    if arguments.spread_ticks is not None:
        requests = spread_ticks(requests, arguments.spread_ticks, arguments.seed)
    requests = scale_times(requests, arguments.time_scale)
    if arguments.request_rate is not None:
        rate, burstiness = arguments.request_rate, arguments.burstiness
        requests = arriving_at(requests, rate, burstiness, arguments.seed)
    return scale_with_blocks(requests, arguments.length_scale, arguments.hash_block_tokens)


def _notes(loaded: LoadedTrace, trace: ScaledTrace, arguments: argparse.Namespace) -> list[str]:
    notes = []
    if loaded.num_left_out:
        notes.append(f"{loaded.num_left_out} rows without a prompt or an answer were left out")
    if not loaded.has_arrivals and arguments.request_rate is None:
        notes.append("the file has no times, so all come at once; --request-rate gives them some")
    block = trace.hash_block_tokens
    if block != HASH_BLOCK_TOKENS and any(request.hash_ids for request in trace.requests):
        notes.append(f"a hash id stands for {block} tokens, not {HASH_BLOCK_TOKENS}")
    return notes
