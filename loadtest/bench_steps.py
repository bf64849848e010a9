"""Steps of a scheduler that never ran, to time an executor by, and the timing itself.

decodes, at one context each | a chunk of prefill after so many computed tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deployments.engine.outputs import ChunkReason, ScheduledRequest, SchedulerOutput
from deployments.engine.request import Request
from deployments.protocol import SamplingParams


def make_step(
    block_size: int,
    *,
    num_decodes: int = 0,
    context: int = 0,
    num_prefill_tokens: int = 0,
    num_computed_tokens: int = 0,
) -> SchedulerOutput:
    """Greedy requests whose blocks follow each other from block 1 on; all of them sample."""
    spans = [(context, 1)] * num_decodes
    if num_prefill_tokens:
        spans.append((num_computed_tokens, num_prefill_tokens))
    rows = []
    first_block = 1
    for index, (num_before, num_queries) in enumerate(spans):
        num_blocks = -(-(num_before + num_queries) // block_size)
        table = list(range(first_block, first_block + num_blocks))
        rows.append(_row(index, num_before, num_queries, table))
        first_block += num_blocks
    return SchedulerOutput(tuple(rows), (), num_prefill_tokens, num_decodes)


def num_blocks_of(step: SchedulerOutput) -> int:
    """Of the cache that it needs, the null block not counted."""
    return sum(len(row.block_table) for row in step.scheduled)


def _row(index: int, num_context: int, num_queries: int, table: list[int]) -> ScheduledRequest:
    token_ids = [3 + (7 * index + place) % 100 for place in range(num_context + num_queries)]
    request = Request(
        request_id=f"bench-{index}",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(temperature=0.0),
        seed=0,
        max_num_tokens=len(token_ids) + 1,
        arrival_s=0.0,
        arrival_index=index,
    )
    return ScheduledRequest(
        request, num_context, num_queries, table, True, ChunkReason.CONTINUED, False
    )


def best_s(run: Callable[[], object], seconds: float) -> float:
    """The shortest of as many calls as fit into `seconds`, at least three, after one unmeasured."""
    run()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end_s:
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return min(times)
