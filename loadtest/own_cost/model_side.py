"""What stands around the model in a step: its inputs as tensors, and the choice of tokens.

Measures the product's own code over rows that are made up; no model is loaded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from deployments.config import ExecutionConfig, ModelConfig
from deployments.engine.outputs import ScheduledRequest
from deployments.engine.request import Request
from deployments.execution.attention.choice import choose_backend
from deployments.execution.input_batch import InputBatch
from deployments.execution.kv_cache import LayerSpec
from deployments.execution.model_source import cache_root
from deployments.execution.sampler import Sampler
from deployments.protocol import GenerateRequest, SamplingParams

VOCAB_SIZE = 49_152
NUM_CONTEXT_TOKENS = 512
NUM_OUTPUT_TOKENS = 64
BLOCK_SIZE = 16
MIN_REPEATS = 3
MEASURED_S = 0.4
"""Of each figure, so that few requests are measured many times."""
SPEC = LayerSpec(
    num_heads=9,
    num_kv_heads=3,
    key_dim=64,
    value_dim=64,
    window=None,
    softcap=None,
    has_sinks=False,
)
"""Of SmolLM2-135M, whose layers are all alike."""

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=4096, temperature=0.0),
    "temperature": SamplingParams(max_tokens=4096, temperature=0.8),
    "top_k, top_p": SamplingParams(max_tokens=4096, temperature=0.8, top_k=40, top_p=0.95),
    "penalties": SamplingParams(
        max_tokens=4096, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2
    ),
}


def running_requests(num_running: int, params: SamplingParams) -> list[Request]:
    """Requests that decode, with output of different lengths behind them."""
    requests = []
    for index in range(num_running):
        prompt = tuple((index * 31 + at) % VOCAB_SIZE for at in range(NUM_CONTEXT_TOKENS))
        incoming = GenerateRequest(f"bench-{index}", prompt, params)
        request = Request.arrive(incoming, now=0.0, index=index, seed=index, max_num_tokens=4096)
        for at in range(NUM_OUTPUT_TOKENS + index % BLOCK_SIZE):
            request.take_token((index * 7 + at * at) % VOCAB_SIZE, 0.0, ())
        request.num_computed_tokens = request.num_tokens - 1
        requests.append(request)
    return requests


def measure_inputs(num_running: int) -> float:
    """Microseconds to lay out a step of decodes: its tensors and the plan of its attention."""
    dtype, device = torch.bfloat16, torch.device("cpu")
    backend = choose_backend(ExecutionConfig(), [SPEC], dtype, device, cache_root(ModelConfig()))
    requests = running_requests(num_running, SAMPLINGS["greedy"])
    rows = []
    for index, request in enumerate(requests):
        num_blocks = -(-request.num_tokens // BLOCK_SIZE)
        table = [1 + index * num_blocks + at for at in range(num_blocks)]
        rows.append(ScheduledRequest.decode(request, table))

    def lay_out() -> None:
        backend.plan(InputBatch.build(rows, BLOCK_SIZE, device), {SPEC.window})

    return _median_us(lay_out)


def measure_sampling(num_running: int, params: SamplingParams) -> float:
    """Microseconds to choose a token for each request, from bfloat16 logits."""
    sampler = Sampler([2])
    requests = running_requests(num_running, params)
    rng = torch.Generator().manual_seed(num_running)
    logits = torch.randn(num_running, VOCAB_SIZE, generator=rng).mul_(3.0).bfloat16()
    return _median_us(lambda: sampler.sample(logits, requests))


def _median_us(work: Callable[[], object]) -> float:
    with torch.inference_mode():
        work()
        taken_s: list[float] = []
        while len(taken_s) < MIN_REPEATS or sum(taken_s) < MEASURED_S:
            started_s = time.perf_counter()
            work()
            taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s) * 1e6
