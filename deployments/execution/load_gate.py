"""Decides whether a model can be served exactly, before anyone is: by its config, by a probe, by
comparison.

Attention through pages is right only for models that attend through transformers' attention
interface and keep everything a token needs in keys and values. Others may run and be silently
wrong, so they are refused by name:

    refuse_unsupported   from the config, before weights are read: recurrent layers, mask-only
                         attention
    probe_layers         one forward that records each layer's call: shapes, window, softcap, sinks
    check_against_eager  logits of packed, chunked sequences against the model's own attention,
                         beyond any window
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from deployments.engine.outputs import ChunkReason, ScheduledRequest
from deployments.engine.request import Request
from deployments.execution.attention.backend import AttentionBackend, AttentionCall
from deployments.execution.attention.ragged import RaggedAttention
from deployments.execution.kv_cache import LayerSpec, PagedKVCache
from deployments.execution.model_forward import logits_to_keep
from deployments.execution.packed_forward import PackedForward
from deployments.protocol import SamplingParams

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
MAX_CHECKED_TOKENS = 4200
"""The self-check reaches beyond windows up to this size; a larger window hides nothing in it."""
_LEAST_CHECKED_TOKENS = 4
"""Enough for three pieces; a configured context may be shorter, the model's own is not."""
_WHAT_TO_DO = "choose a decoder-only model with full or sliding-window attention"


class UnsupportedModel(RuntimeError):
    """This model cannot be served exactly; the message names the model type and what to do."""


def _refuse(config: PretrainedConfig, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model type {config.model_type!r} is not supported: {why}; {_WHAT_TO_DO}"
    )


def refuse_unsupported(config: PretrainedConfig, max_model_len: int | None = None) -> None:
    """Judge a model by its config alone; `max_model_len` is the context to serve, None its own.

    Raises:
        UnsupportedModel: its layers need more than keys and values, or attend in a way that only
            a mask tells, or its rotary angles would depend on the other requests of a step.
    """
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise _refuse(config, "transformers knows no causal language model of this type")
    _refuse_by_class(config, mapping[type(config)])
    text = config.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if other:
        raise _refuse(config, f"it has layers of type {', '.join(sorted(other))}")
    if getattr(text, "attention_chunk_size", None):
        raise _refuse(config, "its chunked attention exists only as a mask")
    if getattr(text, "alibi", False):
        raise _refuse(config, "its ALiBi position bias exists only as a mask")
    longest = _longest_with_fixed_angles(text)
    if longest is not None and (max_model_len or text.max_position_embeddings) > longest:
        raise UnsupportedModel(
            f"model type {config.model_type!r} changes its rotary angles for all requests of a "
            f"step once one is longer than {longest} tokens; set model.max_model_len to at most "
            f"{longest}"
        )


def _refuse_by_class(config: PretrainedConfig, model_class: type[Any]) -> None:
    """Refuse what transformers' own notes on a model class rule out.

    The notes are private and come and go with releases, so one that is missing says nothing: layer
    types tell of recurrent layers too, and `probe_layers` sees who calls our attention.
    """
    if getattr(model_class, "_is_stateful", False):
        raise _refuse(
            config, "it has recurrent or linear-attention layers, whose state has no pages"
        )
    takes_a_backend = getattr(model_class, "_supports_attention_backend", True)
    can_set = getattr(model_class, "_can_set_attn_implementation", lambda: True)
    if not (takes_a_backend or can_set()):
        raise _refuse(config, "it does not attend through transformers' attention interface")


