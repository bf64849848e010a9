"""The weights that all serve: where they are on this machine, and what ours come to when loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from deployments.config import ModelConfig
from deployments.execution.model_loader import choose_dtype
from deployments.execution.model_source import resolve_model_dir
from deployments.execution.quantized_weight import GROUP
from loadtest.peers.launch import BYTES_PER_WEIGHT, weight_bytes

BITS_OF_FORM = {8: 8.5, 4: 5.0}
"""A weight with its share of a group's scale, and of its centre where it has one."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a service's weights are once loaded.

    Args:
        dtype: for people.
        num_bytes: that a decode step reads.
    """

    dtype: str
    num_bytes: float


def find_model_dir(config: ModelConfig) -> Path:
    """The directory of safetensors, after whatever conversion it takes the first time.

    Raises:
        ModelSourceError: the source names nothing that is there.
    """
    return resolve_model_dir(config)


def weights_of(config: ModelConfig) -> Weights:
    """What this configuration comes to on this machine's CPU."""
    model_dir = find_model_dir(config)
    hf_config = AutoConfig.from_pretrained(model_dir)
    if config.quantization != "none":
        return Weights(config.quantization, quantized_bytes(hf_config, config.quantization))
    dtype = str(choose_dtype(config, hf_config, torch.device("cpu"))).removeprefix("torch.")
    return Weights(dtype, weight_bytes(model_dir, BYTES_PER_WEIGHT[dtype]))


def quantized_bytes(hf_config: Any, quantization: str) -> float:
    """Codes, scales and centres of all linear layers: what one decode step reads of a quantised
    model. The embedding is looked up, and norms are nothing beside the rest.

    Args:
        hf_config: of the model; no weights are loaded.
        quantization: "int8" or "int4", as `model.quantization`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    return sum(_bytes_of(layer, layer is head, quantization) for layer in linears)


def _bytes_of(layer: nn.Linear, is_head: bool, quantization: str) -> float:
    # The head and layers that narrow keep 8 bits, whatever the others have.
    narrows = layer.out_features < layer.in_features
    num_bits = 8 if quantization == "int8" or is_head or narrows else 4
    num_groups = -(-layer.in_features // GROUP)
    return layer.out_features * num_groups * GROUP * BITS_OF_FORM[num_bits] / 8
