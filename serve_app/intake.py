"""From a parsed request to what a replica is sent: token ids, sampling parameters, and a fresh
internal id.

Owns the checks that need the model card, so that what can never be served costs no replica
anything. The replica checks again by its own limits; it alone knows its KV pool.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from deployments.protocol import ErrorInfo, ErrorKind, GenerateRequest, ModelCard, RequestRefused
from serve_app.api_models import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from serve_app.errors import model_not_found
from serve_app.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a pool and its tokenizer, which always agree."""

    card: ModelCard
    tokenizer: Tokenizer

    @classmethod
    def from_card(cls, card: ModelCard) -> ServedModel:
        """Build the tokenizer of a card; takes a second or so and blocks.

        Raises:
            ValueError: the card's tokenizer cannot be read.
        """
        return cls(card, Tokenizer.from_files(card.tokenizer_files))

    def check_name(self, asked: str | None) -> None:
        """Refuse another model's name; none at all means this one.

        Raises:
            ApiError: 404.
        """
        if asked is not None and asked != self.card.name:
            raise model_not_found(asked, self.card.name)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready for a replica, and what is needed to read its answer."""

    generate: GenerateRequest
    stops: tuple[str, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.generate.prompt_token_ids)


async def prepare_completion(model: ServedModel, body: CompletionRequest) -> PreparedRequest:
    """Tokenize a prompt and check it.

    Raises:
        ApiError, RequestRefused: the request cannot be served as it is.
    """
    model.check_name(body.model)
    ids = (
        await model.tokenizer.encode_async(body.prompt)
        if isinstance(body.prompt, str)
        else body.prompt
    )
    _check_prompt(ids, model.card, "prompt")
    return _prepared(model, body, ids, DEFAULT_COMPLETION_TOKENS)


async def prepare_chat(model: ServedModel, body: ChatCompletionRequest) -> PreparedRequest:
    """Render a conversation by the model's template, tokenize and check it.

    Raises:
        ApiError, RequestRefused: the request cannot be served as it is.
    """
    model.check_name(body.model)
    messages = [message.for_template() for message in body.messages]
    ids = await model.tokenizer.apply_chat_template_async(messages)
    _check_prompt(ids, model.card, "messages")
    return _prepared(model, body, ids, model.card.max_model_len - len(ids))


def _prepared(
    model: ServedModel, body: GenerationRequest, ids: list[int], default_max_tokens: int
) -> PreparedRequest:
    _check_limits(body, model.card)
    specials = (model.tokenizer.special_token_id(stop) for stop in body.stop_strings)
    # A special token shows no text that a stop string could match, so the engine stops at its id.
    stop_ids = tuple(token_id for token_id in specials if token_id is not None)
    request = GenerateRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tuple(ids),
        sampling_params=body.to_sampling_params(default_max_tokens, stop_ids),
        priority=body.priority or 0,
        arrival_time=time.time(),
        cache_salt=body.cache_salt or "",
    )
    return PreparedRequest(request, body.stop_strings)


def _check_prompt(ids: list[int], card: ModelCard, param: str) -> None:
    if not ids:
        raise RequestRefused.invalid(param, f"{param} is empty: it must hold at least one token")
    if min(ids) < 0 or max(ids) >= card.vocab_size:
        largest = card.vocab_size - 1
        message = f"{param} holds a token id outside the vocabulary; ids end at {largest}"
        raise RequestRefused.invalid(param, message)
    if len(ids) >= card.max_model_len:
        message = (
            f"{param} has {len(ids)} tokens, but the model's context is {card.max_model_len} "
            f"tokens, output included; shorten it to at most {card.max_model_len - 1} tokens"
        )
        raise RequestRefused(ErrorInfo(ErrorKind.CONTEXT_LENGTH, message, param))


def _check_limits(body: GenerationRequest, card: ModelCard) -> None:
    asked = body.asked_max_tokens
    if asked is not None and asked > card.max_model_len:
        name = body.client_name("max_tokens")
        context = card.max_model_len
        message = f"{name} is {asked}, but the model's context is {context} tokens; ask for fewer"
        raise RequestRefused.invalid(name, message)
    named = [("logit_bias", int(key)) for key in body.logit_bias or ()]
    named += [("stop_token_ids", token_id) for token_id in body.stop_token_ids or ()]
    for name, token_id in named:
        if not 0 <= token_id < card.vocab_size:
            message = (
                f"{name} holds token id {token_id}; ids must be from 0 to {card.vocab_size - 1}"
            )
            raise RequestRefused.invalid(name, message)
