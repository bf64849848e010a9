"""The result of a load: as a table for a person, as JSON with the keys of `vllm bench serve`.

Owns what stands beside the metrics: what was asked of whom, how tokens were counted, what failed
and why. The metrics themselves are `measures`'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.client import Target
from loadtest.load_arguments import LoadSettings, ResultSettings
from loadtest.load_tally import TallySnapshot
from loadtest.measures import DEFINITIONS, result_json
from loadtest.provenance import command_line, describe_machine
from loadtest.report_data import report_section
from loadtest.stream_reader import TokenCount
from loadtest.timeline import TimelineCounts

MIN_LAG_MS = 5.0
MAX_LAG_SHARE = 0.1
"""Of the median TTFT: a client that is later than this measures itself."""
Json = dict[str, Any]
_COUNTING = {
    TokenCount.USAGE: "by the usage that came with each event",
    TokenCount.LOGPROBS: "by the logprobs of each event",
    TokenCount.CONFIRMED_EVENTS: "one a stream event, as many as the answer's usage says",
    TokenCount.SCALED_EVENTS: "by the answer's usage, spread evenly over its events: an estimate",
    TokenCount.EVENTS: "one a stream event: the server told no counts",
}


@dataclass(frozen=True, slots=True)
class RunState:
    """How far a run is.

    Args:
        date: when it began.
        num_planned: requests it was to send.
        is_interrupted: whether it was ended before all of them were sent and answered.
    """

    date: str
    num_planned: int
    is_interrupted: bool


def result_of(settings: LoadSettings, tally: TallySnapshot, state: RunState) -> Json:
    """The result so far.

    Args:
        settings: of the run, with the target that was checked.
        tally: of the requests that have ended.
        state: of the run.
    """
    target, workload, pace, result = (
        settings.target,
        settings.workload,
        settings.pace,
        settings.result,
    )
    backend = _backend_of(target)
    ramp_up = pace.ramp_up
    head: Json = {
        "date": state.date,
        "endpoint_type": backend,
        "backend": backend,
        "label": result.label,
        "model_id": target.model,
        "tokenizer_id": workload.tokenizer,
        "dataset_name": workload.dataset.value,
        "dataset_path": None if workload.path is None else str(workload.path),
        "num_prompts": state.num_planned,
        "command": command_line(),
        "machine": describe_machine(),
        **result.metadata,
        "request_rate": _finite(pace.request_rate),
        "burstiness": pace.burstiness,
        "max_concurrency": pace.max_concurrency,
    }
    if ramp_up is not None:
        head["ramp_up_strategy"] = ramp_up.strategy.value
        head["ramp_up_start_rps"] = ramp_up.start_rps
        head["ramp_up_end_rps"] = ramp_up.end_rps
    metrics = tuple(dict.fromkeys((*result.metrics, "worst_gap", "lag")))
    return {
        **head,
        "self_timed": pace.is_self_timed,
        "ignore_eos": target.ignores_eos,
        "interrupted": state.is_interrupted,
        **result_json(tally.summary, metrics, result.percentiles),
        **_peaks(tally.timeline),
        "first_faults": dict(tally.first_faults),
        "tokens_counted_by": dict(tally.counted_by),
        "definitions": DEFINITIONS,
        "report": report_section(tally.summary, tally.timeline),
    }


def _peaks(timeline: TimelineCounts) -> Json:
    """Of a second, or of a bin of the timeline where those have grown longer."""
    num_bins = max(1, round(1.0 / timeline.bin_s))
    tokens = timeline.num_output_tokens
    sums = [sum(tokens[start : start + num_bins]) for start in range(0, len(tokens), num_bins)]
    return {
        "max_output_tokens_per_s": max(sums, default=0) / (num_bins * timeline.bin_s),
        "max_concurrent_requests": timeline.max_open,
    }


def _finite(rate: float) -> float | str:
    # JSON has no infinity; vLLM writes the word as well.
    return "inf" if math.isinf(rate) else rate


def file_name(settings: LoadSettings, date: str) -> str:
    """As `vllm bench serve` names it: label, rate, concurrency, model, date."""
    if settings.result.filename is not None:
        return settings.result.filename
    pace = settings.pace
    concurrency = "" if pace.max_concurrency is None else f"-concurrency{pace.max_concurrency}"
    model = settings.target.model.rsplit("/", 1)[-1]
    rate = f"{pace.request_rate}qps"
    if pace.ramp_up is not None:
        ramp_up = pace.ramp_up
        ends = f"{ramp_up.start_rps:g}qps-{ramp_up.end_rps:g}qps"
        rate = f"ramp-up-{ramp_up.strategy.value}-{ends}"
    label = settings.result.label or _backend_of(settings.target)
    return f"{label}-{rate}{concurrency}-{model}-{date}.json"


def _backend_of(target: Target) -> str:
    return "openai-chat" if target.is_chat else "openai"


# --- for a person ---------------------------------------------------------------------------------


def table_of(result: Mapping[str, Any], settings: ResultSettings) -> str:
    """The result as text, with what its names mean."""
    lines = [f"{name:<26}{value}" for name, value in _totals(result)]
    keys = ("mean", "median", "std", "max", *(f"p{p:g}" for p in settings.percentiles))
    lines += ["", "ms".ljust(12) + "".join(key.rjust(11) for key in keys)]
    for metric in dict.fromkeys((*settings.metrics, "worst_gap", "lag")):
        figures = [result.get(f"{key}_{metric}_ms") for key in keys]
        lines.append(metric.ljust(12) + "".join(_figure(figure).rjust(11) for figure in figures))
    lines += ["", *_failures(result), *_counting(result), *_cautions(result), "", DEFINITIONS]
    return "\n".join(lines)


def _totals(result: Mapping[str, Any]) -> list[tuple[str, object]]:
    goodput = result["request_goodput"]
    state = "interrupted after" if result["interrupted"] else "duration"
    slo = " ".join(result["slo"])
    return [
        (state, f"{result['duration']:.2f} s"),
        ("completed / failed", f"{result['completed']} / {result['failed']}"),
        ("prompt tokens", f"{result['total_input_tokens']}"),
        ("  from the prefix cache", f"{result['total_cached_tokens']}"),
        ("output tokens", f"{result['total_output_tokens']}"),
        ("requests/s", f"{result['request_throughput']:.3f}"),
        ("goodput", "-" if goodput is None else f"{goodput:.3f} requests/s within {slo} (ms)"),
        ("output tokens/s", f"{result['output_throughput']:.1f}"),
        ("all tokens/s", f"{result['total_token_throughput']:.1f}"),
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _failures(result: Mapping[str, Any]) -> list[str]:
    words = result["first_faults"]
    return [
        f"{count} failed: {kind} ({words.get(kind, '')})"
        for kind, count in result["errors"].items()
    ]


def _counting(result: Mapping[str, Any]) -> list[str]:
    counted = result["tokens_counted_by"]
    return [
        f"tokens of {counted[way.value]} answers counted {words}"
        for way, words in _COUNTING.items()
        if way.value in counted
    ]


def _cautions(result: Mapping[str, Any]) -> list[str]:
    """What a reader should know before the figures are believed."""
    cautions = []
    if result["tokenizer_id"] is None:
        cautions.append(
            "prompts were plain words, about a token each; --tokenizer makes them exact"
        )
    lag_ms, ttft_ms = result["median_lag_ms"], result.get("median_ttft_ms")
    is_bounded = result["max_concurrency"] is not None
    if not is_bounded and ttft_ms and lag_ms > max(MIN_LAG_MS, MAX_LAG_SHARE * ttft_ms):
        cautions.append("the client sent late: the figures are its own as much as the server's")
    if result["interrupted"]:
        cautions.append("interrupted: requests that had not ended are not counted")
    return cautions
