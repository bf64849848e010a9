"""Our own service, as `chunkserve serve` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from loadtest.peers.launch import Launch, LogLine, completions
from loadtest.peers.model_files import Weights

NAME = "chunkserve"
SERVED_NAME = "m"


def launch(port: int, config: Path, weights: Weights) -> Launch:
    """Describe its start on a port.

    Args:
        port: where it listens.
        config: the file to serve; it names the model SERVED_NAME.
        weights: what they come to.
    """
    command = (sys.executable, "-m", "serve_app.cli", "serve", str(config), "--port", str(port))
    return Launch(
        command=command,
        target=completions(port, SERVED_NAME),
        # Its own word, not the first good answer: its proxy may start anew before that.
        ready=LogLine("ready: "),
        dtype=weights.dtype,
        weight_bytes=weights.num_bytes,
    )
