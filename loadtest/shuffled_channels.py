"""The same function in other channels: a model whose hidden channels change places.

A checkpoint that was once quantised in groups of neighbouring weights (GGUF) stands on the grid of
those groups: quantised a second time in the same groups it loses nothing, which says nothing of
other checkpoints. With its channels shuffled a model computes what it did, but each group holds
weights of many old ones, as far from a common grid as any.

    residual stream     one permutation of all norms, of inputs of q, k, v, gate, up and the head,
                        of outputs of the embedding, o and down
    each MLP            one of the outputs of gate and up and the inputs of down
    each attention      one of the values' channels within a head: outputs of v, inputs of o
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_RESIDUAL_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
_NORMS = {"input_layernorm", "post_attention_layernorm"}
_LAYER_PARTS = {
    *(f"{name}.weight" for name in (*_RESIDUAL_INPUTS, *_MLP_INPUTS, *_NORMS)),
    "self_attn.o_proj.weight",
    "mlp.down_proj.weight",
}


def can_shuffle(model: Any) -> bool:
    """Whether the model has the shape of Llama, whose channels are known here."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    return layers is not None and all(
        {name for name, _ in layer.named_parameters()} == _LAYER_PARTS for layer in layers
    )


def shuffle_channels(model: Any, seed: int = 0) -> None:
    """Shuffle the channels of a model that `can_shuffle`, in place."""
    generator = torch.Generator().manual_seed(seed)

    def permutation(size: int) -> Tensor:
        return torch.randperm(size, generator=generator).to(model.device)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    hidden = permutation(embedding.weight.shape[1])
    matrices = [embedding] if head.weight is embedding.weight else [embedding, head]
    for matrix in matrices:
        _take(matrix, hidden, 1)
    _take(model.model.norm, hidden, 0)
    for layer in model.model.layers:
        for name in _NORMS:
            _take(layer.get_submodule(name), hidden, 0)
        for name in (*_RESIDUAL_INPUTS, *_MLP_INPUTS):
            _take(layer.get_submodule(name), hidden, 1)
        for down in (layer.self_attn.o_proj, layer.mlp.down_proj):
            _take(down, hidden, 0)
        inner = permutation(layer.mlp.down_proj.weight.shape[1])
        for name in _MLP_INPUTS:
            _take(layer.get_submodule(name), inner, 0)
        _take(layer.mlp.down_proj, inner, 1)
        channels = permutation(layer.self_attn.head_dim)
        _take(layer.self_attn.v_proj, _in_each_head(layer.self_attn.v_proj, 0, channels), 0)
        _take(layer.self_attn.o_proj, _in_each_head(layer.self_attn.o_proj, 1, channels), 1)


def _in_each_head(matrix: Any, dim: int, channels: Tensor) -> Tensor:
    size = len(channels)
    starts = torch.arange(0, matrix.weight.shape[dim], size, device=channels.device)
    return (starts[:, None] + channels).flatten()


def _take(module: Any, places: Tensor, dim: int) -> None:
    module.weight.data = module.weight.data.index_select(dim, places)
