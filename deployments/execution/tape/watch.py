"""Watches a computation and writes the script of it.

All that Python does between operations is baked in: a script holds for inputs of the same shapes.
What would let Python act on what a tensor holds is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.execution.native.kernel import Kernel
from deployments.execution.tape.script import NOBODY, Places, Script, SeenKernel, SeenOperation

_UNTAPEABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_EMPTY = (torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default)
_READERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""What hands a tensor's numbers to Python past torch's dispatcher."""
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""As torch's own enumeration has them, which Python does not show."""


class CannotRecord(RuntimeError):
    """The computation does what a tape cannot do again; the message says what."""


def watch(compute: Callable[[], Tensor], inputs: Sequence[Tensor]) -> tuple[Script, Tensor]:
    """Run a computation; returns what it did, and what it returned.

    Args:
        inputs: all that will differ when it runs again; whatever else it reads is a constant.

    Raises:
        CannotRecord: it reads a tensor from Python, draws random numbers, or the like.
    """
    seen = _Watch(inputs)
    with _RefusesReads(), seen:
        result = compute()
    seen.script.result = seen.place_of(result)
    seen.script.prune()
    return seen.script, result


class _RefusesReads(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _READERS:
            raise CannotRecord(f"it reads a tensor by {function.__name__}()")
        return function(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Stand:
    """Where a tensor was seen."""

    tensor: Tensor
    """Kept, so that no later one gets its id."""
    place: int
    base: _Stand | None
    """Of whose memory it is a view, itself no view; None: it has its own."""
    is_constant: bool = False


class _Watch(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.script = Script(len(inputs))
        self._stands: dict[int, _Stand] = {}
        for tensor in inputs:
            self._add(tensor)

    def place_of(self, tensor: Tensor) -> int:
        """Where a tensor stands."""
        return self._find_or_add(tensor).place

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if not isinstance(function, OpOverload):
            raise CannotRecord(f"{function} is no operation that a tape can call")
        if not set(_UNTAPEABLE).isdisjoint(function.tags) and not _is_gather(function, args):
            raise CannotRecord(f"{function} depends on more than shapes")
        out = function(*args, **named)
        if function in _EMPTY and out.is_contiguous():
            self._ask_for_memory(out)
            return out
        names = [argument.name for argument in function._schema.arguments]
        given = dict(enumerate(args)) | {names.index(name): v for name, v in named.items()}
        read = [self._find_or_add(t) for value in given.values() for t in _tensors_of(value)]
        results = list(_results_of(function, out))
        has_effect = function._schema.is_mutable
        if not has_effect and self._is_view_of_constants(results, read):
            return out
        arguments = {index: self._argument(value) for index, value in given.items()}
        reads = tuple(stand.place for stand in read)
        writes = tuple(self._add(result, read).place for result in results)
        self.script.calls.append(SeenOperation(function, arguments, reads, writes, has_effect))
        return out

    def heard(
        self,
        kernel: Kernel,
        tensors: Sequence[Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float],
    ) -> None:
        """See KernelListener."""
        places, offsets = [], []
        for tensor in tensors:
            if tensor is None:
                places.append(NOBODY)
                offsets.append(0)
                continue
            stand = self._find_or_add(tensor)
            base = stand.base or stand
            places.append(base.place)
            offsets.append(tensor.data_ptr() - base.tensor.data_ptr())
        self.script.calls.append(
            SeenKernel(kernel, tuple(places), tuple(offsets), tuple(sizes), tuple(numbers))
        )

    def _ask_for_memory(self, out: Tensor) -> None:
        """By its size alone: what it was to be like is not needed for that."""
        function = torch.ops.aten.empty.memory_format
        arguments = {0: list(out.shape), 1: out.dtype}
        writes = (self._add(out).place,)
        self.script.calls.append(SeenOperation(function, arguments, (), writes, False))

    def _find_or_add(self, tensor: Tensor) -> _Stand:
        """What was not seen before was there before: a constant."""
        found = self._stands.get(id(tensor))
        if found is None:
            found = self._add(tensor)
            found.is_constant = True
            self.script.constants[found.place] = tensor
        return found

    def _add(self, tensor: Tensor, sources: Sequence[_Stand] = ()) -> _Stand:
        bases = (
            stand.base or stand
            for stand in sources
            if not stand.is_constant and _memory_of(stand.tensor) == _memory_of(tensor)
        )
        stand = _Stand(tensor, self.script.num_places, next(bases, None))
        self.script.num_places += 1
        self._stands[id(tensor)] = stand
        return stand

    def _is_view_of_constants(self, results: list[Tensor], read: list[_Stand]) -> bool:
        """Such a view is a constant itself."""
        if not read or not all(stand.is_constant for stand in read):
            return False
        memories = {_memory_of(stand.tensor) for stand in read}
        return all(_memory_of(result) in memories for result in results)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Places((self.place_of(value),), is_list=False)
        if isinstance(value, (list, tuple)):
            if any(isinstance(item, Tensor) for item in value):
                places = (NOBODY if item is None else self.place_of(item) for item in value)
                return Places(tuple(places), is_list=True)
            return list(value)
        return _MEMORY_FORMATS[value] if isinstance(value, torch.memory_format) else value


def _is_gather(function: Any, args: Sequence[Any]) -> bool:
    """Indexing whose result has a shape that does not depend on what the indices are."""
    if function is not torch.ops.aten.index.Tensor:
        return False
    return all(index.dtype in (torch.int64, torch.int32) for index in _tensors_of(args[1]))


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, Tensor))


def _results_of(function: Any, out: Any) -> Iterator[Tensor]:
    for result in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(result, (list, tuple)):
            yield from _results_of(function, result)
        elif isinstance(result, Tensor):
            yield result
        else:
            raise CannotRecord(f"{function} returns {type(result).__name__}")
