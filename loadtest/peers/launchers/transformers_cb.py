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
    completions,
    new_venv,
    weight_bytes,
)

NAME = "transformers"
VERSION = "5.24.0"
NUM_BLOCKS = 512


def _command(place: Place) -> Path:
    return place.peer_dir(NAME) / "bin" / "transformers"


def _launch(place: Place, port: int) -> Launch:
    flags = {
        "--device": "cpu",
        "--dtype": "bfloat16",
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
        dtype="bfloat16",
        weight_bytes=weight_bytes(place.model_dir, BYTES_PER_WEIGHT["bfloat16"]),
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(place.num_threads)},
        has_token_ids=False,
    )


TRANSFORMERS = Peer(
    NAME,
    f"transformers {VERSION}, continuous batching",
    lambda place: (_command(place),),
    _launch,
    lambda place: new_venv(
        place.peer_dir(NAME), "torch==2.13.0", f"transformers[serving]=={VERSION}"
    ),
)