def _longest_with_fixed_angles(text: PretrainedConfig) -> int | None:
    """Up to which context longrope (Ding et al., 2024) keeps one set of angles; None: always."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [k for k in rope.values() if isinstance(k, dict)]
    return min(
        (
            int(kind["original_max_position_embeddings"])
            for kind in kinds
            if kind.get("rope_type") == "longrope"
        ),
        default=None,
    )


def probe_layers(model: PreTrainedModel, attention: RaggedAttention) -> tuple[LayerSpec, ...]:
    """What each layer asks of attention, seen in one forward of two short packed sequences.

    Raises:
        UnsupportedModel: not every layer called our attention exactly once, in order.
    """
    config = model.config
    seen: list[tuple[int, LayerSpec]] = []

    def record(layer_index: int, call: AttentionCall) -> Tensor:
        seen.append((layer_index, _spec_of(call)))
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[-1])

    ids = torch.tensor([[1, 2, 3, 1, 2]], device=model.device)
    positions = torch.tensor([[0, 1, 2, 0, 1]], device=model.device)
    with torch.inference_mode(), attention.handled_by(record):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    num_layers = config.get_text_config().num_hidden_layers
    if [index for index, _ in seen] != list(range(num_layers)):
        raise _refuse(
            config,
            f"{len(seen)} attention calls were seen where its {num_layers} layers make one each",
        )
    return tuple(spec for _, spec in seen)


def _spec_of(call: AttentionCall) -> LayerSpec:
    return LayerSpec(
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        key_dim=call.key.shape[2],
        value_dim=call.value.shape[2],
        window=call.window,
        softcap=call.softcap,
        has_sinks=call.sinks is not None,
    )


@dataclass(frozen=True, slots=True)
class EagerAnswers:
    """What a model says by its own attention: prompts and their last logits."""

    prompts: tuple[list[int], ...]
    logits: Tensor
    """[num_prompts, vocab_size], fp32"""


def eager_answers(
    model: PreTrainedModel,
    attention: RaggedAttention,
    specs: Sequence[LayerSpec],
    max_model_len: int,
) -> EagerAnswers:
    """Ask a model by its own attention, about two random prompts, one longer than any window."""
    windows = [spec.window for spec in specs if spec.window is not None]
    longest = min(max([24, *(w + 8 for w in windows)]), MAX_CHECKED_TOKENS, max_model_len - 1)
    longest = max(longest, _LEAST_CHECKED_TOKENS)
    vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = tuple(
        torch.randint(1, vocab_size, (length,), generator=generator).tolist()
        for length in (longest, max(_LEAST_CHECKED_TOKENS, longest // 2))
    )
    with attention.own_attention("eager"), torch.inference_mode():
        logits = [
            model(
                input_ids=torch.tensor([ids], device=model.device),
                use_cache=False,
                **logits_to_keep(model, 1),
            ).logits[0, -1]
            for ids in prompts
        ]
    return EagerAnswers(prompts, torch.stack(logits).float())


def check_against_eager(
    model: PreTrainedModel,
    attention: RaggedAttention,
    backend: AttentionBackend[Any],
    specs: Sequence[LayerSpec],
    answers: EagerAnswers,
    block_size: int,
) -> None:
    """Compare the model's own answers with those of packed sequences, in chunks, over pages.

    Logits, not tokens: a wrong model may still choose the same token by luck.

    Raises:
        UnsupportedModel: they differ by more than rounding.
    """
    want = answers.logits
    got = _packed_logits(model, attention, backend, specs, answers.prompts, block_size).float()
    spread = float(want.std(dim=-1).max())
    # A tensor's max keeps a NaN, so that it is refused too.
    worst = float((got - want).abs().mean(dim=-1).max())
    # Rounding moves logits by a few of the dtype's last places (SmolLM2 in bfloat16: 0.09 of their
    # spread, about as far as transformers' own eager and sdpa are apart); a wrong mask moves them
    # by about their spread.
    tolerance = max(1e-3, 32 * torch.finfo(model.dtype).eps) * max(spread, 1e-6)
    if not worst <= tolerance:
        raise _refuse(
            model.config,
            f"its packed logits differ from its own by {worst:.3g} on average, where rounding "
            f"allows {tolerance:.3g}",
        )


def _packed_logits(
    model: PreTrainedModel,
    attention: RaggedAttention,
    backend: AttentionBackend[Any],
    specs: Sequence[LayerSpec],
    prompts: Sequence[list[int]],
    block_size: int,
) -> Tensor:
    """[num_prompts, vocab_size] last logits, each prompt in three pieces: a third, the rest but
    one token, and that one as a decode.
    """
    num_blocks = [-(-len(ids) // block_size) for ids in prompts]
    cache = PagedKVCache(specs, 1 + sum(num_blocks), block_size, model.dtype, model.device)
    forward = PackedForward(model, attention, backend, specs, cache)
    # Tables run backwards, so that reading pages in the pool's order would be noticed.
    free = iter(range(sum(num_blocks), 0, -1))
    tables = [[next(free) for _ in range(count)] for count in num_blocks]
    requests = [_check_request(index, ids) for index, ids in enumerate(prompts)]
    cuts = [(0, len(ids) // 3, len(ids) - 1, len(ids)) for ids in prompts]
    with torch.inference_mode():
        for piece in range(3):
            rows = [
                _check_row(request, table, cut[piece], cut[piece + 1])
                for request, table, cut in zip(requests, tables, cuts, strict=True)
            ]
            packed = forward.run(rows)
    return packed.logits


def _check_request(index: int, token_ids: list[int]) -> Request:
    return Request(
        request_id=f"self-check-{index}",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(),
        seed=0,
        max_num_tokens=len(token_ids) + 1,
        arrival_s=0.0,
        arrival_index=index,
    )


def _check_row(request: Request, table: list[int], start: int, end: int) -> ScheduledRequest:
    return ScheduledRequest(
        request=request,
        num_computed_tokens=start,
        num_scheduled_tokens=end - start,
        block_table=table,
        samples_token=end == request.num_tokens,
        reason=ChunkReason.CONTINUED,
        is_forced=False,
    )
