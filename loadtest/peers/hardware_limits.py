"""What this machine can do at most: bytes it reads per second, products it computes per second.

Decode reads all weights for each token of a stream, so bandwidth bounds it; prefill multiplies, so
the best matrix product of the model's own shapes bounds it.

    MBU    tokens/s of a single stream x weight bytes / measured bandwidth
    share  FLOP/s of a prefill / FLOP/s of the products alone

FLOP of a prefill: two per weight of the linear layers and token, and those of causal attention.
Run as a program of its own, so that nothing of it is left in the benchmark's process.

    python -m loadtest.peers.hardware_limits MODEL_DIR --threads 2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

READ_BYTES = 1 << 30
"""Many times any cache."""
NUM_ROWS = 512
NUM_REPEATS = 5
WARMUP_S = 0.3


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The linear layers of one decoder layer, and how many there are.

    Args:
        linears: [outputs, inputs] of each, as fused as they can be (qkv, gate and up).
        num_layers: with these.
        attention_width: heads times head size.
    """

    linears: tuple[tuple[int, int], ...]
    num_layers: int
    attention_width: int

    @classmethod
    def read(cls, model_dir: Path) -> ModelShapes:
        """From a Hugging Face config of a Llama-like model.

        Raises:
            KeyError: it has no such sizes.
        """
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // num_heads
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        width = num_heads * head_dim
        linears = (
            (width + 2 * num_kv_heads * head_dim, hidden),
            (hidden, width),
            (2 * inner, hidden),
            (hidden, inner),
        )
        return cls(linears, config["num_hidden_layers"], width)

    def linear_flop(self, num_tokens: int) -> float:
        """Of all layers' linears; the last layer's head computes one row and is left out."""
        weights = sum(outputs * inputs for outputs, inputs in self.linears)
        return 2.0 * weights * self.num_layers * num_tokens

    def prefill_flop(self, num_tokens: int) -> float:
        """Of a whole prompt: linears, and causal attention's two products over half a square."""
        attention = 2.0 * self.num_layers * self.attention_width * num_tokens**2
        return self.linear_flop(num_tokens) + attention


@dataclass(frozen=True, slots=True)
class Limits:
    """What was measured.

    Args:
        read_bytes_per_s: best of several streaming reads of a buffer far beyond the caches.
        gemm_flop_per_s: by dtype, of the model's linears at 512 rows.
    """

    read_bytes_per_s: float
    gemm_flop_per_s: dict[str, float]


def best_time_s(work: Callable[[], Any]) -> float:
    """The fastest of some runs, after a warm-up."""
    until_s = time.perf_counter() + WARMUP_S
    work()
    while time.perf_counter() < until_s:
        work()
    times_s = []
    for _ in range(NUM_REPEATS):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


def measure_read(num_bytes: int = READ_BYTES) -> float:
    """Bytes per second, read by torch's own threads."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    vector = torch.ones(1024)
    matrix = buffer.view(-1, 1024)
    # Which of them keeps up with memory depends on the processor.
    reads = (buffer.sum, buffer.max, lambda: torch.mv(matrix, vector))
    return num_bytes / min(best_time_s(read) for read in reads)


def measure_gemm(shapes: ModelShapes, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> float:
    """FLOP per second over the linears of one layer, each at its best."""
    total_s, total_flop = 0.0, 0.0
    for outputs, inputs in shapes.linears:
        x = torch.randn(num_rows, inputs).to(dtype)
        weight = torch.randn(outputs, inputs).to(dtype)
        total_s += _best_product_s(x, weight)
        total_flop += 2.0 * num_rows * inputs * outputs
    return total_flop / total_s


def _best_product_s(x: torch.Tensor, weight: torch.Tensor) -> float:
    products: list[Callable[[], torch.Tensor]] = [
        lambda: torch.nn.functional.linear(x, weight),
        lambda: x @ weight.t(),
    ]
    transposed = weight.t().contiguous()
    products.append(lambda: x @ transposed)
    if _packs(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return min(best_time_s(product) for product in products)


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN reorders weights of this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def measure_limits(model_dir: Path, num_threads: int) -> Limits:
    """Measure this machine with the shapes of a model. Takes some seconds."""
    torch.set_num_threads(num_threads)
    shapes = ModelShapes.read(model_dir)
    with torch.inference_mode():
        gemm = {
            name: measure_gemm(shapes, getattr(torch, name)) for name in ("float32", "bfloat16")
        }
        return Limits(measure_read(), gemm)


def main() -> int:
    """Print them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure_limits(arguments.model_dir, arguments.threads))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
