"""The flags of `bench load`, named as `vllm bench serve` names them, and what they come to.

Owns what is sent, when, and what is told of it: the flags, their defaults and which of them exclude
each other. Those of the server are `target_arguments`'. Reads no file and asks no server.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from loadtest.client import Target
from loadtest.measures import Slo
from loadtest.mix_arguments import add_mix_arguments, mix_of
from loadtest.number_types import whole_number
from loadtest.prompts import parse_languages
from loadtest.send_times import RampStrategy, RampUp
from loadtest.synthetic import Mix
from loadtest.target_arguments import ArgumentsError, add_target_arguments, pairs_of, target_of
from loadtest.trace_changes import TraceChanges, add_scale_arguments, changes_of

DEFAULT_NUM_PROMPTS = 1000
MAX_NUM_PROMPTS = 100_000_000


class Dataset(str, Enum):
    """Where the lengths of requests come from."""

    RANDOM = "random"
    LENGTHS = "lengths"
    TRACE = "trace"
    SYNTHETIC = "synthetic"


DATASETS = {**{kind.value: kind for kind in Dataset}, "timed_trace": Dataset.TRACE}
"""By what they are called, also by `vllm bench serve`."""
DRAWN = (Dataset.RANDOM, Dataset.SYNTHETIC)
"""Those that no file holds."""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What is sent. `num_prompts` None: all of a file, or DEFAULT_NUM_PROMPTS. `changes` are those
    of a file's requests.
    """

    dataset: Dataset
    path: Path | None
    num_prompts: int | None
    input_len: int
    output_len: int
    prefix_len: int
    range_ratio: float
    mix: Mix
    changes: TraceChanges
    tokenizer: str | None
    languages: Mapping[str, float]
    seed: int


@dataclass(frozen=True, slots=True)
class PaceSettings:
    """When it is sent. `request_rate` inf without a bound on concurrency: all at once."""

    request_rate: float
    burstiness: float
    ramp_up: RampUp | None
    max_concurrency: int | None
    is_self_timed: bool
    seed: int


