"""The steps of a large model on a GPU, beside what the GPU can read and multiply, with CUDA graphs
and without.

    chunkserve bench gpu --save-result gpu.json

Weights are random, in the shape of Llama-3-8B unless --model-config names another, so nothing is
downloaded. Steps of 1, 8 and 32 decodes, a prefill chunk of 2,048 tokens, and both at once within
the same number of tokens; the best of several each, sampling and the copy of the ids included.

    MBU     bytes of the weights that a step reads, over its time and the measured read bandwidth
    MFU     floating-point operations of its weights, over its time and the best product
    mixed   its time over that of the slower of its two parts alone
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from deployments.config import ServiceConfig
from deployments.engine.outputs import SchedulerOutput
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_loader import LoadedModel
from loadtest.bench_steps import best_s, make_step, num_blocks_of
from loadtest.number_types import positive_number, whole_number
from loadtest.provenance import check_can_keep, keep_result, origin
from loadtest.report_data import Json
from loadtest.target_arguments import ArgumentsError

NUM_DECODES = (1, 8, 32)
LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


@dataclass(frozen=True, slots=True)
class Scene:
    """What is measured.

    Args:
        hf_config: of the model.
        device: where it runs.
        context: tokens before each decode.
        num_tokens: of a prefill chunk, and of the mixed step.
        seconds: for each kind of step.
    """

    hf_config: PretrainedConfig
    device: torch.device
    context: int
    num_tokens: int
    seconds: float

    def steps(self, block_size: int) -> dict[str, SchedulerOutput]:
        """By name."""
        count = NUM_DECODES[-1]
        found = {
            f"decode {n}": make_step(block_size, num_decodes=n, context=self.context)
            for n in NUM_DECODES
        }
        found["prefill"] = make_step(block_size, num_prefill_tokens=self.num_tokens)
        found["mixed"] = make_step(
            block_size,
            num_decodes=count,
            context=self.context,
            num_prefill_tokens=self.num_tokens - count,
        )
        return found

    def service(self, cuda_graphs: str) -> ServiceConfig:
        """Of an executor that has room for every step."""
        block_size = ServiceConfig().cache.block_size
        num_blocks = 1 + max(map(num_blocks_of, self.steps(block_size).values()))
        return ServiceConfig.model_validate(
            {
                "cache": {"num_blocks": num_blocks},
                "scheduler": {
                    "max_num_batched_tokens": self.num_tokens,
                    "chunk_size": self.num_tokens,
                    "max_num_seqs": NUM_DECODES[-1] + 1,
                },
                "execution": {"cuda_graphs": cuda_graphs},
            }
        )


def make_model(scene: Scene) -> LoadedModel:
    """Random weights in bfloat16, made on the device."""
    torch.manual_seed(0)
    with scene.device:
        model = AutoModelForCausalLM.from_config(scene.hf_config, dtype=torch.bfloat16).eval()
    config: Any = scene.hf_config
    return LoadedModel(model, config.max_position_embeddings, config.vocab_size, frozenset(), {})


def run_bench(scene: Scene) -> Json:
    """Make the model and measure, without graphs and, on a GPU, with them."""
    bandwidth, product = read_gb_per_s(scene.device), product_tflops(scene.device)
    loaded = make_model(scene)
    modes = ("off", "auto") if scene.device.type == "cuda" else ("off",)
    times = {f"graphs {mode}": _times(loaded, scene, mode) for mode in modes}
    layers = [m for m in loaded.model.modules() if isinstance(m, nn.Linear)]
    num_weights = sum(layer.weight.numel() for layer in layers)
    num_inner = num_weights - loaded.model.get_output_embeddings().weight.numel()
    return {
        **origin(),
        "device": _name_of(scene.device),
        "read_gb_per_s": round(bandwidth, 1),
        "product_tflops": round(product, 2),
        "num_weights": num_weights,
        "context": scene.context,
        "num_tokens": scene.num_tokens,
        **{
            mode: figures_of(found, 2e-9 * num_weights / bandwidth, num_inner, scene, product)
            for mode, found in times.items()
        },
    }


def _times(loaded: LoadedModel, scene: Scene, cuda_graphs: str) -> dict[str, float]:
    executor = ModelExecutor(loaded, scene.service(cuda_graphs))
    found = {
        name: best_s(partial(executor.execute, step), scene.seconds)
        for name, step in scene.steps(executor.limits.block_size).items()
    }
    executor.close()
    return found


def figures_of(
    times: Mapping[str, float], read_s: float, num_inner: int, scene: Scene, product: float
) -> Json:
    """What the times of the steps come to.

    Args:
        times: seconds, by step.
        read_s: seconds that reading the weights takes.
        num_inner: weights that every token is multiplied with.
        scene: what was measured.
        product: TFLOP/s of the best product.
    """
    found: Json = {name: {"step_ms": round(value * 1e3, 3)} for name, value in times.items()}
    for count in NUM_DECODES:
        found[f"decode {count}"]["mbu"] = round(read_s / times[f"decode {count}"], 3)
    for name in ("prefill", "mixed"):
        tflops = 2e-12 * num_inner * scene.num_tokens / times[name]
        found[name] |= {"tflops": round(tflops, 2), "mfu": round(tflops / product, 3)}
    slower_s = max(times["prefill"], times[f"decode {NUM_DECODES[-1]}"])
    found["mixed"]["over_slower"] = round(times["mixed"] / slower_s, 3)
    return found


def _best_s(device: torch.device, run: Callable[[], object]) -> float:
    def and_wait() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return best_s(and_wait, 0.5)


def read_gb_per_s(device: torch.device) -> float:
    """What the device reads: by a sum, or by a copy, which reads and writes; the faster of both."""
    num_bytes = 1 << 31 if device.type == "cuda" else 1 << 26
    numbers = torch.ones(num_bytes // 4, device=device)
    copy = torch.empty_like(numbers)
    shortest_s = min(_best_s(device, numbers.sum), _best_s(device, lambda: copy.copy_(numbers)) / 2)
    return num_bytes / shortest_s / 1e9


def product_tflops(device: torch.device) -> float:
    """The best of some large bfloat16 products."""
    sizes = (4096, 8192, 16384) if device.type == "cuda" else (256,)
    rates = []
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        rates.append(2e-12 * size**3 / _best_s(device, partial(torch.mm, a, b)))
    return max(rates)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def find_device(name: str) -> torch.device:
    """The device to measure.

    Raises:
        ArgumentsError: it is a GPU and none is visible.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentsError(
            "no GPU is visible to torch: check the driver and CUDA_VISIBLE_DEVICES, or try the "
            "benchmark itself with --device cpu and a small --model-config"
        )
    return torch.device(name)


