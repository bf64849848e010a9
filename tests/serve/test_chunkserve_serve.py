"""`chunkserve serve`, as `make serve` starts it: with Ray's fast settings, and drained at the
end.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import command, free_port, small_config, started, wait_until

pytestmark = pytest.mark.serve


def test_sigterm_lets_a_running_stream_end(tmp_path: Path) -> None:
    """A stop of the service must not cut streams: Ray's own `serve run` aborts on SIGTERM."""
    port = free_port()
    config = small_config(tmp_path, 8000)
    with started(
        [command("chunkserve"), "serve", str(config), "--port", str(port)], port, tmp_path
    ) as service:
        stream = service.client.completions.create(
            model="SmolLM2-135M-Instruct.Q4_1",
            prompt="Once upon a time",
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        next(chunks)
        service.process.send_signal(signal.SIGTERM)
        reasons: list[str | None] = []
        reading = threading.Thread(
            target=lambda: reasons.extend(chunk.choices[0].finish_reason for chunk in chunks)
        )
        reading.start()
        reading.join(timeout=120)
        assert reasons[-1] == "length"
        wait_until(lambda: service.process.poll() is not None, 90, "the service has ended")
        assert service.process.returncode == 0


def test_a_misspelled_key_is_refused_at_the_start(tmp_path: Path) -> None:
    """Serve ignores keys it does not know; a start of ours names the nearest known one."""
    config = small_config(tmp_path, 8000)
    config.write_text(config.read_text().replace("import_path:", "import_pth:"))
    ended = subprocess.run(
        [command("chunkserve"), "serve", str(config)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "import_path" in ended.stderr
