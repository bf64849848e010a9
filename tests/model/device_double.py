"""Stands for a GPU where there is none: what would make a host wait for one is counted, or fails.

Copies to the host land in the order in which they began, each with what its tensor held then:

    begun         ids a   ids b   ids c
    wait for b        lands a and b: one wait; to read a then takes none
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.execution.readback import Readback
from deployments.execution.upload import upload

BOOLEANS = (torch.bool, torch.uint8)


class HostWaited(AssertionError):
    """On a GPU, the host would have waited here."""


class DoubleDevice:
    """Counts the waits for copies to the host, and lets nothing else wait."""

    def __init__(self) -> None:
        self.num_waits = 0
        self._begun: list[tuple[Tensor, Tensor]] = []
        self._landed: list[Tensor] = []

    def start_readback(self, tensor: Tensor) -> Readback:
        """As `read_back`: until someone has waited, the host's memory holds anything."""
        here = torch.full_like(tensor, -7)
        self._begun.append((tensor.clone(), here))
        return Readback(here, _Mark(self, len(self._begun)))

    def reach(self, mark: int) -> None:
        """Wait until so many copies have landed."""
        if mark > len(self._landed):
            self.num_waits += 1
        for source, here in self._begun[len(self._landed) : mark]:
            here.copy_(source)
            self._landed.append(here)

    def has_landed(self, tensor: Any) -> bool:
        """Whether it is memory of the host that holds what was copied."""
        return any(tensor is here for here in self._landed)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """All tensors are the device's meanwhile, but for what `upload` holds and what landed.

        Raises:
            HostWaited: something but a wait for a copy would have waited.
        """
        with _Calls(self), _Kernels():
            yield


class _Mark:
    def __init__(self, device: DoubleDevice, number: int) -> None:
        self._device, self._number = device, number

    def synchronize(self) -> None:
        self._device.reach(self._number)


class _Calls(TorchFunctionMode):
    """What is said in Python: values asked for, and values of the host that go to the device by a
    copy from memory that is not pinned.
    """

    _READS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")
    _SENDS = ("tensor", "as_tensor", "cuda")

    def __init__(self, device: DoubleDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in self._READS and not self._device.has_landed(args[0]):
            raise HostWaited(f"{name}() of a tensor that has not landed")
        if name in self._SENDS or (name == "to" and _names_device(args[1:], kwargs)):
            if not _is_within_upload(sys._getframe(1)):
                raise HostWaited(f"{name}() copies to the device, and not by upload()")
        if name in ("__getitem__", "__setitem__") and _holds_host_index(args[1]):
            raise HostWaited("an index of the host")
        return func(*args, **kwargs)


class _Kernels(TorchDispatchMode):
    """What is asked of the device: results whose size or value the host must know to go on."""

    _WAITS = (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in self._WAITS:
            raise HostWaited(name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise HostWaited("repeat_interleave to an unknown size")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            if any(index is not None and index.dtype in BOOLEANS for index in args[1]):
                raise HostWaited(f"{name} by a mask")
        return func(*args, **kwargs)


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(arg, torch.device | str) for arg in (*args, *kwargs.values()))


def _is_within_upload(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not upload.__code__:
        frame = frame.f_back
    return frame is not None


def _holds_host_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | np.ndarray) for part in parts)
