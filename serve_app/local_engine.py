"""An engine in this process, without Ray or HTTP: what `chunkserve generate` talks to."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from deployments.config import ServiceConfig
from deployments.engine.clock import WallClock
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import EngineThread
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.startup import call_apart
from deployments.protocol import GenerateRequest, SamplingParams
from serve_app.detokenizer import IncrementalDetokenizer
from serve_app.streaming import TextDelta, TextStream
from serve_app.tokenization import Tokenizer


class LocalEngine:
    """A model, its scheduler and its tokenizer.

    Args:
        config: of the service this stands in for; loading blocks.

    Raises:
        ModelSourceError, UnsupportedModel, OutOfMemory: the model cannot be served; says why.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._executor = call_apart(lambda: ModelExecutor.load(config))
        clock = WallClock()
        self.engine = Engine.build(config.scheduler, config.cache, self._executor, clock)
        self._thread = EngineThread(self.engine, clock, stuck_after_s=config.pool.stuck_after_s)
        self._thread.start()
        self.tokenizer = Tokenizer.from_files(self._executor.model_card().tokenizer_files)

    def close(self) -> None:
        """End the engine; what runs ends with an error."""
        self._thread.stop()

    def encode_chat(self, text: str) -> list[int]:
        """The prompt of a chat's first message."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages)

    async def stream(
        self, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TextDelta, None]:
        """The text of one request as it comes."""
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling_params=params,
            arrival_time=time.time(),
        )
        detokenizer = IncrementalDetokenizer(self.tokenizer, prompt_token_ids)
        stream = TextStream(self._thread.generate(request), detokenizer)
        deltas = stream.deltas()
        try:
            async for delta in deltas:
                yield delta
        finally:
            await deltas.aclose()
