"""The model's forward alone, beside what this machine can read and multiply: where a step's time
goes.

    chunkserve bench forward --dtype bfloat16 --threads 2

Steps of 1, 4, 16 and 64 decodes at a context of 256 tokens and prefills of 512 tokens, the best of
several rounds each, split into linear layers, head, attention and the rest. The split is timed in
rounds of its own, since timing every call costs time, and without tapes, since what is played from
one is no call from Python.

    MBU   bytes of weights a step reads, over its time and the measured read bandwidth
    MFU   floating-point operations of its linear layers, over its time and the best product of the
          same shapes
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from deployments.config import ServiceConfig, load_service_config
from deployments.engine.outputs import SchedulerOutput
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_loader import LoadedModel, load_model
from deployments.execution.prepack import multiplies_bfloat16
from deployments.execution.tape.runner import NUM_PLAIN
from loadtest.bench_steps import best_s, make_step
from loadtest.number_types import positive_number, whole_number
from loadtest.report_data import Json

CONTEXT = 256
NUM_DECODES = (1, 4, 16, 64)
PREFILLS = ((512, 0), (512, 3584))
_READ_BYTES = 1 << 28
_MOST_OUTPUTS = 16384
"""Of a layer whose products are compared; a head has more, and runs on the rows that sample."""


@dataclass(slots=True)
class Split:
    """Seconds by kind, summed over calls."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time added to `kind`."""

        def run(*inputs: Any, **named: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return function(*inputs, **named)
            finally:
                elapsed_s = time.perf_counter() - started_s
                self.seconds[kind] = self.seconds.get(kind, 0.0) + elapsed_s

        return run


def _linears(model: nn.Module) -> list[nn.Module]:
    """The modules that multiply by a weight, in whatever form."""
    return [
        module
        for module in model.modules()
        if not list(module.children()) and hasattr(module, "in_features")
    ]


@contextmanager
def split_of(model: Any) -> Iterator[Split]:
    """Times the parts of a model meanwhile."""
    split = Split()
    head = model.get_output_embeddings()
    layers = _linears(model)
    for layer in layers:
        forward: Any = layer.forward
        layer.forward = split.timed("head" if layer is head else "linears", forward)
    own = model.config._attn_implementation
    name = f"{own}_timed"
    attend: Any = AttentionInterface._global_mapping[own]
    AttentionInterface.register(name, split.timed("attention", attend))
    model.set_attn_implementation(name)
    try:
        yield split
    finally:
        model.set_attn_implementation(own)
        AttentionInterface._global_mapping.pop(name)
        for layer in layers:
            del layer.forward


def read_gb_per_s() -> float:
    """What this machine reads from memory by the threads of torch, in one stream or in several,
    whichever is faster.
    """
    numbers = torch.ones(8, _READ_BYTES // 32)
    shortest_s = min(best_s(numbers.sum, 0.4), best_s(lambda: numbers.sum(0), 0.4))
    return _READ_BYTES / shortest_s / 1e9


def best_product_gflops(model: nn.Module, num_rows: int) -> float:
    """GFLOP/s of torch's best product in float32 or bfloat16 over the shapes of a model's layers,
    reordered weights or plain.
    """
    num_flops = total_s = 0.0
    shapes = {(int(layer.out_features), int(layer.in_features)) for layer in _linears(model)}  # type: ignore[arg-type]
    for num_outputs, num_inputs in shapes:
        if num_outputs > _MOST_OUTPUTS:
            continue
        times = [
            _product_s(num_rows, num_outputs, num_inputs, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            if dtype is torch.float32 or multiplies_bfloat16()
        ]
        num_flops += 2.0 * num_rows * num_outputs * num_inputs
        total_s += min(times)
    return num_flops / total_s / 1e9


def _product_s(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> float:
    x, weight = (torch.randn(n, num_inputs).to(dtype) for n in (num_rows, num_outputs))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    reordered_s = best_s(
        lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), 0.3
    )
    return min(reordered_s, best_s(lambda: torch.mm(x, weight.T), 0.3))


def _with_filled_cache(loaded: LoadedModel, config: ServiceConfig) -> ModelExecutor:
    executor = ModelExecutor(loaded, config)
    # Memory that was never written is one page of zeros to the machine, and read from its cache.
    for layer in executor._forward._cache.layers:
        layer.keys.fill_(0.5)
        layer.values.fill_(0.5)
    return executor


def _step_s(executor: ModelExecutor, step: SchedulerOutput, seconds: float) -> float:
    for _ in range(NUM_PLAIN + 1):  # recorded by then
        executor.execute(step)
    return best_s(lambda: executor.execute(step), seconds)


def _split(executor: ModelExecutor, model: Any, step: SchedulerOutput, plain_s: float) -> Json:
    """Where a step that is not played from a tape spends its `plain_s`."""
    with split_of(model) as split:
        executor.execute(step)
        rounds: list[dict[str, float]] = []
        for _ in range(3):
            split.seconds.clear()
            executor.execute(step)
            rounds.append(dict(split.seconds))
    parts = {kind: min(round_[kind] for round_ in rounds) for kind in rounds[0]}
    parts["rest"] = plain_s - sum(parts.values())
    return {f"{kind}_ms": round(value * 1e3, 2) for kind, value in parts.items()}


def _steps(block_size: int) -> dict[str, SchedulerOutput]:
    decodes = {
        f"decode {count}": make_step(block_size, num_decodes=count, context=CONTEXT)
        for count in NUM_DECODES
    }
    prefills = {
        f"prefill {num_tokens} at {num_context}": make_step(
            block_size, num_prefill_tokens=num_tokens, num_computed_tokens=num_context
        )
        for num_tokens, num_context in PREFILLS
    }
    return decodes | prefills


def _measure(loaded: LoadedModel, config: ServiceConfig, seconds: float) -> dict[str, Json]:
    """Each step as configured, and without tapes, split into parts."""
    executor = _with_filled_cache(loaded, config)
    steps = _steps(executor.limits.block_size)
    times = {name: _step_s(executor, step, seconds) for name, step in steps.items()}
    executor.close()
    execution = config.execution.model_copy(update={"tape_steps": False})
    plain = _with_filled_cache(loaded, config.model_copy(update={"execution": execution}))
    found = {}
    for name, step in steps.items():
        plain_s = _step_s(plain, step, seconds)
        found[name] = {
            "step_ms": round(times[name] * 1e3, 2),
            "plain_ms": round(plain_s * 1e3, 2),
            **_split(plain, loaded.model, step, plain_s),
        }
    return found


def run_bench(config: ServiceConfig, seconds: float) -> Json:
    """Load the model and measure; `seconds` for each kind of step."""
    torch.set_num_threads(config.execution.num_threads or torch.get_num_threads())
    loaded = load_model(config.model, config.execution)
    model: Any = loaded.model
    itemsize = model.dtype.itemsize
    plain = {name: m.weight.numel() for name, m in model.named_modules() if type(m) is nn.Linear}
    head = model.get_output_embeddings().weight.numel()
    num_weights = sum(plain.values())
    bandwidth = read_gb_per_s()
    peaks = {num_tokens: best_product_gflops(model, num_tokens) for num_tokens, _ in PREFILLS}
    steps = _measure(loaded, config, seconds)
    for count in NUM_DECODES:
        found = steps[f"decode {count}"]
        rate = num_weights * itemsize / found["step_ms"] / 1e6
        found |= {"weights_gb_per_s": round(rate, 2), "mbu": round(rate / bandwidth, 3)}
    for num_tokens, num_context in PREFILLS:
        found = steps[f"prefill {num_tokens} at {num_context}"]
        flops = 2.0 * (num_weights - head) * num_tokens
        rate = flops / found["step_ms"] / 1e6
        found |= {
            "linears_gflops": round(flops / found["linears_ms"] / 1e6, 1),
            "gflops": round(rate, 1),
            "mfu": round(rate / peaks[num_tokens], 3),
        }
    return {
        "model": config.model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "read_gb_per_s": round(bandwidth, 1),
        "best_product_gflops": {key: round(value, 1) for key, value in peaks.items()},
        "steps": steps,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--config", type=Path, help="a Serve config file, or its args alone")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=whole_number(1), default=2)
    parser.add_argument("--seconds", type=positive_number, default=1.0, help="of each kind of step")


def main(arguments: argparse.Namespace) -> int:
    """Run it and print the figures as JSON."""
    config = ServiceConfig()
    if arguments.config is not None:
        config = load_service_config(arguments.config)
    data = config.model_dump()
    data["model"]["dtype"] = arguments.dtype
    data["execution"] |= {"num_threads": arguments.threads, "device": "cpu"}
    data["cache"] |= {"num_blocks": 2048}
    print(json.dumps(run_bench(ServiceConfig.model_validate(data), arguments.seconds), indent=2))
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
