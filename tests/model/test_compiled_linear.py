"""The compiled kernel computes the linear layer that torch computes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import Oracle, assert_same, greedy, make_executor, make_model, make_prompt, run
from torch import nn

from deployments.execution.compiled_linear import (
    CompiledLinear,
    LinearKernel,
    find_linear_kernel,
    pack,
    unpack,
)
from deployments.execution.native import compiler
from deployments.execution.native.compiler import CannotCompile, compile_once, find_compiler


def _has_compiler() -> bool:
    try:
        find_compiler()
    except CannotCompile:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="there is no C++ compiler here")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> LinearKernel:
    found = find_linear_kernel(True, tmp_path_factory.mktemp("kernels"))
    assert found is not None
    return found


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_rows_are_the_linear_layer(
    kernel: LinearKernel, dtype: torch.dtype, bias: bool, num_threads: int
) -> None:
    """Any number of rows, one chunk of them or several, inputs of more than one stretch, outputs
    that fill no panel, any number of threads: the sums of float32, rounded once.
    """
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    shapes = [
        (inputs, outputs, rows)
        for inputs in (1, 15, 16, 33, 100)
        for outputs in (1, 15, 16, 17, 100)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 28, 29)
    ]
    shapes += [(33, 40, 97), (513, 40, 13), (1100, 33, 200)]
    for num_inputs, num_outputs, num_rows in shapes:
        x = torch.randn(num_rows, num_inputs).to(dtype)
        weight = torch.randn(num_outputs, num_inputs).to(dtype)
        offset = torch.randn(num_outputs).to(dtype) if bias else None
        got = kernel.linear(x, pack(weight), offset, num_outputs)
        exact = x.double() @ weight.double().T
        exact = exact if offset is None else exact + offset.double()
        unit = 1e-5 if dtype is torch.float32 else 2**-8
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), exact, rtol=unit, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kernel: LinearKernel, dtype: torch.dtype
) -> None:
    """Bit by bit the same alone, among few and among many: whom a request shares its steps with
    changes nothing in it.
    """
    torch.manual_seed(0)
    x = torch.randn(200, 576).to(dtype)
    packed = pack(torch.randn(70, 576).to(dtype))
    whole = kernel.linear(x, packed, None, 70)
    for num_rows in (1, 2, 3, 5, 6, 7, 14, 15, 16, 28, 29, 100):
        assert torch.equal(kernel.linear(x[:num_rows], packed, None, 70), whole[:num_rows])


@needs_compiler
def test_rows_that_are_no_numbers_spoil_nobody_else(kernel: LinearKernel) -> None:
    """Infinities and what is no number stay in their own row, and are not rounded into numbers."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(3, 32, dtype=dtype)
        x[0, 0], x[1, 0] = float("nan"), float("inf")
        out = kernel.linear(x, pack(torch.ones(9, 32, dtype=dtype)), None, 9)
        assert out[0].isnan().all() and out[1].isinf().all()
        assert (out[2] == 32).all()


@needs_compiler
def test_a_slice_of_rows_is_read_as_it_is(kernel: LinearKernel) -> None:
    """Rows that do not lie one after the other in memory are read by their strides."""
    x = torch.randn(4, 64)
    weight = torch.randn(16, 32)
    torch.testing.assert_close(
        kernel.linear(x[:, ::2], pack(weight), None, 16), x[:, ::2] @ weight.T, rtol=1e-5, atol=1e-5
    )


@needs_compiler
@pytest.mark.parametrize("keeps_layer", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_layer_gives_the_layer_back(
    kernel: LinearKernel, dtype: torch.dtype, keeps_layer: bool
) -> None:
    """The weight comes back bit by bit, whether or not the layer was kept, and so does the bias."""
    layer = nn.Linear(33, 17, dtype=dtype)
    packed = CompiledLinear(layer, kernel, keeps_layer)
    assert torch.equal(unpack(pack(layer.weight), 17, 33), layer.weight)
    back = packed.layer()
    assert (back is layer) is keeps_layer
    assert torch.equal(back.weight, layer.weight) and torch.equal(back.bias, layer.bias)


@needs_compiler
def test_a_model_answers_the_same_with_it() -> None:
    """Tokens and logits are those of generate, one stream and several."""
    executor = make_executor(make_model("llama"), compile_kernels=True)
    requests = [greedy(make_prompt(n), f"{n} tokens") for n in (5, 9, 12, 30)]
    for batch in (requests[:1], requests):
        result = run(executor, batch, chunk_size=7)
        oracle = Oracle(make_model("llama"))
        for request in batch:
            assert_same(result, request, oracle)


@needs_compiler
def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start of a machine finds what the first one compiled, and runs no compiler."""
    source = tmp_path / "nothing.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    first = compile_once(source, tmp_path / "cache")
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled twice"))
    assert compile_once(source, tmp_path / "cache") == first


@needs_compiler
def test_a_source_that_does_not_compile_leaves_nothing_behind(tmp_path: Path) -> None:
    """A compiler that fails is told by its own words, and the next start tries again."""
    source = tmp_path / "broken.cpp"
    source.write_text("this is no C++\n")
    with pytest.raises(CannotCompile, match=r"failed on broken\.cpp"):
        compile_once(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_without_a_compiler_torch_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without a compiler serves all the same, and its log says what would make it
    faster.
    """
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        found = find_linear_kernel(True, tmp_path)
    assert found is None
    assert "install g++ or set CXX" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    """A cache below a plain file cannot be made; torch serves the layers."""
    (tmp_path / "file").write_text("")
    assert find_linear_kernel(True, tmp_path / "file" / "cache") is None


_OUT_OF_MEMORY = """
import resource, sys, torch
from pathlib import Path
from deployments.execution.compiled_linear import find_linear_kernel, pack
from deployments.execution.quantized_products import choose_products
from deployments.execution.quantized_weight import quantize_weight
torch.set_num_threads(1)
cache = Path(sys.argv[1])
kernel = find_linear_kernel(True, cache)
products = choose_products(torch.device("cpu"), True, cache)
x, weight = torch.ones(1024, 16384, dtype=torch.bfloat16), torch.ones(16, 16384)
packed, quantized = pack(weight.bfloat16()), products.pack(quantize_weight(weight, 8))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 20_000_000, -1))
for multiply in (
    lambda: kernel.linear(x, packed, None, 16), lambda: products.linear(x, quantized, None)
):
    try:
        multiply()
    except MemoryError:
        print("told")
"""


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="limits and measures memory as Linux does")
def test_a_kernel_without_memory_fails_the_step_alone(tmp_path: Path) -> None:
    """An exception that leaves C ends the process, and every request with it."""
    done = subprocess.run(
        [sys.executable, "-c", _OUT_OF_MEMORY, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["told", "told"]
