"""What is refused at load, and what a model and its executor owe each other."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    Oracle,
    assert_same,
    greedy,
    load,
    make_executor,
    make_model,
    make_prompt,
    run,
)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from deployments.config import CacheConfig, ExecutionConfig, ServiceConfig
from deployments.execution.attention.backend import AttentionCall
from deployments.execution.attention.cpu_sdpa import CpuSdpaAttention
from deployments.execution.attention.ragged import NotInStep, RaggedAttention
from deployments.execution.kv_cache import (
    LayerSpec,
)
from deployments.execution.load_gate import UnsupportedModel, probe_layers, refuse_unsupported
from deployments.execution.model_executor import ModelExecutor

GB = 1024**3

# --- refused by name ------------------------------------------------------------------------------

_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "mamba": {"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 64,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
    },
    "falcon": {"model_type": "falcon", "alibi": True, **_SMALL},
    "mpt": {"model_type": "mpt", "vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4},
    "llama4": {"model_type": "llama4_text", "num_key_value_heads": 2, **_SMALL},
    "qwen3_next": {"model_type": "qwen3_next", **_SMALL},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], **_SMALL},
    "t5": {"model_type": "t5"},
}


@pytest.mark.parametrize("fields", UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_models_that_need_more_than_pages_are_refused_by_name(fields: dict[str, Any]) -> None:
    """Recurrent, hybrid, ALiBi, mask-only and encoder-decoder models are refused; the message names
    the type and says what to choose instead.
    """
    config = AutoConfig.for_model(**fields)
    with pytest.raises(UnsupportedModel, match="choose a decoder-only model") as refusal:
        refuse_unsupported(config)
    assert repr(fields["model_type"]) in str(refusal.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_by_their_config(family: str) -> None:
    """The gate refuses no family that the oracle test serves."""
    refuse_unsupported(make_model(family).config)


_PRIVATE_NOTES = ("_is_stateful", "_supports_attention_backend", "_can_set_attn_implementation")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_release_of_transformers_must_keep_its_private_notes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.25 dropped `PreTrainedModel._is_stateful`, and every model failed to load with
    an AttributeError; a note that is missing says nothing now.
    """
    for name in _PRIVATE_NOTES:
        monkeypatch.delattr(PreTrainedModel, name, raising=False)
    refuse_unsupported(make_model(family).config)


def test_a_recurrent_model_that_no_note_tells_of_is_refused_by_its_calls() -> None:
    """xLSTM has neither layer types nor, since transformers 5.25, a note that it is recurrent; it
    never calls our attention.
    """
    fields = {"vocab_size": 64, "hidden_size": 32, "embedding_dim": 32, "num_heads": 4}
    config = AutoConfig.for_model("xlstm", num_hidden_layers=2, num_blocks=2, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match=r"'xlstm'.* choose a decoder-only model"):
        probe_layers(model, RaggedAttention(model))


def test_falcon_without_alibi_is_refused_or_exact() -> None:
    """Until transformers 5.25 it attended by itself and is refused; since then it attends through
    the interface and is served, where all heads share one key and value and where none does.
    """
    fields = {**_SMALL, "vocab_size": VOCAB_SIZE, "alibi": False}
    for multi_query in (True, False):
        config = AutoConfig.for_model("falcon", multi_query=multi_query, **fields)
        why = _refusal_of(config)
        if why is not None:
            assert "attention interface" in why
            continue
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        own = copy.deepcopy(model)
        request = greedy(make_prompt(40), "40 tokens")
        assert_same(run(make_executor(model), [request], chunk_size=7), request, Oracle(own))


def _refusal_of(config: PretrainedConfig) -> str | None:
    try:
        refuse_unsupported(config)
    except UnsupportedModel as refusal:
        return str(refusal)
    return None


