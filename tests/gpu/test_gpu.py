"""The GPU's own path on a GPU: kernels against the reference, a model against its own attention,
graphs against none, and what is left where one cannot be recorded.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_scenes import LAYERS, MIXES, TOLERANCE, Layer, Scene, attend, make_scene
from transformers import AutoConfig, AutoModelForCausalLM

from deployments.config import CacheConfig, ExecutionConfig, ServiceConfig
from deployments.engine.outputs import ChunkReason, ScheduledRequest
from deployments.engine.request import Request
from deployments.execution.attention.reference import ReferenceAttention
from deployments.execution.device_memory import is_out_of_memory
from deployments.execution.graph_recorder import CudaGraphRecorder
from deployments.execution.kv_cache import LayerCache
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_loader import LoadedModel
from deployments.protocol import SamplingParams

GPU = torch.device("cuda")
NUM_ROWS = 3


def on_gpu(scene: Scene) -> Scene:
    call, cache = scene.call, scene.cache
    moved = replace(
        call,
        query=call.query.to(GPU),
        key=call.key.to(GPU),
        value=call.value.to(GPU),
        sinks=None if call.sinks is None else call.sinks.to(GPU),
    )
    return replace(scene, call=moved, cache=LayerCache(cache.keys.to(GPU), cache.values.to(GPU)))


@pytest.mark.parametrize("mix", [*MIXES.values(), [(2100, 1), (3, 1)]], ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_compiled_kernels_are_the_reference(layer: Layer, mix: list[tuple[int, int]]) -> None:
    """What the interpreter and a cross-compiler cannot see: races, misaligned loads, rounding of
    the matrix units.
    """
    from deployments.execution.attention.triton_backend import TritonAttention

    scene = make_scene(layer, mix, seed=6)
    got = attend(TritonAttention([layer.spec], layer.dtype, GPU), on_gpu(scene)).cpu()
    want = attend(ReferenceAttention(), scene)
    torch.testing.assert_close(got, want, atol=4 * TOLERANCE[layer.dtype], rtol=1e-2)


def make_executor(cuda_graphs: str, device: torch.device = GPU) -> ModelExecutor:
    """Over a small random model; loading it compares packed with eager logits on the GPU."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).to(device).eval().requires_grad_(False)
    loaded = LoadedModel(model, 256, 131, frozenset(), {})
    execution = ExecutionConfig(device="cuda", attention_backend="triton", cuda_graphs=cuda_graphs)
    service = ServiceConfig(cache=CacheConfig(num_blocks=64, block_size=16), execution=execution)
    return ModelExecutor(loaded, service)


def decode_logits(executor: ModelExecutor) -> torch.Tensor:
    """[10, NUM_ROWS, vocab_size] of prompts of unlike lengths and nine decodes after them."""
    requests = [
        Request(
            request_id=str(row),
            token_ids=[1 + (7 * row + i) % 130 for i in range(5 + 9 * row)],
            num_prompt_tokens=5 + 9 * row,
            sampling_params=SamplingParams(),
            seed=0,
            max_num_tokens=64,
            arrival_s=0.0,
            arrival_index=row,
        )
        for row in range(NUM_ROWS)
    ]
    tables = [[3 * row + 3, 3 * row + 2, 3 * row + 1] for row in range(NUM_ROWS)]
    first = [0] * NUM_ROWS
    found = []
    for step in range(10):
        rows = [
            ScheduledRequest(
                request, done, len(request.token_ids) - done, table, True, ChunkReason.DECODE, False
            )
            for request, done, table in zip(requests, first, tables, strict=True)
        ]
        with torch.inference_mode():
            packed = executor._forward.run(rows)
        by_id = dict(
            zip(
                [row.request.request_id for row in packed.sampled], packed.logits.cpu(), strict=True
            )
        )
        found.append(torch.stack([by_id[str(row)] for row in range(NUM_ROWS)]))
        first = [len(request.token_ids) for request in requests]
        for row, request in enumerate(requests):
            request.token_ids.append(1 + (11 * step + row) % 130)
    return torch.stack(found)


def check_graphs(device: torch.device) -> None:
    plain, graphed = make_executor("off", device), make_executor("auto", device)
    runner = graphed._forward._runner
    assert sorted(runner._recordings) == list(runner._sizes)
    recorded = {size: dict(kinds) for size, kinds in runner._recordings.items()}
    want, got = decode_logits(plain), decode_logits(graphed)
    assert runner._recordings == recorded
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    plain.close()
    graphed.close()


def test_graphs_change_nothing() -> None:
    """All sizes are recorded at load. Three rows padded to four, replayed nine times: the same
    logits as kernel by kernel.
    """
    check_graphs(GPU)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU is visible")
def test_a_model_on_the_second_gpu_is_computed_there() -> None:
    """Kernels of Triton and streams are of the current device, which is the first."""
    check_graphs(torch.device("cuda:1"))
    assert torch.cuda.current_device() == 0


def test_what_fails_while_it_is_recorded_leaves_torch_usable() -> None:
    """Neither a wait for the device nor a tensor too large for it may leave the recorder's stream
    the current one, or the allocator in its pool; and the second is known as out of memory.
    """
    recorder = CudaGraphRecorder(GPU)
    x = torch.ones(1 << 20, device=GPU)
    first = recorder.record(lambda: x + 1)

    def wait() -> torch.Tensor:
        return x * x[0].item()

    def grow() -> torch.Tensor:
        is_recorded = torch.cuda.is_current_stream_capturing()
        return torch.empty(1 << (46 if is_recorded else 20), device=GPU)

    before = torch.cuda.current_stream(GPU)
    with pytest.raises(RuntimeError) as waited:
        recorder.record(wait)
    assert not is_out_of_memory(waited.value)
    with pytest.raises(RuntimeError) as grown:
        recorder.record(grow)
    assert is_out_of_memory(grown.value)
    assert torch.cuda.current_stream(GPU) == before
    torch.cuda.empty_cache()
    assert float((x + x).sum()) == 2 << 20
    x.fill_(2)
    assert float(first().sum()) == 3 << 20
