"""The `chunkserve` command: a first look without HTTP, the whole service, checks and benchmarks.

A composition root like `app.py`: it may reach everything, and owns nothing but the arguments. What
a command needs is imported when it is called: the list of commands shows at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.number_types import whole_number
from serve_app.command_parser import CommandParser

if TYPE_CHECKING:
    from deployments.config import ServiceConfig
    from serve_app.streaming import TextDelta

    Commands = argparse._SubParsersAction[CommandParser]

DEFAULT_CONFIG = Path("configs/local.yaml")
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells have it."""
EXAMPLES = """examples:
  chunkserve generate "Name three colours of the rainbow."
  chunkserve chunk --chunk-size 64 --overlap-ratio 0.1 --file long.txt
  chunkserve check configs/local.yaml
  chunkserve serve configs/local.yaml --port 8000
  chunkserve bench engine
  chunkserve bench load --base-url http://127.0.0.1:8000 --request-rate 4 --num-prompts 100
  chunkserve simulate trace.jsonl --cost-model h100-llama3-8b --replicas 8
"""
BENCH_MODULES = {
    "peers": (
        "loadtest.bench_peers",
        "this service beside vLLM, llama.cpp, transformers and Ray's own, in one run",
    ),
    "load": (
        "loadtest.bench_load",
        "latencies of any OpenAI-compatible server, with the flags of vllm bench serve",
    ),
    "capacity": (
        "loadtest.bench_capacity",
        "the highest request rate that a server sustains under an SLO",
    ),
    "chunking": (
        "loadtest.bench_chunking",
        "short requests beside long ones, chunked prefill on and off",
    ),
    "forward": (
        "loadtest.bench_forward",
        "the model's steps alone, beside what the machine can read and multiply",
    ),
    "gpu": (
        "loadtest.bench_gpu",
        "the steps of a large random model on a GPU, with CUDA graphs and without",
    ),
    "quality": (
        "loadtest.bench_quality",
        "quantised weights beside the model's own: quality, memory and speed",
    ),
    "ceiling": ("loadtest.bench_ceiling", "how much the load client itself can receive"),
    "serve": (
        "loadtest.bench_serve",
        "the HTTP service without a model, beside a bare Serve application",
    ),
    "soak": (
        "loadtest.bench_soak",
        "many streams, a third of whose clients leave: is anything lost or kept?",
    ),
    "own-cost": (
        "loadtest.bench_own_cost",
        "what a step costs beside the model, from 1 to 1024 running requests",
    ),
    "stall": ("loadtest.bench_stall", "what huge prompts do to the streams beside them"),
}
LOAD_MODULES = {
    "trace": ("loadtest.trace_tool", "describe, convert and make traces of load"),
    "simulate": ("loadtest.sim_command", "serve a trace on a fleet of simulated GPUs"),
    "plan": ("loadtest.plan", "how many GPUs serve a trace within an SLO"),
    "calibrate": ("loadtest.calibrate", "fit a cost model to an engine's step log"),
    "report": ("loadtest.report", "a page with pictures of saved results"),
    "study": ("loadtest.studies.command", "what the simulator shows, on published traces"),
}


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        help="a config file; by default the small model of configs/local.yaml",
    )
    parser.add_argument(
        "--model", help="instead of the config's: hub id, local path, or package:NAME/FILE"
    )


def _config_of(arguments: argparse.Namespace) -> ServiceConfig:
    """The service tree the arguments ask for.

    Raises:
        ConfigError: the file cannot be used.
    """
    from deployments.config import ServiceConfig, load_service_config

    if arguments.config is not None:
        config = load_service_config(arguments.config)
    elif DEFAULT_CONFIG.exists():
        config = load_service_config(DEFAULT_CONFIG)
    else:
        config = ServiceConfig()
    if arguments.model is None:
        return config
    model = config.model.model_copy(update={"source": arguments.model, "served_name": None})
    return config.model_copy(update={"model": model})


def _prompt_of(arguments: argparse.Namespace) -> str:
    if arguments.file is not None:
        return str(arguments.file.read_text(encoding="utf-8"))
    return str(arguments.prompt if arguments.prompt is not None else sys.stdin.read())


# --- generate -------------------------------------------------------------------------------------


def _add_generate(commands: Commands) -> None:
    parser = commands.add_parser("generate", help="answer one prompt on this console")
    parser.add_argument("prompt", nargs="?", help="the prompt; by default standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from a file")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text, without chat template"
    )
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    _add_model_arguments(parser)
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from deployments.execution.startup import made_to_stay
    from deployments.protocol import SamplingParams

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    prompt = _prompt_of(arguments)
    with made_to_stay():
        from serve_app.local_engine import LocalEngine

        local = LocalEngine(_config_of(arguments))
    try:
        ids = local.tokenizer.encode(prompt) if arguments.raw else local.encode_chat(prompt)
        return asyncio.run(_print_answer(local.stream(ids, params)))
    finally:
        local.close()


async def _print_answer(deltas: AsyncGenerator[TextDelta, None]) -> int:
    async for delta in deltas:
        print(delta.text, end="", flush=True)
        if delta.error is not None:
            print(f"error: {delta.error.message}", file=sys.stderr)
            return 1
    print()
    return 0


# --- chunk ----------------------------------------------------------------------------------------