def test_rotary_angles_that_follow_the_longest_of_a_batch_are_refused() -> None:
    """A longrope model whose context is longer than one set of angles reaches would answer a short
    prompt differently beside a long one; it is refused with the context up to which it is exact.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 6,
        "long_factor": [3.0] * 6,
        "original_max_position_embeddings": 64,
    }
    config = make_model("llama", rope_parameters=rope).config
    for max_model_len in (None, 65):
        with pytest.raises(UnsupportedModel, match="set model.max_model_len to at most 64"):
            refuse_unsupported(config, max_model_len)
    refuse_unsupported(config, 64)


def test_dynamic_rotary_angles_are_fixed_within_the_models_context() -> None:
    """Dynamic scaling only starts beyond the model's own context, so such a model is served exactly
    up to it.
    """
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    settings = {"rope_parameters": rope, "max_position_embeddings": 64}
    model = make_model("llama", **settings)
    refuse_unsupported(model.config)
    requests = [greedy(make_prompt(n), f"{n} tokens") for n in (5, 58)]
    result = run(make_executor(model), requests, chunk_size=7)
    for request in requests:
        assert_same(result, request, Oracle(make_model("llama", **settings)))


class _WrongBackend(CpuSdpaAttention):
    """Attends after `spoil` has changed what the model asked for."""

    def __init__(self, dtype: torch.dtype, spoil: Callable[[AttentionCall], AttentionCall]) -> None:
        super().__init__(dtype, torch.device("cpu"))
        self._spoil = spoil

    def plan(self, batch, windows):
        return super().plan(batch, {*windows, None, WINDOW + 1})

    def attend(self, call, cache, plan):
        return super().attend(self._spoil(call), cache, plan)


FAULTS = {
    "mistral, no window": ("mistral", lambda call: replace(call, window=None)),
    "gemma3, no window": ("gemma3", lambda call: replace(call, window=None)),
    "gemma2, no softcap": ("gemma2", lambda call: replace(call, softcap=None)),
    "gpt_oss, no sinks": ("gpt_oss", lambda call: replace(call, sinks=None)),
    "llama, other scale": ("llama", lambda call: replace(call, scaling=call.scaling * 2.0)),
    "llama, swapped heads": ("llama", lambda call: replace(call, query=call.query.flip(1))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_the_self_check_catches_attention_that_is_silently_wrong(
    fault: tuple[str, Callable], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that would run with another window, softcap, sink, scale or head order than its own
    is refused, in every dtype it may be loaded in.
    """
    family, spoil = fault
    monkeypatch.setattr(
        "deployments.execution.model_executor.choose_backend",
        lambda execution, specs, dtype, *_: _WrongBackend(dtype, spoil),
    )
    with pytest.raises(UnsupportedModel, match="packed logits differ"):
        make_executor(make_model(family, dtype))


