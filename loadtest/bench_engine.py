"""The engine without HTTP, beside what transformers itself offers, in one process and one run.

Measurements are interleaved (ours, theirs, ours, theirs, ...), since other work on the machine
comes and goes; what counts is the ratio within a run. All peers run the same weights in the same
dtype with the same threads, greedy, a fixed number of output tokens, prompts of token ids that
share no prefix.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from deployments.config import ServiceConfig
from deployments.engine.clock import WallClock
from deployments.engine.engine import Engine
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_source import resolve_model_dir
from deployments.execution.prepack import multiplies_bfloat16
from deployments.protocol import GenerateRequest, SamplingParams
from loadtest.bench_scheduler import measure_scheduler

NUM_PROMPT_TOKENS = 64
NUM_CONCURRENT = 16
NUM_SCHEDULED = 256
NUM_CB_PAGES = 64
Prompts = list[list[int]]
Timed = Callable[[Prompts], float]
"""Runs prompts to their end and returns output tokens per second."""

_START = """
import time; started = time.monotonic()
from deployments.config import ServiceConfig
from deployments.execution.startup import made_to_stay
with made_to_stay():
    from deployments.execution.model_executor import ModelExecutor
    ModelExecutor.load(ServiceConfig.model_validate_json({config!r}))
print(time.monotonic() - started)
"""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure."""

    config: ServiceConfig
    dtype: str
    num_threads: int
    num_rounds: int
    num_output_tokens: int


def _configured(settings: BenchSettings) -> ServiceConfig:
    config = settings.config
    model = config.model.model_copy(update={"dtype": settings.dtype})
    execution = config.execution.model_copy(update={"num_threads": settings.num_threads})
    cache = config.cache.model_copy(update={"enable_prefix_caching": False})
    return config.model_copy(update={"model": model, "execution": execution, "cache": cache})


def _ours(executor: ModelExecutor, config: ServiceConfig, num_output_tokens: int) -> Timed:
    engine = Engine.build(config.scheduler, config.cache, executor, WallClock())
    params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)

    def run(prompts: Prompts) -> float:
        started_s = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add(GenerateRequest(f"bench-{index}", tuple(prompt), params))
        num_tokens = 0
        while engine.has_requests:
            num_tokens += sum(output.token_id is not None for output in engine.step())
        return num_tokens / (time.perf_counter() - started_s)

    return run


def _peer_model(config: ServiceConfig, executor: ModelExecutor) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        resolve_model_dir(config.model), dtype=executor.dtype
    )
    return model.eval()


def _generate(model: Any, num_output_tokens: int) -> Timed:
    def run(prompts: Prompts) -> float:
        started_s = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_output_tokens,
                max_new_tokens=num_output_tokens,
                pad_token_id=0,
            )
        return len(prompts) * num_output_tokens / (time.perf_counter() - started_s)

    return run


def _continuous_batching(model: Any, num_output_tokens: int) -> Timed:
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=num_output_tokens, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(num_blocks=NUM_CB_PAGES, max_batch_tokens=512)

    def run(prompts: Prompts) -> float:
        started_s = time.perf_counter()
        results = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
            warmup=False,
        )
        elapsed_s = time.perf_counter() - started_s
        return sum(len(result.generated_tokens) for result in results.values()) / elapsed_s

    return run


def _prompts(rng: random.Random, count: int, vocab_size: int) -> Prompts:
    return [[rng.randrange(3, vocab_size) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(count)]


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def _interleave(
    peers: dict[str, Timed], count: int, num_rounds: int, vocab_size: int
) -> dict[str, dict[str, float]]:
    """Tokens per second of each peer on `count` prompts at once, the first round unmeasured."""
    rng = random.Random(count)
    rates: dict[str, list[float]] = {name: [] for name in peers}
    for round_index in range(num_rounds + 1):
        prompts = _prompts(rng, count, vocab_size)
        for name, run in peers.items():
            print(f"{count} at once, round {round_index}: {name}", file=sys.stderr, flush=True)
            rate = run(prompts)
            if round_index:
                rates[name].append(rate)
    return {name: _spread(values) for name, values in rates.items()}


def _warm_start_s(config: ServiceConfig) -> float:
    """Of a new process, from its first line to a model that can serve."""
    code = _START.format(config=config.model_dump_json())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _ratio(rates: dict[str, dict[str, float]], peer: str) -> float:
    return round(rates["chunkserve"]["median"] / rates[peer]["median"], 2)


def run_bench(settings: BenchSettings) -> dict[str, Any]:
    """All measurements as data: rates in output tokens per second, ratios of medians, times in
    seconds or milliseconds as named."""
    config = _configured(settings)
    # Before the peers, one of which leaves a thread behind that takes its share of the interpreter.
    scheduling = measure_scheduler(NUM_SCHEDULED)
    executor = ModelExecutor.load(config)
    peer = _peer_model(config, executor)
    vocab_size = executor.limits.vocab_size
    ours = _ours(executor, config, settings.num_output_tokens)
    generate = _generate(peer, settings.num_output_tokens)
    batching = _continuous_batching(peer, settings.num_output_tokens)
    rounds = settings.num_rounds
    single = _interleave({"chunkserve": ours, "generate": generate}, 1, rounds, vocab_size)
    many = _interleave(
        {"chunkserve": ours, "continuous_batching": batching}, NUM_CONCURRENT, rounds, vocab_size
    )
    return {
        "model": config.model.name,
        "dtype": str(executor.dtype).removeprefix("torch."),
        "cpu_multiplies_bfloat16": multiplies_bfloat16(),
        "num_threads": torch.get_num_threads(),
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "output_tokens": settings.num_output_tokens,
        "single_stream_tokens_per_s": single,
        "single_stream_ratio_to_generate": _ratio(single, "generate"),
        f"concurrent_{NUM_CONCURRENT}_tokens_per_s": many,
        "concurrent_ratio_to_continuous_batching": _ratio(many, "continuous_batching"),
        f"scheduler_us_per_request_and_step_at_{NUM_SCHEDULED}_running": round(
            scheduling.us_per_step / NUM_SCHEDULED, 2
        ),
        "warm_start_s": round(_warm_start_s(config), 2),
    }
