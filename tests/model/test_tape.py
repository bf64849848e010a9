"""Tapes: what is recorded plays again to the bit, on other inputs; what cannot be is refused."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_compiled_linear import needs_compiler
from tiny_models import greedy, make_executor, make_model, make_prompt, run
from torch import Tensor

from deployments.execution.device_memory import is_out_of_memory
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.native.compiler import compile_once
from deployments.execution.native.kernel import Kernel
from deployments.execution.step_runner import EagerRunner
from deployments.execution.tape.player import Tape, TapeRecorder
from deployments.execution.tape.runner import NUM_PLAIN, TapeRunner, choose_tapes
from deployments.execution.tape.watch import CannotRecord, watch

pytestmark = needs_compiler
WEIGHT = torch.arange(12.0).view(3, 4)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> TapeRecorder:
    return TapeRecorder.compiled(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kernel]:
    """Kernels for these tests alone."""
    folder = tmp_path_factory.mktemp("source")
    source = Path(folder, "tried.cpp")
    source.write_text(
        """
#include <atomic>
#include <chrono>
#include <cstdint>
extern "C" int scale(void* const* tensors, const int64_t* sizes, const double* numbers) {
    const float* x = (const float*)tensors[0];
    for (int64_t i = 0; i < sizes[0]; ++i)
        ((float*)tensors[2])[i] = numbers[0] * x[i] + (tensors[1] ? *(float*)tensors[1] : 0);
    return 0;
}
extern "C" int fail(void* const*, const int64_t*, const double*) { return 1; }
extern "C" int wait(void* const* tensors, const int64_t*, const double*) {
    auto* flag = (std::atomic<int64_t>*)tensors[0];
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (flag->load() == 0)
        if (std::chrono::steady_clock::now() > end) return 1;
    return 0;
}
"""
    )
    library = ctypes.CDLL(str(compile_once(source, folder)))
    return lambda name: Kernel(library, name)


COMPUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers beside tensors": lambda x: 2 * x + 1 - x / 3.0,
    "a dtype and a format": lambda x: x.to(torch.float64, memory_format=torch.contiguous_format),
    "views of views": lambda x: x.view(2, 6).t()[1:].unsqueeze(0).sum(1),
    "several results": lambda x: torch.cat(x.split([1, 3], 1)[::-1], 1) + x.max(-1).values[:, None],
    "a list of results": lambda x: torch.stack(x.unbind(0)[::-1]),
    "in place": lambda x: x.clone().add_(1).mul_(x),
    "in place, by a view": lambda x: (y := x.clone(), y[1].zero_())[0],
    "a constant": lambda x: x * WEIGHT.t().reshape(3, 4) + WEIGHT[0],
    "a gather": lambda x: x[torch.tensor([2, 0])] + x[:, [1, 1, 0, 3]][:2],
    "an empty list": lambda x: torch.amax(x, dim=[]),
    "an argument that is not given": lambda x: torch.nn.functional.layer_norm(x, (4,), eps=1e-3),
    "made from nothing": lambda x: x + torch.arange(4, dtype=x.dtype) + torch.ones(3, 1),
    "the input itself": lambda x: x,
    "a constant alone": lambda x: WEIGHT,
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_tape_computes_again(recorder: TapeRecorder, name: str) -> None:
    """A computation that was recorded once is the same to the bit on other inputs, as often as it
    is played.
    """
    compute = COMPUTATIONS[name]
    first, others = torch.randn(3, 4), [torch.randn(3, 4) for _ in range(3)]
    with torch.inference_mode():
        made, result = recorder.record(lambda: compute(first), [first])
        assert torch.equal(result, compute(first))
        for x in (*others, first):
            assert torch.equal(made.play([x]), compute(x))


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x * x[0, 0].item(),
    "a branch": lambda x: x if x.sum() > 0 else -x,
    "tolist": lambda x: x * x[0].tolist()[0],
    "numpy": lambda x: x + torch.from_numpy(x.numpy() + 1),
    "a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "chance": lambda x: x + torch.rand(3, 4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_numbers_is_refused(name: str) -> None:
    """A tape would repeat what Python once read from a tensor, and a mask that was once true."""
    x = torch.randn(3, 4)
    with torch.inference_mode(), pytest.raises(CannotRecord):
        watch(lambda: REFUSED[name](x), [x])


def test_kernels_are_given_views_where_they_lie(
    recorder: TapeRecorder, kernels: Callable[[str], Kernel]
) -> None:
    """A kernel that reads and writes parts of a tensor finds them in the memory of the replay, and
    a tensor that is not there stays so.
    """
    scale = kernels("scale")

    def compute(x: Tensor) -> Tensor:
        out = x.new_zeros(3, 4)
        scale((x[1], None, out[2]), (4,), (2.0,))
        scale((out.view(-1)[8:], WEIGHT[1, 2:], out), (4,), (0.5,))
        return out

    x, other = torch.randn(3, 4), torch.randn(3, 4)
    with torch.inference_mode():
        made, _ = recorder.record(lambda: compute(x), [x])
        assert torch.equal(made.play([other]), compute(other))
        want = torch.stack((other[1] + 6, torch.zeros(4), 2 * other[1]))
        torch.testing.assert_close(made.play([other]), want)


def test_views_that_only_kernels_take_are_not_played(kernels: Callable[[str], Kernel]) -> None:
    """Most of a model's operations are such views; a tape goes without them."""
    scale = kernels("scale")

    def compute(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scale((x.view(4, 3).t()[0], None, out.unsqueeze(0).transpose(1, 2)), (1,), (2.0,))
        return out

    x = torch.randn(3, 4)
    with torch.inference_mode():
        script, _ = watch(lambda: compute(x), [x])
    names = [call.function.overloadpacket.__name__ for call in script.calls[:-1]]
    assert set(names) <= {"empty", "detach"}


def test_a_kernel_without_memory_fails_as_one(
    recorder: TapeRecorder, kernels: Callable[[str], Kernel]
) -> None:
    """A replayed kernel that finds no memory ends in the error that makes the engine give room."""
    scale, fail = kernels("scale"), kernels("fail")
    x = torch.randn(3, 4)

    def compute() -> Tensor:
        scale((x, None, x), (12,), (1.0,))
        return x

    script, _ = watch(compute, [x])
    script.calls = [
        type(call)(fail, call.reads, call.offsets, call.sizes, call.numbers)  # type: ignore[arg-type, call-arg, union-attr]
        for call in script.calls
    ]
    made = Tape(torch.classes.chunkserve.Tape, script)
    with pytest.raises(RuntimeError) as caught:
        made.play([x])
    assert is_out_of_memory(caught.value)


def test_other_threads_go_on_meanwhile(
    recorder: TapeRecorder, kernels: Callable[[str], Kernel]
) -> None:
    """A tape plays without Python's lock: here it waits for what another thread writes."""
    wait, flag = kernels("wait"), torch.ones(1, dtype=torch.int64)

    def compute() -> Tensor:
        wait((flag,), ())
        return flag

    made, _ = recorder.record(compute, [flag])
    flag.zero_()
    results: list[Any] = []
    playing = threading.Thread(target=lambda: results.append(made.play([flag])))
    playing.start()
    flag.fill_(1)
    playing.join(30)
    assert len(results) == 1


# --- in a model -----------------------------------------------------------------------------------


def _runner(executor: ModelExecutor) -> Any:
    return executor._forward._runner


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_played_steps_are_the_plain_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of several lengths, in chunks and decodes together, give the logits of plain steps
    to the bit, while most steps are played.
    """
    monkeypatch.setattr("deployments.execution.tape.runner.NUM_PLAIN", 1)
    requests = [greedy(make_prompt(9 + 5 * i, i), f"r{i}", max_tokens=12 + i % 3) for i in range(4)]
    model = make_model(family)
    taped = make_executor(model)
    assert isinstance(_runner(taped), TapeRunner)
    got = run(taped, requests, chunk_size=8)
    num_tapes = sum(isinstance(made, Tape) for made in _runner(taped)._tapes.values())
    taped.close()
    plain = make_executor(model)
    plain._forward._runner = EagerRunner(_runner(plain)._forward)
    want = run(plain, requests, chunk_size=8)
    for request in requests:
        assert got.tokens(request.request_id) == want.tokens(request.request_id)
        assert all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(
                got.logits[request.request_id], want.logits[request.request_id], strict=True
            )
        )
    if family == "llama":
        assert num_tapes >= 2


def test_tapes_of_old_shapes_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shapes steps have, so many tapes are kept and no more."""
    monkeypatch.setattr("deployments.execution.tape.runner.MAX_SHAPES", 3)
    executor = make_executor(make_model("llama"))
    run(executor, [greedy(make_prompt(n, n), f"r{n}") for n in range(3, 12)], chunk_size=8)
    assert len(_runner(executor)._tapes) == 3


def test_a_shape_is_recorded_once_it_has_come_often() -> None:
    """Recording takes as long as many steps: one that is not seen again is not worth it."""
    executor = make_executor(make_model("llama"))
    run(executor, [greedy(make_prompt(5), "mine", max_tokens=NUM_PLAIN + 4)])
    tapes = _runner(executor)._tapes
    assert isinstance(tapes[1, 1, 1], Tape)
    assert tapes[5, 1, 1] == 1


def test_without_tapes_steps_run_plainly(tmp_path: Path) -> None:
    """Switched off, or with a backend that plans in Python, steps run as they come."""
    assert choose_tapes(False, tmp_path, object()) is EagerRunner
    assert choose_tapes(True, tmp_path, object()) is EagerRunner