@dataclass(frozen=True, slots=True)
class ResultSettings:
    """What is told of it, and where it is kept. `label` None: that of the backend."""

    slo: Slo
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    is_saved: bool
    is_detailed: bool
    directory: Path
    filename: str | None
    label: str | None
    metadata: dict[str, str]
    shows_progress: bool


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """All of one run. `model` None: the first one that the server serves. `ready_s`: so long it is
    waited for a server that is yet to start.
    """

    target: Target
    model: str | None
    ready_s: float
    workload: WorkloadSettings
    pace: PaceSettings
    result: ResultSettings
    num_warmups: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench load`."""
    add_target_arguments(parser)
    add_workload_arguments(parser)
    _add_pace_arguments(parser)
    _add_result_arguments(parser)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """What is sent."""
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", choices=[*DATASETS], default="random")
    group.add_argument("--dataset-path", type=Path, help="of a trace or a table of lengths")
    group.add_argument(
        "--num-prompts",
        type=whole_number(1, MAX_NUM_PROMPTS),
        help=f"by default all of a trace, else {DEFAULT_NUM_PROMPTS}",
    )
    group.add_argument(
        "--random-input-len", "--input-len", type=int, default=1024, help="prompt tokens"
    )
    group.add_argument(
        "--random-output-len", "--output-len", type=int, default=128, help="output tokens"
    )
    group.add_argument(
        "--random-prefix-len",
        type=int,
        default=0,
        help="tokens before them that all prompts share, with --tokenizer",
    )
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths vary by this share"
    )
    add_mix_arguments(group)
    add_scale_arguments(group)
    group.add_argument(
        "--tokenizer",
        help="the model's: folder, tokenizer.json, package:NAME/FILE or hub id; prompts are then "
        "exactly as long as wanted and share prefixes as the trace says. By default plain words, "
        "about a token each",
    )
    group.add_argument(
        "--languages", default="en:6,zh:3,emoji:1", help="shares of the texts, with --tokenizer"
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths, prompts and send times")


def _add_pace_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pace")
    group.add_argument("--request-rate", type=float, help="per second; inf (default): at once")
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1 Poisson, below in bursts, above more even"
    )
    group.add_argument("--max-concurrency", type=int, help="in flight at once, at most")
    group.add_argument(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        help="send at the trace's own times (default for traces)",
    )
    group.add_argument("--ramp-up-strategy", choices=[kind.value for kind in RampStrategy])
    group.add_argument("--ramp-up-start-rps", type=float)
    group.add_argument("--ramp-up-end-rps", type=float)
    group.add_argument("--num-warmups", type=int, default=0, help="requests before the run")


def _add_result_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el")
    group.add_argument("--metric-percentiles", default="50,90,99")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="KEY:MS", help="SLO, as in ttft:300 tpot:50"
    )
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument(
        "--save-detailed", action="store_true", help="with it, a line a request in .jsonl"
    )
    group.add_argument("--result-dir", type=Path, default=Path())
    group.add_argument("--result-filename")
    group.add_argument(
        "--label", help="begins the file's name, and names the run in reports; else the backend's"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")


def settings_of(arguments: argparse.Namespace) -> LoadSettings:
    """What the flags come to.

    Raises:
        ArgumentsError: they exclude each other, or one is out of range.
        MeasuresError: the SLO cannot be read.
        SendTimesError: a rate of the ramp-up is not above 0.
    """
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ArgumentsError(f"--max-concurrency must be above 0, not {arguments.max_concurrency}")
    if arguments.num_warmups < 0:
        raise ArgumentsError("--num-warmups must not be negative")
    return LoadSettings(
        target=target_of(arguments),
        model=arguments.model,
        ready_s=arguments.ready_check_timeout_sec,
        workload=workload_of(arguments),
        pace=_pace_of(arguments),
        result=_result_of(arguments),
        num_warmups=arguments.num_warmups,
    )


def workload_of(arguments: argparse.Namespace) -> WorkloadSettings:
    """The workload.

    Raises:
        ArgumentsError: a dataset lacks its file.
        TraceError: no mix is of these shares, or a block has no token.
        PromptError: a language is not known.
    """
    dataset = DATASETS[arguments.dataset_name]
    if dataset not in DRAWN and arguments.dataset_path is None:
        raise ArgumentsError(f"--dataset-name {dataset.value} needs a file: give --dataset-path")
    if arguments.random_prefix_len and arguments.tokenizer is None:
        raise ArgumentsError("--random-prefix-len needs --tokenizer: plain words share nothing")
    changes = changes_of(arguments)
    if dataset in DRAWN and changes != TraceChanges(seed=arguments.seed):
        raise ArgumentsError(
            f"--spread-ticks, --time-scale, --length-scale and --hash-block-tokens change a file: "
            f"leave them out with --dataset-name {dataset.value}"
        )
    return WorkloadSettings(
        dataset=dataset,
        path=arguments.dataset_path,
        num_prompts=arguments.num_prompts,
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        prefix_len=arguments.random_prefix_len,
        range_ratio=arguments.random_range_ratio,
        mix=mix_of(arguments),
        changes=changes,
        tokenizer=arguments.tokenizer,
        languages=parse_languages(arguments.languages),
        seed=arguments.seed,
    )


def _pace_of(arguments: argparse.Namespace) -> PaceSettings:
    dataset = DATASETS[arguments.dataset_name]
    has_times = dataset is Dataset.TRACE
    ramp_up = _ramp_up_of(arguments)
    has_rate = arguments.request_rate is not None or ramp_up is not None
    is_self_timed = arguments.self_timed
    if is_self_timed is None:
        is_self_timed = has_times and not has_rate
    if is_self_timed and not has_times:
        raise ArgumentsError(f"--self-timed needs requests with times: {dataset.value} has none")
    if is_self_timed and has_rate:
        raise ArgumentsError("--self-timed sends at the trace's own times: leave the rate out")
    if ramp_up is not None and arguments.request_rate is not None:
        raise ArgumentsError("--ramp-up-strategy sets the rate: leave --request-rate out")
    return PaceSettings(
        request_rate=math.inf if arguments.request_rate is None else arguments.request_rate,
        burstiness=arguments.burstiness,
        ramp_up=ramp_up,
        max_concurrency=arguments.max_concurrency,
        is_self_timed=is_self_timed,
        seed=arguments.seed,
    )


def _ramp_up_of(arguments: argparse.Namespace) -> RampUp | None:
    ends = (arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    if arguments.ramp_up_strategy is None:
        if any(end is not None for end in ends):
            raise ArgumentsError("a ramp-up needs --ramp-up-strategy linear or exponential")
        return None
    if ends[0] is None or ends[1] is None:
        raise ArgumentsError("a ramp-up needs --ramp-up-start-rps and --ramp-up-end-rps")
    return RampUp(RampStrategy(arguments.ramp_up_strategy), ends[0], ends[1])


def _result_of(arguments: argparse.Namespace) -> ResultSettings:
    return ResultSettings(
        slo=Slo.parse(arguments.goodput),
        metrics=_names(arguments.percentile_metrics),
        percentiles=_numbers(arguments.metric_percentiles),
        is_saved=arguments.save_result or arguments.save_detailed,
        is_detailed=arguments.save_detailed,
        directory=arguments.result_dir,
        filename=arguments.result_filename,
        label=arguments.label,
        metadata=pairs_of("--metadata", arguments.metadata),
        shows_progress=not arguments.disable_tqdm,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in _names(text))
    except ValueError as error:
        raise ArgumentsError(f"--metric-percentiles takes numbers, not {text!r}") from error
