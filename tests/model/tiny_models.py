"""Tiny random models of many families in fp32, and an engine over one of them that records what it
sampled from.

Weights are large enough that logits differ widely from token to token and from context to context,
and that attention looks where it wants instead of everywhere alike: a wrong key changes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from doubles import Outcome, run_until_done
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from deployments.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    ServiceConfig,
)
from deployments.engine.block_pool import BlockPool
from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import ModelOutput
from deployments.engine.request import Request
from deployments.engine.scheduler import Scheduler
from deployments.engine.step_budget import FixedBudget, ShrinkingBudget
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_loader import LoadedModel
from deployments.protocol import GenerateRequest, SamplingParams

VOCAB_SIZE = 131
MAX_MODEL_LEN = 256
BLOCK_SIZE = 8
WINDOW = 12
WHOLE = 4096
"""A chunk size or budget that no prompt here reaches."""

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {"query_pre_attn_scalar": 12, "sliding_window": WINDOW, "layer_types": _MIXED}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma3": {"model_type": "gemma3_text", **_GEMMA},
    "gemma2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 8.0,
        **_GEMMA,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": MAX_MODEL_LEN,
        "n_inner": 64,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
    },
}


def make_model(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    """A random model of this family, the same at each call; `settings` are fields of its config."""
    fields = {**_COMMON, **FAMILIES[family], **settings}
    if family == "gpt2":
        for name in ("hidden_size", "head_dim", "num_hidden_layers", "num_attention_heads"):
            fields.pop(name)
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif "norm" not in name and "ln_" not in name and name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval().requires_grad_(False)


def load(model: PreTrainedModel, eos_token_ids: Sequence[int] = ()) -> LoadedModel:
    """A model as the loader would hand it over."""
    return LoadedModel(
        model=model,
        max_model_len=min(MAX_MODEL_LEN, model.config.max_position_embeddings),
        vocab_size=model.config.vocab_size,
        eos_token_ids=frozenset(eos_token_ids),
        tokenizer_files={},
    )


def make_executor(
    model: PreTrainedModel,
    *,
    num_blocks: int = 128,
    block_size: int = BLOCK_SIZE,
    eos_token_ids: Sequence[int] = (),
    quantization: str = "none",
    **execution: Any,
) -> ModelExecutor:
    """An executor over a model; `execution` are fields of ExecutionConfig."""
    config = ServiceConfig(
        model=ModelConfig(quantization=quantization),
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
        execution=ExecutionConfig(device="cpu", **execution),
    )
    return ModelExecutor(load(model, eos_token_ids), config)


def make_prompt(length: int, variant: int = 0, vocab_size: int = VOCAB_SIZE) -> tuple[int, ...]:
    """A random prompt, the same at each call; those of one variant share no prefix by intent."""
    generator = torch.Generator().manual_seed(1000 * variant + length)
    return tuple(torch.randint(1, vocab_size, (length,), generator=generator).tolist())


# --- an engine that remembers ---------------------------------------------------------------------


class RecordingSampler:
    """Keeps the logits each request was sampled from; passes everything on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logits: dict[str, list[Tensor]] = {}

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> ModelOutput:
        for row, request in zip(logits, requests, strict=True):
            self.logits.setdefault(request.request_id, []).append(row.float().clone())
        return self.inner.sample(logits, requests)


@dataclass
class Run:
    """What an engine made of some requests."""

    outcomes: dict[str, Outcome]
    logits: dict[str, Tensor]
    """[num_output_tokens, vocab_size] by request"""
    num_preemptions: int
    num_mixed_steps: int
    """Steps that held decodes and prefill chunks at once."""
    engine: Engine = field(repr=False)

    def tokens(self, request_id: str) -> list[int]:
        return self.outcomes[request_id].token_ids


def make_engine(
    executor: ModelExecutor,
    *,
    budget: int = WHOLE,
    enable_prefix_caching: bool = True,
    **settings: Any,
) -> Engine:
    """An engine whose steps hold at most `budget` tokens, fewer even than a config allows."""
    defaults = {"chunk_size": 64, "overlap_ratio": 0.0, "max_num_seqs": 4}
    config = SchedulerConfig(**{**defaults, **settings})
    limits = executor.limits
    kv = KVCacheManager(BlockPool(limits.num_blocks), limits.block_size, enable_prefix_caching)
    clock = VirtualClock()
    shrinking = ShrinkingBudget(FixedBudget(budget))
    return Engine(Scheduler(config, limits, kv, shrinking, clock), executor, clock, shrinking)


def run(
    executor: ModelExecutor,
    requests: Sequence[GenerateRequest],
    before_step: Callable[[Engine, int], None] = lambda engine, step: None,
    engine: Engine | None = None,
    **settings: Any,
) -> Run:
    """Run requests to their end, in an engine of their own unless one is given."""
    engine = engine or make_engine(executor, **settings)
    steps_before = engine.step_log.num_steps
    recorder = RecordingSampler(executor._sampler)
    executor._sampler = recorder
    try:
        for request in requests:
            engine.add(request)
        outcomes = run_until_done(engine, lambda step: before_step(engine, step))
    finally:
        executor._sampler = recorder.inner
    steps = [step for step in engine.step_log.steps if step.index >= steps_before]
    return Run(
        outcomes=outcomes,
        logits={name: torch.stack(rows) for name, rows in recorder.logits.items()},
        num_preemptions=sum(step.num_preempted for step in steps),
        num_mixed_steps=sum(
            step.num_decode_tokens > 0 and step.num_prefill_tokens > 0 for step in steps
        ),
        engine=engine,
    )


def greedy(
    prompt: Sequence[int], request_id: str, max_tokens: int = 5, **params: Any
) -> GenerateRequest:
    """A greedy request; `priority` goes to the request, the rest to its sampling."""
    priority = params.pop("priority", 0)
    fields = {"temperature": 0.0, "max_tokens": max_tokens, **params}
    return GenerateRequest(request_id, tuple(prompt), SamplingParams(**fields), priority=priority)


# --- the oracle -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What transformers' own generate answers, alone and uncut."""

    token_ids: list[int]
    logits: Tensor
    """[num_output_tokens, vocab_size]"""


class Oracle:
    """Greedy `generate` of a model with its own eager attention; remembers what it was asked.

    Args:
        model: of its own, so that nobody replaces its attention meanwhile.
    """

    MIN_GAP = 5e-5
    """Between the two best logits; below it, rounding may choose."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._answers: dict[tuple[tuple[int, ...], int], Answer] = {}

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        key = (tuple(prompt), max_tokens)
        if key not in self._answers:
            self._answers[key] = self._generate(*key)
        return self._answers[key]

    def _generate(self, prompt: tuple[int, ...], max_tokens: int) -> Answer:
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(out.logits).float()
        best = logits.topk(2).values
        assert bool(((best[:, 0] - best[:, 1]) > self.MIN_GAP).all()), "a near-tie: no oracle"
        return Answer(out.sequences[0, len(prompt) :].tolist(), logits)


def assert_same(run_: Run, request: GenerateRequest, oracle: Oracle, atol: float = 4e-5) -> None:
    """A request's tokens and logits are the oracle's."""
    max_tokens = request.sampling_params.max_tokens
    want = oracle.answer(request.prompt_token_ids, max_tokens)
    got = run_.logits[request.request_id]
    assert run_.tokens(request.request_id) == want.token_ids, request.request_id
    assert got.shape == want.logits.shape
    worst = float((got - want.logits).abs().max())
    assert worst <= atol, f"{request.request_id}: logits differ by {worst}"
