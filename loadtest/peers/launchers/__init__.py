"""One module a server: how it is installed, and started with the best flags its makers publish."""

from __future__ import annotations

from collections.abc import Mapping

from loadtest.peers.launch import Peer
from loadtest.peers.launchers import (
    llama_cpp,
    ray_serve_llm,
    serve_batch,
    transformers_cb,
    vllm_cpu,
)

__all__ = ["PEERS"]

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        vllm_cpu.VLLM,
        vllm_cpu.VLLM_F32,
        llama_cpp.LLAMA_BF16,
        llama_cpp.LLAMA_Q4,
        transformers_cb.TRANSFORMERS,
        transformers_cb.TRANSFORMERS_F32,
        ray_serve_llm.RAY_SERVE_LLM,
        ray_serve_llm.RAY_SERVE_LLM_F32,
        serve_batch.SERVE_BATCH,
    )
}
