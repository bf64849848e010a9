"""Records what a computation asks of a device, to be run again by one call.

Owns how a CUDA graph is recorded; what is worth recording is the runner's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Replay = Callable[[], Tensor]
"""Runs a recording again over what its inputs now hold; returns the same tensor each time."""


class Recorder(Protocol):
    """Records what a computation asks of the device."""

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """Run it, and return what runs it again in the same memory, all of which the caller keeps.

        Raises:
            RuntimeError: it does something that cannot be recorded, or memory ran out.
        """
        ...


class CudaGraphRecorder:
    """Records CUDA graphs, which share one pool of memory, so that no two may run at once.

    Args:
        device: on which all is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Replay:
        """See Recorder."""
        with torch.cuda.device(self._device):
            self._warm_up(compute)
            return self._record(compute)

    def _warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Before it is recorded, so that kernels are compiled and libraries have their
        workspaces.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                compute()
        finally:
            # Also after a failure: what was begun may still write where memory is free again.
            current.wait_stream(self._stream)

    def _record(self, compute: Callable[[], Tensor]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            # What other threads of the process ask of the device meanwhile is no fault.
            capture_error_mode="thread_local",
        )
        # The outer one gives this thread its stream back where the end of a recording fails:
        # torch.cuda.graph does not.
        with torch.cuda.stream(self._stream), recording:
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
