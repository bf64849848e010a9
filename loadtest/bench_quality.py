"""Quantised weights beside the model's own: quality, memory and speed, in one run.

quality    the same windows of a public-domain text, by each form; also with the model's
           channels shuffled, since a checkpoint that was 4-bit before would flatter 4 bits
speed      the engine without HTTP, the forms in turns: one stream, 16 at once, and a prompt of
           512 tokens with one token of output

chunkserve bench quality --threads 2
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from deployments.config import ServiceConfig, load_service_config
from deployments.engine.clock import WallClock
from deployments.engine.engine import Engine
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_loader import load_model
from deployments.execution.model_source import cache_root
from deployments.execution.quantized import QuantizedLinear, quantize_linears
from deployments.execution.quantized_products import choose_products
from deployments.protocol import GenerateRequest, SamplingParams
from loadtest.number_types import whole_number
from loadtest.provenance import check_can_keep, keep_result, origin
from loadtest.quality import compare, read_windows
from loadtest.shuffled_channels import can_shuffle, shuffle_channels

FORMS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("auto", "int8"),
    "int4": ("auto", "int4"),
}
"""dtype and quantization by name; the first is the reference."""
LOADS = {"1 stream": (1, 64, 64), "16 streams": (16, 64, 32), "prefill 512": (1, 512, 1)}
"""Requests at once, prompt tokens and output tokens of each."""
NUM_CACHED_TOKENS = 8192
"""More than a load holds at once."""
Json = dict[str, Any]


def _configured(config: ServiceConfig, form: str, num_threads: int) -> ServiceConfig:
    dtype, quantization = FORMS[form]
    model = config.model.model_copy(update={"dtype": dtype, "quantization": quantization})
    execution = config.execution.model_copy(update={"num_threads": num_threads})
    num_blocks = 1 + NUM_CACHED_TOKENS // config.cache.block_size
    cache = config.cache.model_copy(
        update={"enable_prefix_caching": False, "num_blocks": num_blocks}
    )
    scheduler = config.scheduler.model_copy(
        update={"chunk_size": 512, "max_num_batched_tokens": None}
    )
    return config.model_copy(
        update={"model": model, "execution": execution, "cache": cache, "scheduler": scheduler}
    )


# --- quality and memory ---------------------------------------------------------------------------


def _load(config: ServiceConfig, form: str, is_shuffled: bool) -> tuple[Any, dict[str, bytes]]:
    form_config = _configured(config, form, torch.get_num_threads())
    loaded = load_model(form_config.model, form_config.execution)
    model: Any = loaded.model
    if is_shuffled:
        shuffle_channels(model)
    if form_config.model.quantization != "none":
        products = choose_products(
            model.device, config.execution.compile_kernels, cache_root(form_config.model)
        )
        quantize_linears(model, form_config.model.quantization, products)
    return model, loaded.tokenizer_files


def num_weight_bytes(model: torch.nn.Module) -> int:
    """Of all weights of a model, quantised or not; copies in another layout do not count."""
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    codes = sum(layer.weight_form.num_bytes for layer in layers)
    return codes + sum(parameter.nbytes for parameter in model.parameters())


def measure_quality(
    config: ServiceConfig, language: str, num_windows: int, window_size: int
) -> dict[str, Json]:
    """By form: its figures, the bytes of its weights, and the figures with channels shuffled where
    the model's shape allows that.
    """
    reference, tokenizer_files = _load(config, next(iter(FORMS)), False)
    tokenizer = Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
    windows = read_windows(tokenizer, language, num_windows, window_size)
    figures: dict[str, Json] = {}
    for form in FORMS:
        print(f"quality: {form}", file=sys.stderr, flush=True)
        model, _ = _load(config, form, False)
        figures[form] = compare(reference, {form: model}, windows)[form]
        figures[form]["weight_mb"] = round(num_weight_bytes(model) / 1e6, 1)
        # Nothing else depends on which channels are neighbours.
        if FORMS[form][1] != "none" and can_shuffle(reference):
            model, _ = _load(config, form, True)
            figures[form]["shuffled"] = compare(reference, {form: model}, windows)[form]
        del model
        gc.collect()
    return figures


# --- speed ----------------------------------------------------------------------------------------


def _run(executor: ModelExecutor, config: ServiceConfig, load: str, seed: int) -> float:
    """Tokens per second of one load: of output, or of the prompt where that is what is asked."""
    num_requests, num_prompt_tokens, num_output_tokens = LOADS[load]
    rng = random.Random(seed)
    vocab_size = executor.limits.vocab_size
    params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
    engine = Engine.build(config.scheduler, config.cache, executor, WallClock())
    started_s = time.perf_counter()
    for index in range(num_requests):
        prompt = tuple(rng.randrange(3, vocab_size) for _ in range(num_prompt_tokens))
        engine.add(GenerateRequest(f"bench-{index}", prompt, params))
    while engine.has_requests:
        engine.step()
    elapsed_s = time.perf_counter() - started_s
    num_tokens = num_output_tokens if num_output_tokens > 1 else num_prompt_tokens
    return num_requests * num_tokens / elapsed_s


def measure_speed(config: ServiceConfig, num_threads: int, num_rounds: int) -> dict[str, Json]:
    """By form and load: median, least and most tokens per second, the first round left out."""
    configs = {form: _configured(config, form, num_threads) for form in FORMS}
    executors = {form: ModelExecutor.load(configs[form]) for form in FORMS}
    rates: dict[str, dict[str, list[float]]] = {
        form: {load: [] for load in LOADS} for form in FORMS
    }
    for index in range(num_rounds + 1):
        for load in LOADS:
            for form, executor in executors.items():
                print(f"speed, round {index}: {load}, {form}", file=sys.stderr, flush=True)
                rate = _run(executor, configs[form], load, index)
                if index:
                    rates[form][load].append(rate)
    return {
        form: {load: _spread(values) for load, values in by_load.items()}
        for form, by_load in rates.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "min": round(min(values), 1),
        "max": round(max(values), 1),
    }


# --- the command ----------------------------------------------------------------------------------


def run_bench(config: ServiceConfig, arguments: argparse.Namespace) -> Json:
    """What the arguments ask for, as data."""
    torch.set_num_threads(arguments.threads)
    result: Json = {
        **origin(),
        "model": config.model.name,
        "num_threads": arguments.threads,
    }
    if arguments.windows:
        result["text"] = (
            f"{arguments.windows} windows of {arguments.window_tokens} tokens, {arguments.language}"
        )
        result["quality"] = measure_quality(
            config, arguments.language, arguments.windows, arguments.window_tokens
        )
    if arguments.rounds:
        result["tokens_per_s"] = measure_speed(config, arguments.threads, arguments.rounds)
    return result


def _table(result: Mapping[str, Any]) -> str:
    """The figures side by side, for a terminal."""
    lines = []
    for form, figures in result.get("quality", {}).items():
        words = ", ".join(
            f"{name} {value}" for name, value in figures.items() if name != "shuffled"
        )
        lines.append(f"{form:10} {words}")
        if "shuffled" in figures:
            words = ", ".join(f"{name} {value}" for name, value in figures["shuffled"].items())
            lines.append(f"{'':10} channels shuffled: {words}")
    for form, loads in result.get("tokens_per_s", {}).items():
        medians = {load: spread["median"] for load, spread in loads.items()}
        lines.append(f"{form:10} tokens/s: {_words(medians)}")
    return "\n".join(lines)


def _words(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--config", type=Path, help="a config file; by default the small model")
    parser.add_argument("--threads", type=whole_number(1), default=2)
    parser.add_argument("--language", choices=["en", "zh"], default="en", help="of the text")
    parser.add_argument("--windows", type=whole_number(0), default=8, help="of text; 0: no quality")
    parser.add_argument("--window-tokens", type=whole_number(2), default=512)
    parser.add_argument(
        "--rounds", type=whole_number(0), default=3, help="of each load; 0: no speed"
    )
    parser.add_argument("--save-result", type=Path, help="write the result to this file as well")


def main(arguments: argparse.Namespace) -> int:
    """Run it; prints the figures as JSON, and as a table on standard error."""
    check_can_keep(arguments.save_result)
    config = ServiceConfig() if arguments.config is None else load_service_config(arguments.config)
    result = run_bench(config, arguments)
    if arguments.save_result is not None:
        keep_result(arguments.save_result, result)
    print(json.dumps(result, indent=2))
    print(_table(result), file=sys.stderr)
    return 0
