"""Doubles for tests of the ingress: a tokenizer of 256 bytes and a few merges, and a backend that
follows a script.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.testclient import TestClient
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from deployments.config import ServiceConfig
from deployments.protocol import (
    EngineStats,
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    ModelCard,
    ReplicaMetrics,
    TokenChunk,
    TokenLogprobs,
)
from serve_app.errors import BackendUnavailable
from serve_app.ingress import make_api
from serve_app.metrics import PoolMetrics
from serve_app.tokenization import Tokenizer

MERGES = [
    ("Ġ", "t"), ("i", "m"), ("im", "e"), ("Ġt", "ime"),  # " time"
    ("A", "B"), ("C", "D"), ("CD", "E"),  # a stop string may begin and end within these
    ("l", "l"), ("h", "e"), ("he", "ll"), ("hell", "o"),
    ("Ã", "©"),  # é whole, so that some characters are one token and some are several
]  # fmt: skip
SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tokenizer_files(chat_template: str | None = CHAT_TEMPLATE) -> dict[str, bytes]:
    """The files of a byte-level BPE tokenizer, as a model card carries them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [left + right for left, right in MERGES]
    vocab = {word: index for index, word in enumerate(words)}
    backend = FastTokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1]}
    if chat_template is not None:
        config["chat_template"] = chat_template
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def make_tokenizer() -> Tokenizer:
    """The tokenizer of `make_card`."""
    return Tokenizer.from_files(tokenizer_files())


def byte_ids(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    """One token a byte: the hardest way to spell a text."""
    raw = text.encode() if isinstance(text, str) else text
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    return [by_bytes[bytes([byte])] for byte in raw]


def make_card(chat_template: str | None = CHAT_TEMPLATE, max_model_len: int = 64) -> ModelCard:
    """The card of a model that is all tokenizer."""
    return ModelCard(
        name="tiny",
        max_model_len=max_model_len,
        # More than the tokenizer knows, as with models whose embedding is padded.
        vocab_size=320,
        block_size=4,
        eos_token_ids=(256 + len(MERGES) + 1,),
        tokenizer_files=tokenizer_files(chat_template),
    )


def client_of(backend: ScriptedBackend, config: ServiceConfig | None = None) -> TestClient:
    """A client of the service over this backend."""
    api = make_api(backend, config or ServiceConfig())
    return TestClient(api, raise_server_exceptions=False)


def post(backend: ScriptedBackend, path: str, **body: Any) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    answer = client_of(backend).post(path, json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def post_stream(backend: ScriptedBackend, path: str, **body: Any) -> list[Any]:
    """The data of all events; the raw text must hold `data:` lines alone."""
    answer = client_of(backend).post(path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


def choices_of(events: list[Any]) -> dict[int, list[dict[str, Any]]]:
    """The parts of each choice of a stream, by index."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return parts


def text_of(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    parts = choices_of(events).get(index, [])
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in parts)


def finishes_of(events: list[Any], index: int = 0) -> list[str | None]:
    """The finish_reason of each part of one choice of a stream."""
    return [choice["finish_reason"] for choice in choices_of(events)[index]]


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """The error of an answer, which must have this status and OpenAI's shape, and no trace."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    error: dict[str, Any] = body["error"]
    return error


STATS = EngineStats(0, 0, 7, 8, 3, 20, 5, 4, 0, 0, {"stop": 1})


@dataclass
class ScriptedBackend:
    """Answers every request with the same token ids.

    Args:
        output: token ids, one list a chunk; the last chunk has the end and no tokens.
        outputs: instead, one such output a request, in order.
        finish_reason: of the end.
        error: of the end, instead.
        hangs: waits for ever before the end.
        raises: instead of the end.
        card: what it serves.
    """

    output: Sequence[Sequence[int]] = ()
    finish_reason: FinishReason = FinishReason.STOP
    error: ErrorInfo | None = None
    hangs: bool = False
    raises: Exception | None = None
    card: ModelCard = field(default_factory=make_card)
    num_cached_tokens: int = 0
    logprob: float = -0.5
    sickness: str | None = None
    outputs: Sequence[Sequence[Sequence[int]]] = ()
    requests: list[GenerateRequest] = field(default_factory=list)
    num_closed: int = 0
    num_cards_asked: int = 0
    has_hung: asyncio.Event = field(default_factory=asyncio.Event)

    async def model_card(self) -> ModelCard:
        self.num_cards_asked += 1
        return self.card

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        try:
            for index, ids in enumerate(self.output_of(len(self.requests) - 1)):
                yield self._chunk(request, list(ids), is_first=index == 0)
            if self.hangs:
                self.has_hung.set()
                await asyncio.Event().wait()
            if self.raises is not None:
                raise self.raises
            reason = self.finish_reason if self.error is None else FinishReason.ERROR
            yield TokenChunk(
                request.request_id,
                finish_reason=reason,
                error=self.error,
                num_cached_tokens=self.num_cached_tokens,
            )
        finally:
            self.num_closed += 1

    def output_of(self, index: int) -> Sequence[Sequence[int]]:
        """The output of the request of this index."""
        return self.outputs[index] if self.outputs else self.output

    def _chunk(self, request: GenerateRequest, ids: list[int], is_first: bool) -> TokenChunk:
        wanted = request.sampling_params.num_logprobs
        logprobs = None
        if wanted is not None:
            top = tuple((index, -math.inf) for index in range(wanted))
            logprobs = [TokenLogprobs(token_id, self.logprob, top) for token_id in ids]
        prompt_logprobs = None
        if is_first and request.sampling_params.num_prompt_logprobs is not None:
            prompt_logprobs = [None, *map(self._prompt_row, request.prompt_token_ids[1:])]
        return TokenChunk(
            request.request_id,
            ids,
            logprobs,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def _prompt_row(self, token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, self.logprob, ((token_id, self.logprob),))

    async def stats(self) -> list[EngineStats]:
        return [STATS]

    async def check_health(self) -> None:
        if self.sickness is not None:
            raise BackendUnavailable(self.sickness)

    async def metrics(self) -> PoolMetrics:
        return PoolMetrics((ReplicaMetrics("engine", "r1", b""),), 0)
