"""Our own service, as `chunkserve serve` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from loadtest.peers.launch import Launch, LogLine, Place, completions, weight_bytes

NAME = "chunkserve"
SERVED_NAME = "m"


def launch(place: Place, port: int, config: Path, dtype: str, bytes_per_weight: float) -> Launch:
    """Describe its start on a port.

    Args:
        place: of the weights.
        port: where it listens.
        config: the file to serve; it names the model SERVED_NAME.
        dtype: that its weights come to, for people.
        bytes_per_weight: that a decode step reads.
    """
    command = (sys.executable, "-m", "serve_app.cli", "serve", str(config), "--port", str(port))
    return Launch(
        command=command,
        target=completions(port, SERVED_NAME),
        # Its own word, not the first good answer: its proxy may start anew before that.
        ready=LogLine("ready: "),
        dtype=dtype,
        weight_bytes=weight_bytes(place.model_dir, bytes_per_weight),
    )
