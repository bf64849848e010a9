"""What a trace is like: how many, how fast, how long, how bursty, how much of it is shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.block_scale import ScaledTrace

PERCENTS = (10, 50, 90, 95, 99)
WINDOWS_S = (1.0, 10.0, 60.0)
Numbers = NDArray[np.float64]


def describe(trace: ScaledTrace) -> dict[str, Any]:
    """Figures of a trace in the order of its times, ready for JSON."""
    requests = trace.requests
    return {
        "num_requests": len(requests),
        "input_length": _lengths([request.input_length for request in requests]),
        "output_length": _lengths([request.output_length for request in requests]),
        "arrivals": _arrivals(np.array([request.timestamp_s for request in requests])),
        "sharing": _sharing(trace),
        "priorities": _counts([request.priority for request in requests]),
    }


def _lengths(values: Sequence[int]) -> dict[str, float]:
    lengths = np.array(values, dtype=np.float64)
    mean = float(lengths.mean())
    figures = {"mean": mean, "cv": float(lengths.std() / mean)}
    figures |= {f"p{percent}": float(np.percentile(lengths, percent)) for percent in PERCENTS}
    return figures | {"min": float(lengths.min()), "max": float(lengths.max())}


def _arrivals(times_s: Numbers) -> dict[str, Any] | None:
    """None where all come at once: there is no rate."""
    span_s = float(times_s[-1] - times_s[0])
    if span_s <= 0.0:
        return None
    gaps_s = np.diff(times_s)
    cv = float(gaps_s.std() / gaps_s.mean())
    return {
        "duration_s": span_s,
        "mean_rate": (len(times_s) - 1) / span_s,
        "gap_cv": cv,
        # The gamma distribution whose gaps vary as much; 1 is Poisson.
        "burstiness": 1.0 / cv**2 if cv else None,
        "max_gap_s": float(gaps_s.max()),
        "same_time_share": float((gaps_s == 0.0).mean()),
        "windows": [_window(times_s, window_s) for window_s in WINDOWS_S if window_s <= span_s],
    }


def _window(times_s: Numbers, window_s: float) -> dict[str, float]:
    places = np.floor((times_s - times_s[0]) / window_s).astype(np.int64)
    # The last window is cut short by the end of the trace, and counts for nothing. Empty windows
    # are not written down: a trace of years has more of them than fit.
    num_windows = int(places[-1])
    _, counts = np.unique(places[places < num_windows], return_counts=True)
    mean = float(counts.sum()) / num_windows
    variance = float((counts.astype(np.float64) ** 2).sum()) / num_windows - mean**2
    return {
        "window_s": window_s,
        "peak_rate": float(counts.max()) / window_s,
        # Index of dispersion of counts: 1 for Poisson, above for bursts that last so long.
        "dispersion": variance / mean if mean else 0.0,
    }


def _sharing(trace: ScaledTrace) -> dict[str, float] | None:
    """None where the trace does not say what is shared."""
    if not any(request.hash_ids for request in trace.requests):
        return None
    known: set[tuple[int, int]] = set()
    num_hit_tokens = num_tokens = num_blocks = 0
    for request in trace.requests:
        num_tokens += request.input_length
        num_blocks += len(request.hash_ids)
        num_hits = 0
        is_prefix = True
        for place in enumerate(request.hash_ids):
            is_prefix = is_prefix and place in known
            num_hits += is_prefix
            known.add(place)
        num_hit_tokens += min(num_hits * trace.hash_block_tokens, request.input_length)
    return {
        "hash_block_tokens": trace.hash_block_tokens,
        "num_blocks": num_blocks,
        "num_distinct_blocks": len({number for _, number in known}),
        # Of prompt tokens, with a cache that forgets nothing.
        "best_token_hit_rate": num_hit_tokens / num_tokens,
    }


def _counts(values: Sequence[int]) -> dict[str, int]:
    return {str(value): values.count(value) for value in sorted(set(values))}


def description_lines(figures: dict[str, Any]) -> list[str]:
    """The figures for a person."""
    lines = [f"requests          {figures['num_requests']:,}"]
    for name in ("input_length", "output_length"):
        values = figures[name]
        percents = "  ".join(f"p{percent} {values[f'p{percent}']:,.0f}" for percent in PERCENTS)
        lines.append(
            f"{name:<17} mean {values['mean']:,.1f}  cv {values['cv']:.2f}  {percents}  "
            f"max {values['max']:,.0f}"
        )
    lines += _arrival_lines(figures["arrivals"])
    sharing = figures["sharing"]
    if sharing is not None:
        lines.append(
            f"sharing           {sharing['num_distinct_blocks']:,.0f} of "
            f"{sharing['num_blocks']:,.0f} blocks of {sharing['hash_block_tokens']:.0f} tokens "
            f"differ; at best {sharing['best_token_hit_rate']:.1%} of prompt tokens are cached"
        )
    if len(figures["priorities"]) > 1:
        counts = "  ".join(f"{key}: {count:,}" for key, count in figures["priorities"].items())
        lines.append(f"priorities        {counts}")
    return lines


def _arrival_lines(arrivals: dict[str, Any] | None) -> list[str]:
    if arrivals is None:
        return ["arrivals          all at once"]
    burstiness = arrivals["burstiness"]
    lines = [
        f"arrivals          {arrivals['duration_s']:,.1f} s  mean {arrivals['mean_rate']:.3g}/s",
        f"gaps              cv {arrivals['gap_cv']:.2f}  burstiness "
        f"{'inf' if burstiness is None else format(burstiness, '.2f')} (1 is Poisson)  max "
        f"{arrivals['max_gap_s']:.1f} s  at the same time {arrivals['same_time_share']:.1%}",
    ]
    return lines + [
        f"in {window['window_s']:>3.0f} s          peak {window['peak_rate']:.3g}/s  "
        f"dispersion {window['dispersion']:.2f}"
        for window in arrivals["windows"]
    ]
