"""How a CUDA graph is recorded, on which device and streams, and how threads get theirs back. A
double of torch.cuda tells what it was asked, in order; tests/gpu records real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from deployments.execution.current_device import on_device
from deployments.execution.device_memory import is_out_of_memory
from deployments.execution.graph_recorder import CudaGraphRecorder

SECOND = torch.device("cuda:1")


class Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self._told = told

    def wait_stream(self, other: Stream) -> None:
        self._told.append(f"{self.name} waits for {other.name}")


class Graph:
    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Cuda:
    """What the recorder asks of torch.cuda."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.devices: list[torch.device | None] = []
        self.main = Stream("main", self.told)
        self.current = self.main
        self.is_recording = False
        self.end_fails = False
        self.CUDAGraph = Graph

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        self.devices.append(device)
        return Stream("side", self.told)

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self, device: torch.device) -> Stream:
        self.devices.append(device)
        return self.current

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.told.append(f"on {device}")
        yield
        self.told.append("off")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Graph, **asked: Any) -> Iterator[None]:
        """Where its end fails, it leaves its stream the current one, as torch does."""
        assert asked["pool"] == "pool"
        assert asked["capture_error_mode"] == "thread_local"
        before, self.current = self.current, asked["stream"]
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False
            if self.end_fails:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """In place of torch.cuda, for the recorder."""
    made = Cuda()
    for name in ("Stream", "graph_pool_handle", "current_stream", "device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.CUDAGraph)
    return made


def test_a_computation_is_warmed_up_and_then_recorded_on_its_device(cuda: Cuda) -> None:
    """Kernels that were not compiled before cannot be while a graph is recorded; and without a
    device of its own, a replica of the second GPU asked all of this of the first.
    """
    out = torch.zeros(1)

    def compute() -> Tensor:
        cuda.told.append(f"{'recorded' if cuda.is_recording else 'run'} on {cuda.current.name}")
        return out

    replay = CudaGraphRecorder(SECOND).record(compute)
    assert cuda.told == [
        "on cuda:1",
        "side waits for main",
        "run on side",
        "main waits for side",
        "recorded on side",
        "off",
    ]
    assert cuda.devices == [SECOND, SECOND]
    assert cuda.current is cuda.main
    assert replay() is out


@pytest.mark.parametrize("fails_while", ["run", "recorded"])
def test_a_failed_recording_leaves_the_thread_its_stream(cuda: Cuda, fails_while: str) -> None:
    """Every step after it ran on the recorder's stream, beside what others had begun; and an error
    of memory was not known as one under the error that the end of a recording raises.
    """
    cuda.end_fails = True

    def compute() -> Tensor:
        if cuda.is_recording == (fails_while == "recorded"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(1)

    with pytest.raises(RuntimeError) as caught:
        CudaGraphRecorder(SECOND).record(compute)
    assert is_out_of_memory(caught.value)
    assert cuda.current is cuda.main
    assert "main waits for side" in cuda.told


@pytest.mark.parametrize(
    ("message", "is_memory"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be reported later", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("operation not permitted when stream is capturing", False),
    ],
)
def test_out_of_memory_is_known_by_whoever_words_it(message: str, is_memory: bool) -> None:
    """A driver without memory for a graph was taken for a model that cannot be recorded."""
    assert is_out_of_memory(RuntimeError(message)) == is_memory


def test_only_a_gpu_is_made_the_current_device(cuda: Cuda) -> None:
    """torch.cuda refuses to be asked of a CPU."""
    with on_device(SECOND):
        assert cuda.told == ["on cuda:1"]
    assert isinstance(on_device(torch.device("cpu")), nullcontext)
