"""Rotary embedding of a model's attention layers as one compiled operation.

Model files of transformers turn queries and keys by a function of their own module,
`apply_rotary_pos_emb`. A layer that calls it gets a forward of its own: the same code, looking that
one name up elsewhere. Nothing of the module or of other models changes.

    attention.forward   code of the class    names of its module, but apply_rotary_pos_emb -> ours
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from deployments.execution.small_ops import SmallOps

_NAME = "apply_rotary_pos_emb"


class Rotation:
    """Stands in for a model's `apply_rotary_pos_emb`, which it calls for what it cannot do itself.

    Args:
        own: the model's function, which computes what SmallOps.rotate does.
    """

    def __init__(self, own: Callable[..., Any], ops: SmallOps) -> None:
        self._own = own
        self._ops = ops

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any
    ) -> Any:
        """Query [1, num_heads, num_tokens, dim] and key turned, by cos and sin [1, num_tokens,
        dim].
        """
        if others or named or not _fits(query, cos) or not _fits(key, sin):
            return self._own(query, key, cos, sin, *others, **named)
        return self._ops.rotate(query, key, cos, sin)


def _fits(heads: Tensor, angles: Tensor) -> bool:
    dim = angles.shape[-1]
    return (
        heads.dim() == 4
        and heads.dtype in SmallOps.dtypes
        and heads.shape[0] == 1
        and heads.shape[-1] == dim
        and heads.stride(3) == 1
        and (heads.stride(1) == dim or heads.shape[1] == 1)
        and angles.shape == (1, heads.shape[2], dim)
        and angles.dtype is heads.dtype
        and angles.is_contiguous()
    )


def _turns_halves(own: Callable[..., Any], ops: SmallOps) -> bool:
    """Whether a model's function computes what `ops.rotate` does, tried on random heads of an even
    size. Its signature tells nothing where transformers wraps it for kernels of a hub.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in SmallOps.dtypes:
        query, key, cos, sin = (
            torch.randn(1, 3, num_heads, 12, generator=generator).to(dtype)
            for num_heads in (4, 2, 1, 1)
        )
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        with torch.inference_mode():
            try:
                want = own(query, key, cos[:, :, 0], sin[:, :, 0])
            except Exception:  # it takes other inputs, whatever it says of these
                return False
            got = ops.rotate(query, key, cos[:, :, 0].contiguous(), sin[:, :, 0].contiguous())
        unit = 1e-6 if dtype is torch.float32 else 2**-7
        for ours, theirs in zip(got, want, strict=True):
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, unit, unit):
                return False
    return True


def replace_rotary(model: nn.Module, ops: SmallOps) -> int:
    """Give the attention layers of `model` the compiled rotation; returns how many."""
    rotations: dict[Callable[..., Any], Rotation | None] = {}
    num_replaced = 0
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue
        own = forward.__globals__.get(_NAME)
        if _NAME not in forward.__code__.co_names or own is None:
            continue
        if own not in rotations:
            rotations[own] = Rotation(own, ops) if _turns_halves(own, ops) else None
        rotation = rotations[own]
        if rotation is not None:
            module.forward = MethodType(_with_rotation(forward, rotation), module)
            num_replaced += 1
    return num_replaced


def _with_rotation(forward: FunctionType, rotation: Rotation) -> FunctionType:
    """The same function, but for what it calls to turn queries and keys."""
    names = {**forward.__globals__, _NAME: rotation}
    made = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def restore_rotary(model: nn.Module) -> None:
    """Give the attention layers their own forward back."""
    for module in model.modules():
        function = getattr(vars(module).get("forward"), "__func__", None)
        if isinstance(getattr(function, "__globals__", {}).get(_NAME), Rotation):
            del module.forward
