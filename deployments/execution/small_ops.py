"""What stands between a model's products, each as one call of `native/small_ops.cpp`: RMS norm,
SiLU gate, rotary embedding.

Owns the calls; where in a model they take the place of what is surgery's business. A step of one
token is hundreds of such small operations, and torch takes two to ten microseconds for each of the
four to ten it needs for one of these.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from deployments.execution.native.compiler import find_kernels
from deployments.execution.native.kernel import Kernel

_SOURCE = Path(__file__).parent / "native" / "small_ops.cpp"


class SmallOps:
    """The compiled operations, in float32 or bfloat16.

    Args:
        library: of native/small_ops.cpp.

    Raises:
        OSError: it cannot be loaded.
    """

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._rms_norm, self._silu_gate, self._rotate = (
            {
                torch.float32: Kernel(loaded, f"{name}_float32"),
                torch.bfloat16: Kernel(loaded, f"{name}_bfloat16"),
            }
            for name in ("rms_norm", "silu_gate", "rotate")
        )

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, rounds_first: bool) -> Tensor:
        """x / sqrt(mean of x^2 + epsilon) * weight along the last dimension (Zhang, Sennrich 2019).

        Args:
            x: [..., size]
            weight: [size], float32.
            rounds_first: whether to round to the dtype of `x` before the weight, as well as after.
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        size = weight.shape[0]
        self._rms_norm[x.dtype](
            (x, weight, out),
            (x.numel() // size, size, rounds_first, torch.get_num_threads()),
            (epsilon,),
        )
        return out

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gate and up side by side [..., 2 * size]: [..., size]."""
        gate_up = gate_up.contiguous()
        *shape, both = gate_up.shape
        out = gate_up.new_empty(*shape, both // 2)
        self._silu_gate[out.dtype](
            (gate_up, out), (out.numel() // (both // 2), both // 2, torch.get_num_threads())
        )
        return out

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key with their positions (Su et al., 2021), halves turning against each other.

        Args:
            query: [1, num_heads, num_tokens, dim]; heads of a token side by side in memory.
            key: [1, num_kv_heads, num_tokens, dim], likewise.
            cos, sin: [1, num_tokens, dim], contiguous.

        Returns both in new memory [num_tokens, heads, dim], seen in the shape they came in.
        """
        _, num_heads, num_tokens, dim = query.shape
        num_kv_heads = key.shape[1]
        turned_query = query.new_empty(1, num_tokens, num_heads, dim)
        turned_key = key.new_empty(1, num_tokens, num_kv_heads, dim)
        self._rotate[query.dtype](
            (query, turned_query, key, turned_key, cos, sin),
            (
                query.stride(2),
                num_heads,
                key.stride(2),
                num_kv_heads,
                num_tokens,
                dim // 2,
                torch.get_num_threads(),
            ),
        )
        return turned_query.transpose(1, 2), turned_key.transpose(1, 2)


def find_small_ops(compiles: bool, cache: Path) -> SmallOps | None:
    """The compiled operations; None, and a line in the log, where this machine cannot have them.

    Args:
        compiles: whether the machine's compiler may be used.
        cache: where the library is kept.
    """
    loss = "small operations go through torch, which is slower"
    return find_kernels(SmallOps, _SOURCE, compiles, cache, loss)