def _add_chunk(commands: Commands) -> None:
    parser = commands.add_parser("chunk", help="show how a prompt is cut into chunks")
    parser.add_argument("prompt", nargs="?", help="the prompt; by default standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from a file")
    parser.add_argument("--chunk-size", type=int, help="tokens per window")
    parser.add_argument("--overlap-ratio", type=float, help="share of a window that repeats")
    parser.add_argument("--json", action="store_true", help="as POST /chunk answers")
    _add_model_arguments(parser)
    parser.set_defaults(run=_chunk)


def _chunk(arguments: argparse.Namespace) -> int:
    config = _config_of(arguments)
    prompt = _prompt_of(arguments)
    from deployments.execution.model_source import read_tokenizer_files, resolve_model_dir
    from serve_app.chunker import Chunker
    from serve_app.tokenization import Tokenizer

    tokenizer = Tokenizer.from_files(read_tokenizer_files(resolve_model_dir(config.model)))
    encoded = tokenizer.encode_with_offsets(prompt)
    answer = Chunker(config.scheduler).describe(
        prompt, encoded, arguments.chunk_size, arguments.overlap_ratio
    )
    if arguments.json:
        print(answer.model_dump_json(indent=2))
        return 0
    print(f"{answer.num_tokens} tokens, {len(answer.chunks)} chunks")
    for chunk in answer.chunks:
        span = f"[{chunk.start}, {chunk.end})"
        print(
            f"{chunk.index:4}  {span:>16}  overlap {chunk.num_overlap_tokens:3}  {chunk.text!r:.80}"
        )
    return 0


# --- serve, check, bench --------------------------------------------------------------------------


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve", help="check a config file, then serve it on this machine with Ray's fast settings"
    )
    parser.add_argument(
        "config", nargs="?", type=Path, help="by default configs/local.yaml if it is there"
    )
    parser.add_argument(
        "--model", help="instead of the file's: hub id, local path, or package:NAME/FILE"
    )
    parser.add_argument("--host", help="instead of the file's")
    parser.add_argument("--port", type=int, help="instead of the file's")
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.config is None and DEFAULT_CONFIG.exists():
        arguments.config = DEFAULT_CONFIG
    if arguments.config is not None and (status := _check(arguments)):
        return status
    from deployments.execution.model_source import resolve_model_dir
    from serve_app.launch import LaunchFailed, LocalService, serve_config_for

    # Here rather than in a replica: the one-time conversion shows its progress on this console.
    resolve_model_dir(_config_of(arguments).model)
    config = serve_config_for(
        arguments.config, arguments.model, {"host": arguments.host, "port": arguments.port}
    )
    try:
        return LocalService(config).run()
    except LaunchFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _add_check(commands: Commands) -> None:
    parser = commands.add_parser(
        "check", help="find misspelled keys and bad values, which Ray Serve would ignore"
    )
    parser.add_argument("config", type=Path)
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from serve_app.serve_config_check import check_serve_config

    faults = check_serve_config(arguments.config)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 2
    print(f"{arguments.config}: ok")
    return 0


def _add_bench(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="measure a server, or this machine")
    kinds = parser.add_subparsers(dest="kind", required=True)
    engine = kinds.add_parser(
        "engine", help="the engine beside transformers' generate and continuous batching, no HTTP"
    )
    engine.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="bfloat16")
    engine.add_argument("--threads", type=whole_number(1), default=2)
    engine.add_argument(
        "--rounds", type=whole_number(1), default=3, help="of each measurement, interleaved"
    )
    engine.add_argument(
        "--tokens", type=whole_number(1), default=64, help="output tokens per request"
    )
    _add_model_arguments(engine)
    engine.set_defaults(run=_bench_engine)
    _add_modules(kinds, BENCH_MODULES)


def _add_load_tests(commands: Commands) -> None:
    _add_modules(commands, LOAD_MODULES)


def _add_modules(commands: Commands, modules: Mapping[str, tuple[str, str]]) -> None:
    for name, (module, text) in modules.items():
        commands.add_parser(name, help=text, module=module)


def _bench_engine(arguments: argparse.Namespace) -> int:
    from loadtest.bench_engine import BenchSettings, run_bench

    settings = BenchSettings(
        config=_config_of(arguments),
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        num_rounds=arguments.rounds,
        num_output_tokens=arguments.tokens,
    )
    print(json.dumps(run_bench(settings), indent=2))
    return 0


def build_parser() -> CommandParser:
    """All commands; those of modules bring their arguments when they are called."""
    parser = CommandParser(
        prog="chunkserve",
        description="LLM inference with chunked prefill: long prompts never stall the chats.",
        epilog=EXAMPLES,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done")
    commands = parser.add_subparsers(dest="command", required=True)
    adders = (_add_generate, _add_chunk, _add_serve, _add_check, _add_bench, _add_load_tests)
    for add in adders:
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Bad input ends in one line that says what to
    change.
    """
    try:
        return _run(argv)
    except OSError as error:
        print(f"error: {_told(error)}", file=sys.stderr)
        return 2
    except ValueError as error:  # of ours: ConfigError, RequestRefused and their like
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # also while a command is imported
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except RuntimeError as error:
        if type(error) is RuntimeError:
            # A fault of ours or of a library: its trace is worth something.
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(argv: Sequence[str] | None) -> int:
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if arguments.verbose else logging.WARNING, format="%(message)s"
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return int(arguments.run(arguments))


def _told(error: OSError) -> str:
    """Without the number of the error, which a reader has to look up."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename2 or error.filename}: {error.strerror}"


if __name__ == "__main__":
    sys.exit(main())
