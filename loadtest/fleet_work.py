"""What a trace is to a GPU at least, from the cost model alone: where a search for a fleet begins.

Every step is taken to be as full as it may be and every token as cheap as in either kind of step,
so a real fleet needs some more. A start for a search, not a promise: the simulator has the word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deployments.execution.cost_model import CostModel, StepShape
from loadtest.trace import TraceRequest


def find_least_replicas(
    trace: Sequence[TraceRequest], cost_model: CostModel, max_num_seqs: int
) -> int:
    """So many GPUs would be busy all the time while the trace arrives; prefix hits not counted."""
    duration_s = max(t.timestamp_s for t in trace) - min(t.timestamp_s for t in trace)
    work_s = sum([_work_ms(traced, cost_model, max_num_seqs) for traced in trace]) / 1e3
    return max(1, math.ceil(work_s / duration_s)) if duration_s > 0 else 1


def _work_ms(traced: TraceRequest, cost_model: CostModel, max_num_seqs: int) -> float:
    chunk, decode = cost_model.chunk, cost_model.decode
    num_prompt, num_decodes = traced.input_length, traced.output_length - 1
    prompt_ms = (
        chunk.per_token_ms * num_prompt
        + chunk.per_attention_pair_ms * num_prompt * (num_prompt + 1) / 2
        + chunk.per_prefill_context_token_ms * num_prompt
    )
    context = num_decodes * (num_prompt + (num_decodes + 1) / 2)
    decode_ms = (
        min(chunk.per_decode_ms, decode.per_decode_ms)
        + min(chunk.fixed_ms, decode.fixed_ms) / max_num_seqs
    ) * num_decodes + min(chunk.per_context_token_ms, decode.per_context_token_ms) * context
    return prompt_ms + decode_ms


def full_step_s(cost_model: CostModel, num_tokens: int) -> float:
    """Seconds of a step that new prompts fill but for one decode: the gap that everybody sees who
    decodes beside them.
    """
    return cost_model.step_s(StepShape(1, 0, ((num_tokens - 1, 0),)))
