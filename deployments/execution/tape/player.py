"""Scripts as tapes of `native/tape.cpp`, which play without Python and without its lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deployments.execution.native.compiler import compile_once
from deployments.execution.tape.script import Places, Script, SeenKernel, SeenOperation
from deployments.execution.tape.watch import CannotRecord, watch

_SOURCE = Path(__file__).parents[1] / "native" / "tape.cpp"


class Tape:
    """A computation that can run again.

    Args:
        make: the compiled class.
        script: what it does.

    Raises:
        CannotRecord: an operation takes an argument that cannot be kept.
    """

    def __init__(self, make: Callable[[int], Any], script: Script) -> None:
        self._tape = make(script.num_places)
        self._result = script.result
        for place, tensor in script.constants.items():
            self._tape.set_constant(place, tensor)
        for call, unused in zip(script.calls, script.find_unused(), strict=True):
            if isinstance(call, SeenKernel):
                self._add_kernel(call, unused)
            else:
                self._add_operation(call, unused)

    def play(self, inputs: Sequence[Tensor]) -> Tensor:
        """What the computation returns for these inputs, of the shapes and in the order in which
        it was watched.
        """
        result: Tensor = self._tape.run(list(inputs), self._result)
        return result

    def _add_kernel(self, call: SeenKernel, unused: list[int]) -> None:
        self._tape.add_kernel(
            call.kernel.address,
            list(call.reads),
            list(call.offsets),
            [int(size) for size in call.sizes],
            [float(number) for number in call.numbers],
            unused,
        )

    def _add_operation(self, call: SeenOperation, unused: list[int]) -> None:
        name = call.function._schema.name
        self._tape.add_operation(
            name, call.function._schema.overload_name, list(call.writes), unused
        )
        for index, value in call.arguments.items():
            if isinstance(value, Places) and value.is_list:
                self._tape.set_tensors(index, list(value.places))
            elif isinstance(value, Places):
                self._tape.set_tensor(index, value.places[0])
            elif value == []:
                self._tape.set_empty_list(index)
            else:
                self._set_value(name, index, value)

    def _set_value(self, name: str, index: int, value: Any) -> None:
        try:
            self._tape.set_value(index, value)
        except RuntimeError as error:
            raise CannotRecord(f"{name} takes {value!r}") from error


class TapeRecorder:
    """Makes tapes.

    Args:
        make: the compiled class, which takes a number of places.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    @classmethod
    def compiled(cls, cache: Path) -> TapeRecorder:
        """Compile it, once, into `cache`, and load it.

        Raises:
            CannotCompile, OSError: there is no compiler, or it or the loading fails.
        """
        if not _is_loaded():
            torch.ops.load_library(compile_once(_SOURCE, cache, _torch_flags()))
        return cls(torch.classes.chunkserve.Tape)

    def record(
        self, compute: Callable[[], Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tape, Tensor]:
        """Run a computation; returns what runs it again, and what it returned. See `watch`.

        Raises:
            CannotRecord: it does what a tape cannot do.
        """
        script, result = watch(compute, inputs)
        return Tape(self._make, script), result


def _is_loaded() -> bool:
    # Once for a process: torch takes a name once.
    try:
        return torch.classes.chunkserve.Tape is not None
    except RuntimeError:
        return False


def _torch_flags() -> tuple[str, ...]:
    """What a source needs that includes torch's headers, of this very torch."""
    home = Path(torch.__file__).parent
    return (
        "-std=c++20",
        f"-I{home / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f'-DBUILT_FOR_TORCH="{torch.__version__}"',
        f"-L{home / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    )
