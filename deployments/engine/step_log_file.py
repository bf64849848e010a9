"""The shapes and times of an engine's steps as lines of JSON, to fit a cost model to.

Owns the file and its bound. What the figures mean is the cost model's business.

    {"num_decodes": 3, "decode_context_tokens": 412, "prefills": [[512, 1024]], "step_s": 0.0318}

`prefills` holds, of each prompt chunk, its new tokens and how many were computed before. `step_s`
is the whole step: an engine schedules and books while the device waits.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from deployments.engine.stats import EngineObserver, StepStats
from deployments.protocol import FinishReason, RequestTimings

logger = logging.getLogger(__name__)

MAX_STEPS = 200_000
"""Then the file is complete, at some 20 MB: enough for any fit."""


class StepLogFile(EngineObserver):
    """Writes each step of an engine to a file, up to `max_steps`.

    A file that cannot be written is given up with one line in the log: an engine goes on.

    Args:
        path: is replaced if it is there; its folder is made.
        max_steps: how many are written.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, max_steps: int = MAX_STEPS) -> None:
        self._num_left = max_steps
        path.parent.mkdir(parents=True, exist_ok=True)
        # By lines, so that what is written can be read while the engine runs.
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def on_step(self, step: StepStats) -> None:
        """See EngineObserver."""
        if self._num_left == 0:
            return
        self._num_left -= 1
        record = {
            "num_decodes": step.num_decode_tokens,
            "decode_context_tokens": step.decodes.num_context_tokens,
            "prefills": [(chunk.num_tokens, chunk.start) for chunk in step.prefills],
            "step_s": step.schedule_s + step.execute_s + step.update_s,
        }
        try:
            self._file.write(json.dumps(record) + "\n")
            if self._num_left == 0:
                self._file.close()
        except OSError as error:
            self._num_left = 0
            logger.error("the log of steps ends here: %s", error)

    def on_failed_step(self) -> None:
        """A failed step has no time."""

    def on_end(self, reason: FinishReason, timings: RequestTimings) -> None:
        """Ends are no steps."""
