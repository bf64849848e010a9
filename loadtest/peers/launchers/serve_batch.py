"""Ray Serve with @serve.batch and generate: what one writes oneself in an afternoon.

Needs no environment of its own: it runs in ours.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from loadtest.peers.launch import (
    BYTES_PER_WEIGHT,
    Launch,
    LogLine,
    Peer,
    Place,
    completions,
    weight_bytes,
)

NAME = "serve-batch"
APP = "loadtest.peers.apps.serve_batch_app"


def _launch(place: Place, port: int) -> Launch:
    dtype = "float32"  # on processors without bfloat16 products the faster one by far
    command = (sys.executable, "-m", APP, str(place.model_dir), str(port), dtype)
    return Launch(
        command=(*command, str(place.num_threads)),
        target=replace(completions(port, "m"), has_running_usage=False),
        ready=LogLine("serving on"),
        dtype=dtype,
        weight_bytes=weight_bytes(place.model_dir, BYTES_PER_WEIGHT[dtype]),
        # As ours: Ray's workers give way to all other programs unless told not to.
        env={"RAY_worker_niceness": "0"},
    )


SERVE_BATCH = Peer(
    NAME,
    "Ray Serve with @serve.batch (16, 50 ms) and generate; no streams",
    lambda place: (),
    _launch,
    lambda place: (),
)
