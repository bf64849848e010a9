"""ray.serve.llm: vLLM behind Ray Serve, as Ray's documentation sets it up."""

from __future__ import annotations

from pathlib import Path

from loadtest.peers.launch import (
    BYTES_PER_WEIGHT,
    Launch,
    LogLine,
    Peer,
    Place,
    Step,
    completions,
    weight_bytes,
)
from loadtest.peers.launchers.vllm_cpu import environment, install_into

NAME = "ray-serve-llm"
VLLM_VERSION = "0.29.0"
RAY_VERSION = "2.60.0"
APP = Path(__file__).parents[1] / "apps" / "ray_serve_llm_app.py"


def _python(place: Place) -> Path:
    return place.peer_dir(NAME) / "bin" / "python"


def _launch(place: Place, port: int, dtype: str) -> Launch:
    return Launch(
        command=(
            str(_python(place)),
            str(APP),
            str(place.model_dir),
            str(port),
            str(place.max_model_len),
            str(place.budget),
            dtype,
        ),
        target=completions(port, "m"),
        ready=LogLine("serving on"),
        dtype=dtype,
        weight_bytes=weight_bytes(place.model_dir, BYTES_PER_WEIGHT[dtype]),
        env={
            **environment(place.peer_dir(NAME), place.num_threads),
            # Ray gives a worker as many threads as it reserved CPUs, which is one here.
            "OMP_NUM_THREADS": str(place.num_threads),
            # Ray's workers give way to all other programs unless told not to; ours do not either.
            "RAY_worker_niceness": "0",
        },
    )


def _install(place: Place) -> tuple[Step, ...]:
    more = (f"ray[serve]=={RAY_VERSION}", "pyarrow", "jsonref", "pandas")
    return install_into(place.peer_dir(NAME), VLLM_VERSION, *more)


def _peer(name: str, dtype: str) -> Peer:
    return Peer(
        name,
        f"ray.serve.llm {RAY_VERSION} with vLLM {VLLM_VERSION}, {dtype}",
        lambda place: (_python(place),),
        lambda place, port: _launch(place, port, dtype),
        _install,
    )


RAY_SERVE_LLM = _peer(NAME, "bfloat16")
RAY_SERVE_LLM_F32 = _peer(f"{NAME}-f32", "float32")
"""Faster where the processor multiplies no bfloat16."""