def test_the_self_check_refuses_logits_that_are_not_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaN in either of the compared sequences is a difference, whichever comes first."""
    for row in (0, 1):

        class NanBackend(CpuSdpaAttention):
            def attend(self, call, cache, plan, row=row):
                out = super().attend(call, cache, plan)
                if len(out) == 2:
                    out[row] = float("nan")
                return out

        monkeypatch.setattr(
            "deployments.execution.model_executor.choose_backend",
            lambda execution, specs, dtype, device, _, backend=NanBackend: backend(dtype, device),
        )
        with pytest.raises(UnsupportedModel, match="differ from its own by nan"):
            make_executor(make_model("llama"))


def test_the_self_check_sees_a_window_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 even one key too many is noticed."""

    def spoil(call: AttentionCall) -> AttentionCall:
        return replace(call, window=WINDOW + 1)

    monkeypatch.setattr(
        "deployments.execution.model_executor.choose_backend",
        lambda execution, specs, dtype, *_: _WrongBackend(dtype, spoil),
    )
    with pytest.raises(UnsupportedModel, match="packed logits differ"):
        make_executor(make_model("mistral"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_alone_is_not_refused(family: str, dtype: torch.dtype) -> None:
    """A sound model passes the self-check in low precision."""
    executor = make_executor(make_model(family, dtype))
    request = greedy(make_prompt(20), "one")
    assert len(run(executor, [request], chunk_size=7).tokens("one")) == 5


def test_a_layer_that_never_calls_our_attention_is_refused() -> None:
    """If one layer attends past the interface, the probe notices before anything is served."""

    class Deaf(nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states, None

    model = make_model("llama")
    model.model.layers[1].self_attn = Deaf()
    with pytest.raises(UnsupportedModel, match="2 attention calls were seen where its 3 layers"):
        make_executor(model)


@pytest.mark.parametrize("max_model_len", [2, 3, 4, 5])
def test_a_tiny_context_can_be_served(max_model_len: int) -> None:
    """The self-check needs no longer context than is configured."""
    model = make_model("llama")
    loaded = replace(load(model), max_model_len=max_model_len)
    executor = ModelExecutor(loaded, ServiceConfig(cache=CacheConfig(num_blocks=9)))
    request = greedy(make_prompt(max_model_len - 1), "one", max_tokens=1)
    assert_same(run(executor, [request]), request, Oracle(make_model("llama")))


def test_the_probe_tells_what_each_layer_asks_for() -> None:
    """Shapes, windows, softcap and sinks come from the calls themselves, layer by layer."""
    seen = {
        family: probe_layers(m := make_model(family), RaggedAttention(m)) for family in FAMILIES
    }
    assert seen["llama"] == (LayerSpec(4, 2, 12, 12, None, None, False),) * 3
    assert [spec.window for spec in seen["gemma3"]] == [WINDOW, None, WINDOW]
    assert [spec.softcap for spec in seen["gemma2"]] == [1.5] * 3
    assert all(spec.has_sinks for spec in seen["gpt_oss"])
    assert (seen["deepseek_v3"][0].key_dim, seen["deepseek_v3"][0].value_dim) == (20, 16)


# --- a model and its executor ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_after_close_the_model_is_its_own_again(family: str) -> None:
    """B74: generate gives after an executor what it gave before, and a second executor equals the
    first.
    """
    model = make_model(family)
    requests = [greedy(make_prompt(n), f"{n} tokens") for n in (5, 30)]
    before = Oracle(model).answer(make_prompt(30), 5)
    first_executor = make_executor(model)
    first = run(first_executor, requests, chunk_size=7)
    with pytest.raises(NotInStep):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    first_executor.close()
    after = Oracle(model).answer(make_prompt(30), 5)
    assert model.config._attn_implementation == "eager"
    assert after.token_ids == before.token_ids
    assert torch.equal(after.logits, before.logits)
    second = run(make_executor(model), requests, chunk_size=7)
    for request in requests:
        name = request.request_id
        assert second.tokens(name) == first.tokens(name)
        assert torch.equal(second.logits[name], first.logits[name])


def test_a_closed_executor_keeps_nothing_alive() -> None:
    """After close, the model and its KV cache can be freed: no registry holds on to them."""
    model = make_model("llama")
    executor = make_executor(model)
    run(executor, [greedy(make_prompt(5), "one")])
    executor.close()
    left = [weakref.ref(model), weakref.ref(executor._forward._cache)]
    del model, executor
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_a_refused_model_is_its_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """B74: a model whose executor could not be built attends by its own implementation again."""
    model = make_model("mistral")
    before = Oracle(model).answer(make_prompt(30), 3)
    monkeypatch.setattr(
        "deployments.execution.model_executor.choose_backend",
        lambda execution, specs, dtype, *_: _WrongBackend(dtype, lambda c: replace(c, window=None)),
    )
    with pytest.raises(UnsupportedModel):
        make_executor(model)
    assert Oracle(model).answer(make_prompt(30), 3).token_ids == before.token_ids


def test_two_executors_in_one_process_do_not_meet() -> None:
    """Steps of one model never reach the attention of another."""
    models = {family: make_model(family) for family in ("llama", "mistral")}
    executors = {family: make_executor(model) for family, model in models.items()}
    request = greedy(make_prompt(30), "one")
    for family, executor in executors.items():
        assert_same(run(executor, [request]), request, Oracle(make_model(family)))
    executors["llama"].close()
    assert_same(run(executors["mistral"], [request]), request, Oracle(make_model("mistral")))


# --- the forward ---------------------------------------------------------------------------------


def test_the_reference_backend_is_a_choice() -> None:
    """execution.attention_backend picks the backend; an unknown one is no configuration."""
    assert make_executor(
        make_model("llama"), attention_backend="reference"
    )._forward._backend.name == ("reference")
    with pytest.raises(ValueError, match="attention_backend"):
        ExecutionConfig(attention_backend="flash")  # type: ignore[arg-type]


def test_a_model_whose_forward_keeps_all_logits_answers_the_same() -> None:
    """Models without logits_to_keep are served by picking the sampled rows afterwards."""
    model = make_model("llama")
    forward = model.forward

    def without_logits_to_keep(input_ids, position_ids=None, use_cache=None):
        return forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    model.forward = without_logits_to_keep
    requests = [greedy(make_prompt(n), f"{n} tokens") for n in (5, 30)]
    result = run(make_executor(model), requests, chunk_size=7)
    for request in requests:
        assert_same(result, request, Oracle(make_model("llama")))
