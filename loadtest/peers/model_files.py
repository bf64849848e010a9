"""The weights that all serve: where they are on this machine, and what ours come to when loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from deployments.config import ModelConfig
from deployments.execution.model_loader import choose_dtype
from deployments.execution.model_source import resolve_model_dir
from loadtest.peers.launch import BYTES_PER_WEIGHT


@dataclass(frozen=True, slots=True)
class Weights:
    """What a service's weights are once loaded.

    Args:
        dtype: for people.
        bytes_per_weight: that a decode step reads.
    """

    dtype: str
    bytes_per_weight: float


def find_model_dir(config: ModelConfig) -> Path:
    """The directory of safetensors, after whatever conversion it takes the first time.

    Raises:
        ModelSourceError: the source names nothing that is there.
    """
    return resolve_model_dir(config)


def weights_of(config: ModelConfig) -> Weights:
    """What this configuration comes to on this machine's CPU."""
    hf_config = AutoConfig.from_pretrained(find_model_dir(config))
    dtype = str(choose_dtype(config, hf_config, torch.device("cpu"))).removeprefix("torch.")
    name = dtype if config.quantization == "none" else config.quantization
    return Weights(name, BYTES_PER_WEIGHT[name])