def read_hf_config(path: Path | None) -> PretrainedConfig:
    """A model's config.json; None: Llama-3-8B's shape.

    Raises:
        OSError: it cannot be read.
        ArgumentsError: it describes no model that transformers knows.
    """
    try:
        fields: Any = dict(LLAMA_3_8B) if path is None else json.loads(path.read_text("utf-8"))
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentsError(
            f"--model-config: {path} is no config.json of a model: {error}"
        ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument("--model-config", type=Path, help="config.json of the model's shape")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--context", type=whole_number(1), default=1024, help="of each decode")
    parser.add_argument(
        "--num-tokens",
        type=whole_number(NUM_DECODES[-1] + 1),
        default=2048,
        help="of a prefill chunk",
    )
    parser.add_argument("--seconds", type=positive_number, default=2.0, help="of each kind of step")
    parser.add_argument("--save-result", type=Path, help="write the result to this file as well")


def main(arguments: argparse.Namespace) -> int:
    """Run it and print the figures as JSON."""
    check_can_keep(arguments.save_result)
    hf_config: Any = read_hf_config(arguments.model_config)
    longest = max(arguments.context + 1, arguments.num_tokens)
    if longest > hf_config.max_position_embeddings:
        raise ArgumentsError(
            f"--context and --num-tokens: the model takes {hf_config.max_position_embeddings} "
            f"tokens, not {longest}"
        )
    device = find_device(arguments.device)
    scene = Scene(hf_config, device, arguments.context, arguments.num_tokens, arguments.seconds)
    result = run_bench(scene)
    if arguments.save_result is not None:
        keep_result(arguments.save_result, result)
    print(json.dumps(result, indent=2))
    return 0
