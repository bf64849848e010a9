"""Loads a model for serving: its weights in the right dtype on the right device, and what its
files say of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from deployments.config import ExecutionConfig, ModelConfig
from deployments.execution.load_gate import refuse_unsupported
from deployments.execution.model_source import (
    ModelSourceError,
    read_tokenizer_files,
    resolve_model_dir,
)
from deployments.execution.prepack import multiplies_bfloat16


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what its files say of it."""

    model: PreTrainedModel
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer_files: dict[str, bytes]


def choose_device(execution: ExecutionConfig) -> torch.device:
    """The configured device; auto takes a GPU if there is one.

    Raises:
        ModelSourceError: a GPU is asked for and none is visible.
    """
    if execution.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if execution.device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelSourceError(
            f"execution.device is {execution.device!r}, but no GPU is visible; set it to 'auto' or "
            "'cpu', or check the driver and CUDA_VISIBLE_DEVICES"
        )
    return torch.device(execution.device)


def choose_dtype(
    config: ModelConfig, hf_config: PretrainedConfig, device: torch.device
) -> torch.dtype:
    """The configured dtype; auto as `ModelConfig.dtype` describes it."""
    if config.dtype != "auto":
        named: torch.dtype = getattr(torch, config.dtype)
        return named
    if device.type == "cpu":
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    stored = getattr(hf_config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16


def default_num_threads(root: Path = Path("/")) -> int:
    """One less than the cores this process may use, at least 1: the ingress needs the other. A
    container's quota counts as well, since threads beyond it only stall each other.
    """
    num_cores = len(os.sched_getaffinity(0))
    quota = root / "sys/fs/cgroup/cpu.max"
    if quota.exists():
        allowed_us, _, period_us = quota.read_text().partition(" ")
        if allowed_us != "max":
            num_cores = min(num_cores, int(allowed_us) // int(period_us))
    return max(1, num_cores - 1)


def load_model(config: ModelConfig, execution: ExecutionConfig) -> LoadedModel:
    """Resolve, judge and load a model.

    Raises:
        ModelSourceError: it cannot be had, or its files cannot be read.
        UnsupportedModel: it cannot be served exactly.
    """
    directory = resolve_model_dir(config)
    hf_config = _read_config(directory)
    refuse_unsupported(hf_config, config.max_model_len)
    max_model_len = _max_model_len(config, hf_config)
    device = choose_device(execution)
    model: Any = _read_weights(directory, hf_config, choose_dtype(config, hf_config, device))
    model.to(device).eval().requires_grad_(False)
    vocab_size = int(model.get_input_embeddings().num_embeddings)
    return LoadedModel(
        model=model,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(i for i in _eos_token_ids(model) if 0 <= i < vocab_size),
        tokenizer_files=read_tokenizer_files(directory),
    )


def _read_weights(
    directory: Path, hf_config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=hf_config, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # a damaged file fails in as many ways as there are readers
        raise ModelSourceError(
            f"the weights in {directory} cannot be loaded ({type(error).__name__}: {error})"
        ) from error
    # transformers fills these with random numbers and goes on.
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ModelSourceError(
            f"the weights in {directory} are incomplete: {len(missing)} tensors are missing, "
            f"{missing[0]} the first; fetch or convert the model again"
        )
    return model


def _read_config(directory: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory)
    except Exception as error:  # what config classes raise at odd values is theirs to choose
        raise ModelSourceError(
            f"{directory}/config.json is not a model that transformers knows "
            f"({type(error).__name__}: {error})"
        ) from error
    return config


def _max_model_len(config: ModelConfig, hf_config: PretrainedConfig) -> int:
    text = hf_config.get_text_config()
    own: Any = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if own is None and config.max_model_len is None:
        raise ModelSourceError("this model names no longest context; set model.max_model_len")
    if own is not None and config.max_model_len is not None and config.max_model_len > own:
        raise ModelSourceError(
            f"model.max_model_len is {config.max_model_len}, but the model's own context is {own}; "
            f"set it to at most {own}"
        )
    return int(own if config.max_model_len is None else config.max_model_len)


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, (list, tuple)) else {int(value)}


def _eos_token_ids(model: PreTrainedModel) -> set[int]:
    """Of the generation config, which may name several, and of the model's own; some name ids that
    the vocabulary lacks.
    """
    generation = getattr(model, "generation_config", None)
    ids = _as_ids(getattr(generation, "eos_token_id", None))
    return ids | _as_ids(getattr(model.config.get_text_config(), "eos_token_id", None))
