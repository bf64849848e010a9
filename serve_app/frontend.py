"""What the routes do: prepare -> generate -> answer, over a backend.

Owns the life of an HTTP request that generates. Every token stream is closed explicitly whichever
way it ends: finished, failed, stopped, timed out or abandoned. Does not know paths or schemas
(`routes` does).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator

import orjson
from fastapi import Request
from fastapi.responses import Response

from deployments.config import ServiceConfig
from deployments.protocol import RequestRefused
from serve_app.answers import (
    AnswerHead,
    AnswerShape,
    ChatShape,
    CompletionShape,
    TokenNames,
    events,
)
from serve_app.api_models import CompletionRequest, GenerationRequest
from serve_app.asgi import EventStream, until_disconnect
from serve_app.backend import Backend
from serve_app.chat_models import ChatCompletionRequest
from serve_app.choices import Answer, collect
from serve_app.chunker import Chunker, ChunkResponse, chunk_sizes
from serve_app.errors import from_info
from serve_app.gate import Arrival, Gate
from serve_app.intake import Intake, PreparedCall, PreparedRequest
from serve_app.metrics import metrics_response
from serve_app.served_model import ServedModel
from serve_app.streaming import TextDelta, TextStream, with_tool_calls
from serve_app.text_models import (
    ChunkRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


class Frontend:
    """What the routes share: the backend, the chunker, and the model, asked for once.

    Args:
        backend: serves token ids.
        config: how prompts are cut, and the defaults of requests.
        gate: what requests pass before they run.
    """

    def __init__(self, backend: Backend, config: ServiceConfig, gate: Gate) -> None:
        self.backend = backend
        self._gate = gate
        self.started_at = int(time.time())
        self._default_priority = config.ingress.default_priority
        self._slow_reader_timeout_s = config.ingress.slow_reader_timeout_s
        sizes = chunk_sizes(config.scheduler, config.ingress.adaptive_chunk_size)
        self._chunker = Chunker(config.scheduler, sizes)
        self._model: ServedModel | None = None
        self._model_lock = asyncio.Lock()

    async def model(self) -> ServedModel:
        """The served model.

        Raises:
            BackendUnavailable: no replica can say yet; the next call asks again.
        """
        async with self._model_lock:
            if self._model is None:
                card = await self.backend.model_card()
                self._model = await asyncio.to_thread(ServedModel.from_card, card)
            return self._model

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """POST /v1/completions."""
        arrival = await self._gate.enter(request.scope, body)
        model = await self.model()
        prepared = await self._intake(model).completion(body)
        call = self._gate.bound(arrival, prepared, "prompt")
        shape = CompletionShape(_names(model, body))
        return await self._answer(request, arrival, call, shape, _head("cmpl", model, body))

    async def chat(self, request: Request, body: ChatCompletionRequest) -> Response:
        """POST /v1/chat/completions."""
        arrival = await self._gate.enter(request.scope, body)
        model = await self.model()
        prepared = await self._intake(model).chat(body)
        call = self._gate.bound(arrival, prepared, "messages")
        shape = ChatShape(_names(model, body))
        return await self._answer(request, arrival, call, shape, _head("chatcmpl", model, body))

    async def metrics(self) -> Response:
        """GET /metrics."""
        return await metrics_response(self._gate.metrics, self.backend)

    async def tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        """POST /tokenize."""
        model = await self.model()
        model.check_name(body.model)
        return await asyncio.to_thread(_tokenize, model, body)

    async def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        """POST /detokenize."""
        model = await self.model()
        model.check_name(body.model)
        model.check_token_ids(body.tokens, "tokens")
        return DetokenizeResponse(prompt=await model.tokenizer.decode_async(body.tokens))

    async def chunks(self, body: ChunkRequest) -> ChunkResponse:
        """POST /chunk."""
        model = await self.model()
        model.check_name(body.model)
        return await asyncio.to_thread(self._chunks, model, body)

    def _chunks(self, model: ServedModel, body: ChunkRequest) -> ChunkResponse:
        context = model.card.max_model_len
        if body.chunk_size is not None and body.chunk_size > context:
            message = (
                f"chunk_size is {body.chunk_size}, but the model's context is {context} tokens"
            )
            raise RequestRefused.invalid("chunk_size", message)
        encoded = model.tokenizer.encode_with_offsets(body.prompt)
        if not encoded.token_ids:
            raise RequestRefused.invalid(
                "prompt", "prompt is empty: it must hold at least one token"
            )
        return self._chunker.describe(body.prompt, encoded, body.chunk_size, body.overlap_ratio)

    def _intake(self, model: ServedModel) -> Intake:
        return Intake(model, self._chunker, self._default_priority)

    async def _answer(
        self,
        request: Request,
        arrival: Arrival,
        call: PreparedCall,
        shape: AnswerShape,
        head: AnswerHead,
    ) -> Response:
        """The one place where a whole HTTP request is known and nothing of it runs yet. Its one end
        is `Answer.aclose`.
        """
        passage = await self._gate.admit(arrival, call)
        choices = [
            self._gate.watch(arrival, passage, index, prepared, self._deltas(prepared))
            for index, prepared in enumerate(call.requests)
        ]
        deadline = None if call.timeout_s is None else arrival.at_s + call.timeout_s
        answer = Answer(
            choices, call.prompt_lengths, deadline, call.client_names, on_end=passage.release
        )
        try:
            if not head.is_streamed:
                whole = await until_disconnect(request, collect(answer))
                _raise_error(whole[0])
                body = shape.whole(head, whole, answer.usage)
                await answer.aclose()
                return Response(orjson.dumps(body), media_type="application/json")
            # Awaited before the response starts, so that a refusal is a real HTTP status in a
            # stream, too.
            first = await until_disconnect(request, anext(answer))
            _raise_error(first.delta)
            return EventStream(
                events(shape, head, first, answer), answer, self._slow_reader_timeout_s
            )
        except BaseException:
            await answer.aclose()
            raise

    def _deltas(self, prepared: PreparedRequest) -> AsyncGenerator[TextDelta, None]:
        tokens = self.backend.generate(prepared.generate)
        deltas = TextStream(tokens, prepared.detokenizer, prepared.rules).deltas()
        parser = prepared.tool_parser
        return deltas if parser is None else with_tool_calls(deltas, parser)


def _names(model: ServedModel, body: GenerationRequest) -> TokenNames | None:
    if body.num_logprobs is None:
        return None
    return TokenNames(model.tokenizer, body.skips_special_tokens)


def _head(prefix: str, model: ServedModel, body: GenerationRequest) -> AnswerHead:
    return AnswerHead(
        answer_id=f"{prefix}-{uuid.uuid4().hex}",
        model=model.card.name,
        created=int(time.time()),
        is_streamed=bool(body.stream),
        includes_usage=body.includes_usage,
        includes_usage_so_far=body.includes_usage_so_far,
    )


def _raise_error(delta: TextDelta) -> None:
    if delta.error is not None:
        raise from_info(delta.error)


def _tokenize(model: ServedModel, body: TokenizeRequest) -> TokenizeResponse:
    tokenizer, conversation = model.tokenizer, body.conversation()
    if conversation is None:
        ids = tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
    else:
        messages = [message.for_template() for message in conversation.messages]
        ids = tokenizer.apply_chat_template(
            messages, conversation.options(), bool(body.add_special_tokens)
        )
    return TokenizeResponse(
        count=len(ids),
        max_model_len=model.card.max_model_len,
        tokens=ids,
        token_strs=[tokenizer.entry(token_id) for token_id in ids]
        if body.return_token_strs
        else None,
    )
