"""The simulated fleet: time, routing, warnings, and that what is saved on quiet steps costs no
truth.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.config import CacheConfig, SchedulerConfig
from deployments.execution.cost_model import ChunkCost, CostModel, DecodeCost
from loadtest.measures import result_json
from loadtest.policies import POLICIES
from loadtest.simulate import FleetConfig, SimResult, SimulationError, simulate
from loadtest.trace import TraceRequest

# Every step takes 10 ms and a millisecond more for each token in it.
COST = CostModel(
    name="round",
    model="any",
    gpu="any",
    source="this test",
    num_kv_tokens=16_000,
    decode=DecodeCost(10.0, 1.0, 0.0),
    chunk=ChunkCost(10.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0),
    fit_error={},
)


def make_fleet(**settings: Any) -> FleetConfig:
    """One replica with chunks of 50 tokens."""
    scheduler = SchedulerConfig(chunk_size=50, overlap_ratio=0.0, max_num_seqs=8)
    return FleetConfig(**{"cost_model": COST, "scheduler": scheduler, **settings})


def figures(result: SimResult) -> dict[str, Any]:
    return result_json(result.summary)


def random_trace(rng: random.Random, num: int, rate: float) -> list[TraceRequest]:
    """Short and long requests, a third of which share prefixes."""
    now_s, trace = 0.0, []
    for _ in range(num):
        now_s += rng.expovariate(rate)
        hash_ids = rng.choice([(), (1,), (1, 2)])
        trace.append(
            TraceRequest(
                now_s, rng.randint(1, 1500), rng.randint(1, 60), hash_ids, rng.choice([0, 0, 1])
            )
        )
    return trace


def test_a_lone_request_takes_exactly_the_cost_models_time() -> None:
    """Time is lost or counted twice between arrival, steps and end."""
    result = simulate([TraceRequest(5.0, 100, 3)], make_fleet())
    # Two chunks of 50 tokens, 60 ms each; then two decodes of 11 ms.
    assert figures(result)["mean_ttft_ms"] == pytest.approx(120.0)
    assert figures(result)["mean_e2el_ms"] == pytest.approx(142.0)
    assert result.duration_s == pytest.approx(0.142)


def test_who_arrives_during_a_step_joins_at_its_end() -> None:
    """A request joins a step that is already running, or waits for one more."""
    trace = [TraceRequest(0.0, 20, 1), TraceRequest(0.001, 10, 1)]
    result = simulate(trace, make_fleet())
    # 30 ms for the first; the second waits for 29 and takes 20.
    assert figures(result)["mean_e2el_ms"] == pytest.approx((30.0 + 49.0) / 2)
    assert result.queued.percentile(100) == pytest.approx(0.029)


def test_an_arrival_cuts_the_quiet_steps_short() -> None:
    """A newcomer waits until the running answer is complete, though it could join at the end of the
    step that runs.
    """
    trace = [TraceRequest(0.0, 20, 50), TraceRequest(0.100, 10, 1)]
    result = simulate(trace, make_fleet())
    # Steps of 11 ms from 30 on: one ends at 107. Then 10 + 1 + 10 ms.
    assert figures(result)["mean_ttft_ms"] == pytest.approx((30.0 + 28.0) / 2)


@pytest.mark.parametrize("seed", range(16))
def test_joined_quiet_steps_are_the_steps_one_by_one(seed: int) -> None:
    """Some step that decides something is booked as if it did not: the times of a token, a
    preemption or a hit differ.
    """
    rng = random.Random(seed)
    trace = random_trace(rng, 60, rng.choice([2.0, 10.0]))
    fleet = make_fleet(
        num_replicas=rng.choice([1, 2]),
        policy=rng.choice(["chunked", *POLICIES]),
        routing=rng.choice(["prefix", "random"]),
        cache=CacheConfig(num_blocks=rng.choice([100, 150, 400])),
        max_model_len=2000,
        max_step_samples=10**6,
    )
    joined = simulate(trace, fleet)
    one_by_one = simulate(trace, replace(fleet, joins_decodes=False))
    assert figures(joined) == figures(one_by_one)
    # Blocks of joined steps are taken at once, so their use alone may differ within them.
    assert [step[:-1] for step in joined.steps] == [step[:-1] for step in one_by_one.steps]
    assert joined.num_preemptions == one_by_one.num_preemptions
    assert joined.num_cached_tokens == one_by_one.num_cached_tokens
    assert joined.utilisation.busy == pytest.approx(one_by_one.utilisation.busy)
    assert joined.utilisation.decode == pytest.approx(one_by_one.utilisation.decode)


def test_a_run_is_the_same_each_time() -> None:
    """Something of a run depends on a clock, a hash seed or an unseeded choice."""
    trace = random_trace(random.Random(1), 60, 10.0)
    fleet = make_fleet(num_replicas=3, routing="random", max_model_len=2000)
    assert figures(simulate(trace, fleet)) == figures(simulate(trace, fleet))
    other = simulate(trace, replace(fleet, seed=1))
    assert figures(other) != figures(simulate(trace, fleet))


def test_equal_hash_ids_are_found_in_the_cache_and_others_are_not() -> None:
    """Prompts share what the trace does not say they share, or do not share what it says."""
    trace = [
        TraceRequest(0.0, 1024, 1, (1, 2)),
        TraceRequest(9.0, 1024, 1, (1, 3)),
        TraceRequest(18.0, 1024, 1, (4, 2)),
        TraceRequest(27.0, 700, 1, (1, 3)),
        TraceRequest(36.0, 700, 1),
    ]
    result = simulate(trace, make_fleet())
    # 512 of the second; of the fourth all but the block of 16 with its last token: 688.
    assert result.num_cached_tokens == 512 + 688
    off = make_fleet(cache=CacheConfig(enable_prefix_caching=False))
    assert simulate(trace, off).num_cached_tokens == 0


def test_prefix_routing_finds_more_than_chance() -> None:
    """The fleet does not use the service's routing rule, or hides the prompts' blocks from it."""
    rng = random.Random(3)
    trace = [
        TraceRequest(at * 0.3, 600, 2, (100 + rng.randrange(8), 1000 + at)) for at in range(120)
    ]
    rates = {}
    for routing in ("prefix", "random"):
        result = simulate(trace, make_fleet(num_replicas=4, routing=routing))
        rates[routing] = result.num_cached_tokens / result.num_prompt_tokens
    assert rates["prefix"] > rates["random"] + 0.05


def test_the_load_is_spread_over_the_replicas() -> None:
    """All requests go to one replica, so that more GPUs never help."""
    trace = random_trace(random.Random(2), 80, 20.0)
    one = figures(simulate(trace, make_fleet(max_model_len=2000)))
    four = figures(simulate(trace, make_fleet(num_replicas=4, max_model_len=2000)))
    assert four["p99_ttft_ms"] < one["p99_ttft_ms"] / 2


def overload(rate: float) -> Sequence[TraceRequest]:
    return random_trace(random.Random(4), 120, rate)


def test_a_saturated_run_says_so() -> None:
    """A plan is made from latencies that only tell how long the trace was."""
    assert simulate(overload(20.0), make_fleet(max_model_len=2000)).is_saturated
    assert not simulate(overload(0.5), make_fleet(max_model_len=2000)).is_saturated


def test_what_the_service_would_refuse_is_an_error() -> None:
    """A prompt that can never run, or one too many, hangs the run or counts as served."""
    scheduler = SchedulerConfig(
        chunk_size=50, overlap_ratio=0.0, max_num_seqs=8, max_num_waiting=20
    )
    trace = [TraceRequest(0.0, 10, 2)] * 30 + [TraceRequest(1.0, 90_000, 2)]
    result = figures(simulate(trace, make_fleet(scheduler=scheduler)))
    assert result["errors"] == {"overloaded": 9, "context_length": 1}
    assert result["completed"] == 21


def test_the_log_of_steps_is_bounded_and_covers_the_run() -> None:
    """A run of hours fills memory with its log, or the log ends before the run does."""
    trace = random_trace(random.Random(5), 80, 4.0)
    full = simulate(trace, make_fleet(max_model_len=2000, max_step_samples=10**6))
    thin = simulate(trace, make_fleet(max_model_len=2000, max_step_samples=64))
    assert len(full.steps) == full.num_steps == thin.num_steps > 500
    assert 32 <= len(thin.steps) <= 64
    assert thin.steps[0] == full.steps[0]
    assert thin.steps[-1].time_s > 0.9 * full.steps[-1].time_s


def test_busy_time_adds_up_by_phase() -> None:
    """Utilisation counts idle time, or a step twice."""
    # Busy for 60 + 5 * 11 ms of the second between the arrivals; what follows is draining.
    result = simulate([TraceRequest(0.0, 50, 6), TraceRequest(1.0, 1, 9)], make_fleet())
    shares = result.utilisation
    assert shares.prefill == pytest.approx(0.060)
    assert shares.decode == shares.decode_active == pytest.approx(0.055)
    assert shares.busy == pytest.approx(shares.prefill + shares.decode)


def test_an_engine_that_holds_a_small_batch_starts_at_its_timeout() -> None:
    """min_batch_tokens makes the simulation hang or start at once."""
    scheduler = SchedulerConfig(
        chunk_size=50, overlap_ratio=0.0, max_num_seqs=8, min_batch_tokens=100
    )
    alone = simulate([TraceRequest(0.0, 10, 1)], make_fleet(scheduler=scheduler))
    assert figures(alone)["mean_ttft_ms"] == pytest.approx(50.0 + 20.0)
    full = [TraceRequest(0.0, 10, 1), TraceRequest(0.01, 40, 1), TraceRequest(0.02, 50, 1)]
    started = simulate(full, make_fleet(scheduler=scheduler)).queued
    assert started.percentile(100) == pytest.approx(0.020)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_replicas": 0}, "replicas must be at least 1"),
        ({"policy": "magic"}, "no policy magic: choose one of chunked"),
        ({"routing": "magic"}, "no routing magic: choose one of prefix"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    """A misspelled policy runs another one, or ends in a traceback."""
    with pytest.raises(SimulationError, match=message):
        simulate([TraceRequest(0.0, 10, 2)], make_fleet(**settings))
    with pytest.raises(SimulationError, match="empty"):
        simulate([], make_fleet())
