"""How much of real prompts a prefix cache finds: by its size, and by how requests are routed.

By size: the service's KV cache manager takes the prompts one after the other, so that nothing but
its LRU decides. By router: a simulated fleet with caches as large as its GPUs', in which a prompt
is found only where it was computed before.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments.config import CacheConfig, SchedulerConfig
from deployments.engine.block_pool import BlockPool
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.request import Request
from deployments.execution.cost_model import CostModel
from loadtest.arrivals import spread_ticks
from loadtest.converters import load_trace
from loadtest.measures import result_json
from loadtest.sim_prompts import PromptMaker
from loadtest.simulate import ROUTINGS, FleetConfig, simulate
from loadtest.studies.results import add_result_argument, tell_and_keep
from loadtest.trace import HASH_BLOCK_TOKENS, TraceRequest

TRACE = "mooncake_fast25_conversation_first30min.jsonl"
CACHE_TOKENS = (256_000, 1_000_000, 5_100_000, None)
NUM_REPLICAS = 8


def make_requests(trace: Sequence[TraceRequest]) -> list[Request]:
    """The trace as an engine holds it, hashes included."""
    maker = PromptMaker(HASH_BLOCK_TOKENS, route_block_tokens=None)
    requests = [
        Request.arrive(maker.make(traced), now=0.0, index=index, seed=0, max_num_tokens=2**62)
        for index, traced in enumerate(trace)
    ]
    hasher = KVCacheManager(BlockPool(1), HASH_BLOCK_TOKENS, enable_prefix_caching=True)
    for request in requests:
        hasher.hash_prompt(request)
    return requests


def token_hit_rate(requests: Sequence[Request], num_cache_tokens: int | None) -> float:
    """Share of the prompts' tokens that the KV cache manager finds, if it holds so many tokens;
    None: all there are.
    """
    num_tokens = sum(request.num_tokens for request in requests)
    # Of an unbounded one, a block more for each request: its last is not full.
    num_blocks = (num_cache_tokens or num_tokens) // HASH_BLOCK_TOKENS
    num_blocks += 1 if num_cache_tokens else 1 + len(requests)
    kv = KVCacheManager(BlockPool(num_blocks), HASH_BLOCK_TOKENS, enable_prefix_caching=True)
    num_found = 0
    for request in requests:
        kv.admit(request, kv.find_cached_prefix(request))
        num_cached = request.num_computed_tokens
        num_found += num_cached
        request.num_computed_tokens = request.num_tokens
        kv.publish(request, num_cached)
        kv.free(request)
        request.num_computed_tokens = 0
    return num_found / num_tokens


def by_cache_size(trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Token hit rates in percent by tokens of cache."""
    requests = make_requests(trace)
    return {
        "unbounded" if size is None else f"{size:,} tokens": round(
            token_hit_rate(requests, size) * 100, 2
        )
        for size in CACHE_TOKENS
    }


def by_router(
    trace: Sequence[TraceRequest], cost_model: CostModel, seed: int
) -> dict[str, dict[str, Any]]:
    """Token hit rate and latency of a fleet by the way its requests are routed."""
    figures = {}
    for routing in ROUTINGS:
        fleet = FleetConfig(
            cost_model,
            NUM_REPLICAS,
            SchedulerConfig(max_num_seqs=128, chunk_size=2048),
            CacheConfig(block_size=HASH_BLOCK_TOKENS),
            routing=routing,
            seed=seed,
        )
        result = simulate(trace, fleet)
        latency = result_json(result.summary)
        figures[routing] = {
            "token_hit_rate_pct": round(
                result.num_cached_tokens / result.num_prompt_tokens * 100, 2
            ),
            **{name: round(latency[name], 1) for name in ("median_ttft_ms", "p99_ttft_ms")},
        }
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this study."""
    add_result_argument(parser, "prefixes")
    parser.add_argument("--trace", default=TRACE, help="with hash ids; a path or a known name")
    parser.add_argument("--cost-model", default="h100-llama3-8b")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and random routing")


def main(arguments: argparse.Namespace) -> int:
    """Measure both and keep the result."""
    trace = load_trace(arguments.trace)
    cost_model = CostModel.load(arguments.cost_model)
    figures = {
        "cost_model": cost_model.name,
        "seed": arguments.seed,
        "trace": f"{Path(arguments.trace).name}, {len(trace)} requests",
        "token_hit_rate_pct_by_cache_size": by_cache_size(trace),
        f"by_router_on_{NUM_REPLICAS}_replicas": by_router(
            spread_ticks(trace, seed=arguments.seed), cost_model, arguments.seed
        ),
    }
    tell_and_keep(arguments.save_result, figures)
    return 0
