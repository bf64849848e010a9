"""Two applications without a model on one Serve, for `bench_serve`: ours, and a bare one of its
shape.

    /        our ingress -> our replica: all of the product but the model, which `StubExecutor` is
    /bare    FastAPI -> a replica that counts: what Serve itself costs, nothing checked or tokenized

Both stream from the replica over a gRPC handle, under the settings of `chunkserve serve`. A
composition root like `serve_app.app`, for measurements alone.

    python -m loadtest.stub_app SERVE_CONFIG
"""

# No `from __future__ import annotations`: Serve reads the annotation of `args` as a class.

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import torch
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve import Application

from deployments.builder import build_engines
from deployments.config import ServiceConfig
from deployments.engine.outputs import ModelLimits, ModelOutput, SchedulerOutput
from deployments.engine.request import Request as EngineRequest
from deployments.execution.grammar import NoGrammars
from deployments.execution.model_source import read_tokenizer_files, resolve_model_dir
from deployments.protocol import ModelCard
from deployments.replica import EngineReplica
from loadtest.words import WORDS
from serve_app.app import compose
from serve_app.launch import LocalService
from serve_app.tokenization import Tokenizer

STEP_S = 0.02
"""A step of decodes takes so long; one that has prompt tokens takes no time."""
_LIMITS = ModelLimits(
    max_model_len=8192,
    vocab_size=49_152,
    num_blocks=20_000,
    block_size=16,
    eos_token_ids=frozenset({2}),
)


class StubExecutor:
    """Says WORDS in turns to everybody.

    Args:
        config: names the model whose tokenizer is used.
        step_s: how long a step of decodes takes at least.
    """

    def __init__(self, config: ServiceConfig, step_s: float = STEP_S) -> None:
        self._step_s = step_s
        files = read_tokenizer_files(resolve_model_dir(config.model))
        tokenizer = Tokenizer.from_files(files)
        words = [tokenizer.encode(word, add_special_tokens=False) for word in WORDS]
        self._token_ids = [token_id for (token_id,) in words]
        self._name = config.model.name
        self._files = files
        self._last_s = 0.0
        self.device = torch.device("cpu")
        self.grammars = NoGrammars("a stub has no grammars")

    @property
    def limits(self) -> ModelLimits:
        return _LIMITS

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        if output.num_prefill_tokens == 0:
            time.sleep(max(0.0, self._last_s + self._step_s - time.monotonic()))
            self._last_s = time.monotonic()
        requests = (row.request for row in output.scheduled if row.samples_token)
        return ModelOutput({each.request_id: self._next_token_id(each) for each in requests})

    def _next_token_id(self, request: EngineRequest) -> int:
        num_said = request.num_tokens - request.num_prompt_tokens
        return self._token_ids[num_said % len(WORDS)]

    def model_card(self) -> ModelCard:
        """Of the stub, with the tokenizer of the configured model."""
        return ModelCard(
            name=self._name,
            max_model_len=_LIMITS.max_model_len,
            vocab_size=_LIMITS.vocab_size,
            block_size=_LIMITS.block_size,
            eos_token_ids=tuple(_LIMITS.eos_token_ids),
            tokenizer_files=self._files,
        )


class StubReplica(EngineReplica):
    """Our replica, all of it but the model."""

    @staticmethod
    def load(config: ServiceConfig) -> Any:
        return StubExecutor(config)


def build_app(args: ServiceConfig) -> Application:
    """Our application, with the replica's class replaced."""
    return compose(args, build_engines(args, StubReplica))


class BareReplica:
    """Counts, at the pace of a stub's decodes."""

    async def count(self, num_items: int) -> AsyncGenerator[list[int], None]:
        """So many items, the first at once."""
        for index in range(num_items):
            if index:
                await asyncio.sleep(STEP_S)
            yield [index]


def _body(text: str) -> dict[str, Any]:
    # As large as ours, so that both write as many bytes.
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "SmolLM2-135M-Instruct.Q4_1",
        "choices": [choice],
    }


class BareIngress:
    """JSON in, the replica's items out.

    Args:
        replica: handle of a BareReplica.
    """

    def __init__(self, replica: Any) -> None:
        self._count = replica.options(method_name="count", stream=True, _by_reference=False)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once in every replica."""
        api = FastAPI()

        @api.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            items = self._count.remote(body["max_tokens"])
            if body.get("stream"):
                return StreamingResponse(self._events(items), media_type="text/event-stream")
            return JSONResponse(_body("".join([" time" async for _ in items])))

        return api

    async def _events(self, items: AsyncIterator[list[int]]) -> AsyncIterator[bytes]:
        async for _ in items:
            yield b"data: " + json.dumps(_body(" time"), separators=(",", ":")).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


def build_bare(args: ServiceConfig) -> Application:
    """The bare application, with as many replicas and as much room as ours."""
    replica = serve.deployment(
        name="bare-replica",
        num_replicas=args.pool.num_replicas,
        max_ongoing_requests=args.max_ingress_requests,
        ray_actor_options={"num_cpus": 0},
    )(BareReplica)
    ingress = serve.deployment(
        name="bare-ingress",
        num_replicas=args.ingress.num_replicas,
        max_ongoing_requests=args.max_ingress_requests,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(BareIngress))
    application: Application = ingress.bind(replica.bind())
    return application


if __name__ == "__main__":
    sys.exit(LocalService(yaml.safe_load(Path(sys.argv[1]).read_text())).run())
