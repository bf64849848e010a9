"""transformers' own server with its continuous batching."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from loadtest.peers.launch import (
    BYTES_PER_WEIGHT,
    HealthPage,
    Launch,
    Peer,
    Place,
    Step,
    completions,
    new_venv,
    weight_bytes,
)

NAME = "transformers"
VERSION = "5.24.0"
NUM_BLOCKS = 128
"""Of 256 tokens each: twice what any workload holds, and all services share the memory."""


def _command(place: Place) -> Path:
    return place.peer_dir(NAME) / "bin" / "transformers"


def _launch(place: Place, port: int, dtype: str) -> Launch:
    flags = {
        "--device": "cpu",
        "--dtype": dtype,
        "--cb-max-batch-tokens": str(place.budget),
        "--cb-num-blocks": str(NUM_BLOCKS),
        "--attn-implementation": "sdpa",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    # It knows no `ignore_eos`: no token has the number that ends an answer.
    generation = {"eos_token_id": -1, "pad_token_id": 0, "do_sample": False}
    target = completions(port, str(place.model_dir), generation_config=json.dumps(generation))
    return Launch(
        command=(
            str(_command(place)),
            "serve",
            str(place.model_dir),
            "--continuous-batching",
            *(word for flag in flags.items() for word in flag),
        ),
        # Strict about the fields of a request.
        target=replace(target, ignores_eos=False, has_running_usage=False),
        ready=HealthPage("/health"),
        dtype=dtype,
        weight_bytes=weight_bytes(place.model_dir, BYTES_PER_WEIGHT[dtype]),
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(place.num_threads)},
        has_token_ids=False,
    )


def _install(place: Place) -> tuple[Step, ...]:
    packages = ("torch==2.13.0", f"transformers[serving]=={VERSION}")
    return new_venv(place.peer_dir(NAME), *packages)


def _peer(name: str, dtype: str) -> Peer:
    return Peer(
        name,
        f"transformers {VERSION}, continuous batching, {dtype}",
        lambda place: (_command(place),),
        lambda place, port: _launch(place, port, dtype),
        _install,
    )


TRANSFORMERS = _peer(NAME, "bfloat16")
TRANSFORMERS_F32 = _peer(f"{NAME}-f32", "float32")
"""Faster where the processor multiplies no bfloat16."""
