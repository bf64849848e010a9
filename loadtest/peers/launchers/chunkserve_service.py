"""Our own service, as `chunkserve serve` starts it."""

from __future__ import annotations

import sys

from loadtest.peers.launch import (
    BYTES_PER_WEIGHT,
    Launch,
    LogLine,
    Place,
    completions,
    weight_bytes,
)

NAME = "chunkserve"


def launch(place: Place, port: int, dtype: str) -> Launch:
    """Describe its start on a port.

    Args:
        place: its `config` is already the one to serve.
        port: where it listens.
        dtype: that its weights come to.
    """
    command = (sys.executable, "-m", "serve_app.cli", "serve", str(place.config))
    return Launch(
        command=(*command, "--port", str(port)),
        target=completions(port, place.model_dir.name),
        # Its own word, not the first good answer: its proxy may start anew before that.
        ready=LogLine("ready: "),
        dtype=dtype,
        weight_bytes=weight_bytes(place.model_dir, BYTES_PER_WEIGHT[dtype]),
    )
