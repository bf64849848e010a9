"""Our engine alone in a process: requests come in on its input, token times go out on its output.

    python -m loadtest.peers.engine_child CONFIG_JSON
    > {"ready": true}
    < {"requests": [[[1, 2, 3], 128], ...], "max_concurrency": 16}
    > {"requests": [[sent_s, [token_s, ...]], ...]}            by time.monotonic()

What HTTP, Ray and streaming cost is the difference between this and the whole service.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

from deployments.config import ServiceConfig
from deployments.engine.clock import WallClock
from deployments.engine.engine import Engine
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.startup import made_to_stay
from deployments.protocol import GenerateRequest, SamplingParams

Times = tuple[float, list[float]]
"""When a request was given to the engine, and when each of its tokens was there."""


class EngineLoop:
    """Runs batches of requests to their ends, so many at a time.

    Args:
        engine: that runs them; it has no other requests.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_added = 0

    def run(
        self, requests: Sequence[tuple[Sequence[int], int]], max_concurrency: int
    ) -> list[Times]:
        """Token ids and numbers of output tokens in; their times out, in the same order."""
        waiting = deque(enumerate(requests))
        times: list[Times] = [(0.0, []) for _ in requests]
        places: dict[str, int] = {}
        while waiting or places:
            while waiting and len(places) < max_concurrency:
                place, (prompt, max_tokens) = waiting.popleft()
                places[self._add(prompt, max_tokens)] = place
                times[place] = (time.monotonic(), [])
            outputs = self._engine.step()
            now_s = time.monotonic()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(f"the engine failed a request: {output.error.message}")
                if output.token_id is not None:
                    times[places[output.request_id]][1].append(now_s)
                if output.finish_reason is not None:
                    del places[output.request_id]
        return times

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        self._num_added += 1
        request_id = f"alone-{self._num_added}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(GenerateRequest(request_id, tuple(prompt), params))
        return request_id


def serve(loop: EngineLoop, lines: IO[str], answers: IO[str]) -> None:
    """Answer each line until there are no more."""
    for line in lines:
        asked = json.loads(line)
        times = loop.run(asked["requests"], asked["max_concurrency"] or len(asked["requests"]))
        _tell(answers, {"requests": times})


def _tell(answers: IO[str], data: dict[str, Any]) -> None:
    answers.write(json.dumps(data) + "\n")
    answers.flush()


def main() -> int:
    """Load the model, then answer."""
    config = ServiceConfig.model_validate_json(sys.argv[1])
    # What libraries print is not part of the conversation.
    answers, sys.stdout = sys.stdout, sys.stderr
    with made_to_stay():
        executor = ModelExecutor.load(config)
    engine = Engine.build(config.scheduler, config.cache, executor, WallClock())
    _tell(answers, {"ready": True})
    serve(EngineLoop(engine), sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
