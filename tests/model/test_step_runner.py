"""Replayed decode steps: padding, fixed memory, which steps are replayed. A double replays in place
of a CUDA graph: it computes again, over the same fixed inputs. What is recorded: test_recordings.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from graph_doubles import LARGEST, Again, HeldPlans, MakeExecutor, executor_maker
from tiny_models import greedy, make_executor, make_model, make_prompt, run
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.static_plans import StaticPlans
from deployments.execution.step_runner import (
    EagerRunner,
    GraphedRunner,
    choose_graphs,
    graph_sizes,
)

CPU = torch.device("cpu")


def held() -> Any:
    return HeldPlans()


def triton() -> Any:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from tiny_models import _COMMON

    from deployments.execution.attention.triton_backend import TritonAttention
    from deployments.execution.kv_cache import LayerSpec

    dim = _COMMON["head_dim"]
    return TritonAttention([LayerSpec(4, 2, dim, dim, None, None, False)], torch.float32, CPU, 1)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeExecutor:
    return executor_maker(monkeypatch)


def test_graph_sizes_reach_the_most_rows() -> None:
    """Every number of decodes has a size to be padded to, the largest included."""
    assert graph_sizes(1) == (1,)
    assert graph_sizes(9) == (1, 2, 4, 8, 9)
    assert graph_sizes(24) == (1, 2, 4, 8, 16, 24)


@pytest.mark.parametrize(
    ("backend", "count"), [*((held, count) for count in (1, 2, 3, 5, 9)), (triton, 3)]
)
def test_replayed_decodes_are_the_plain_ones(make: Any, backend: Any, count: int) -> None:
    """So many decodes, padded, replayed from fixed memory: the same tokens and logits, while rows
    come and go and blocks are added.
    """
    requests = [
        greedy(make_prompt(5 + 3 * i, i), f"r{i}", max_tokens=4 + i % 4) for i in range(count)
    ]
    recorder = Again()
    plain = run(make(backend(), None), requests, max_num_seqs=9)
    graphed = run(make(backend(), recorder), requests, max_num_seqs=9)
    for request in requests:
        assert graphed.tokens(request.request_id) == plain.tokens(request.request_id)
        torch.testing.assert_close(
            graphed.logits[request.request_id],
            plain.logits[request.request_id],
            atol=1e-5,
            rtol=1e-5,
        )
    assert recorder.num_replayed >= 3


def test_steps_with_chunks_run_plainly(make: Any) -> None:
    """A recording holds decodes alone: prompts that arrive meanwhile are computed as they come."""
    recorder = Again()
    executor = make(HeldPlans(), recorder)
    late = greedy(make_prompt(30, 7), "late", max_tokens=2)

    def arrive(engine: Any, step: int) -> None:
        if step == 3:
            engine.add(late)

    first = greedy(make_prompt(9), "first", max_tokens=12)
    mixed = run(executor, [first], arrive, chunk_size=8)
    assert mixed.num_mixed_steps >= 3
    alone = run(make(HeldPlans(), None), [first])
    assert mixed.tokens("first") == alone.tokens("first")
    assert recorder.num_replayed < mixed.engine.step_log.num_steps


def test_graphs_are_for_gpus_whose_backend_has_plans_for_them() -> None:
    """On a CPU, switched off, or with a backend that plans anew, nothing is recorded."""
    assert isinstance(HeldPlans(), StaticPlans)
    cuda = torch.device("cuda")
    assert choose_graphs("auto", HeldPlans(), CPU, LARGEST, 0) is EagerRunner
    assert choose_graphs("off", HeldPlans(), cuda, LARGEST, 0) is EagerRunner
    assert choose_graphs("auto", ReferenceAttention(), cuda, LARGEST, 0) is EagerRunner


def test_a_gpu_whose_backend_has_plans_gets_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched on, and with what the largest step takes left to it."""
    where = "deployments.execution.step_runner"
    monkeypatch.setattr(f"{where}.CudaGraphRecorder", lambda device: Again())
    monkeypatch.setattr(f"{where}.num_free_bytes", lambda device: 6)
    forward = make_executor(make_model("llama"))._forward._runner._forward
    runner = choose_graphs("auto", HeldPlans(), torch.device("cuda"), LARGEST, 7)(forward)
    assert isinstance(runner, GraphedRunner)
    with pytest.raises(MemoryError):
        runner._room.check()


class RefusesToWait(TorchDispatchMode):
    """Fails what would make the host wait for a GPU."""

    WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing_within_a_forward(make: Any) -> None:
    """From the launch of a step to its logits nothing is read back, in prefill and in decode."""
    executor = make(triton(), None)
    forward = executor._forward.run

    def checked(scheduled: Any) -> Any:
        with RefusesToWait():
            return forward(scheduled)

    executor._forward.run = checked  # type: ignore[method-assign]
    got = run(executor, [greedy(make_prompt(20, i), f"r{i}") for i in range(3)], chunk_size=16)
    assert all(len(got.tokens(f"r{i}")) == 5 for i in range(3))
