"""From a parsed request to what replicas are sent: for each choice token ids, sampling parameters
and a fresh internal id.

Owns the checks that need the model card, so that what can never be served costs no replica
anything. The replica checks again by its own limits; it alone knows its KV pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.protocol import GenerateRequest, ModelCard, RequestRefused, SamplingParams
from serve_app.api_models import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    GenerationRequest,
)
from serve_app.chat_models import ChatCompletionRequest
from serve_app.chunker import Chunker
from serve_app.detokenizer import IncrementalDetokenizer
from serve_app.off_loop import run_sized
from serve_app.prompts import PromptRules, ReadPrompt, read_prompt
from serve_app.served_model import ServedModel
from serve_app.streaming import TextRules
from serve_app.tool_calls import ToolCallParser


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A choice ready for a replica, and what is needed to read its answer."""

    generate: GenerateRequest
    detokenizer: IncrementalDetokenizer
    rules: TextRules
    tool_parser: ToolCallParser | None = None


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A whole HTTP request, ready for the pool.

    `requests` are its choices in order of their index: prompt * n + i. `client_names` is what the
    client calls fields of a GenerateRequest, where it differs.
    """

    requests: tuple[PreparedRequest, ...]
    num_choices_each: int
    client_names: Mapping[str, str]
    timeout_s: float | None = None

    @property
    def prompt_lengths(self) -> list[int]:
        """In tokens, one a prompt."""
        firsts = self.requests[:: self.num_choices_each]
        return [len(request.generate.prompt_token_ids) for request in firsts]


def derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of the choice of this index: the client's own for the first, and from then on one
    that depends on both, so that choices differ and repeat.
    """
    if seed is None or index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def priority_of(body: GenerationRequest, default: int) -> int:
    """The client's own number, else that of its service tier:

    priority        0, the most urgent
    auto, default   the default
    flex            the default + 1
    """
    if body.priority is not None:
        return body.priority
    return {"priority": 0, "flex": default + 1}.get(body.service_tier or "default", default)


class Intake:
    """Prepares requests for one model.

    Args:
        model: that serves them.
        chunker: says which chunk size they ask for.
        default_priority: of requests that name none.
    """

    def __init__(self, model: ServedModel, chunker: Chunker, default_priority: int = 0) -> None:
        self._model = model
        self._chunker = chunker
        self._default_priority = default_priority

    async def completion(self, body: CompletionRequest) -> PreparedCall:
        """Tokenize all prompts and check them.

        Raises:
            ApiError, RequestRefused: the request cannot be served as it is.
        """
        self._check(body)
        rules = PromptRules(
            adds_special_tokens=body.add_special_tokens is not False,
            num_kept=self._num_kept(body, DEFAULT_COMPLETION_TOKENS),
            skips_special_tokens=body.skips_special_tokens,
            is_echoed=bool(body.echo),
            has_logprobs=body.has_prompt_logprobs,
        )
        prompts = await run_sized(
            sum(len(prompt) for prompt in body.prompts),
            lambda: [read_prompt(self._model, prompt, rules) for prompt in body.prompts],
        )
        params = self._params(body, DEFAULT_COMPLETION_TOKENS)
        requests = [
            request for prompt in prompts for request in self._choices(body, prompt, params)
        ]
        return self._call(body, requests)

    async def chat(self, body: ChatCompletionRequest) -> PreparedCall:
        """Render a conversation by the model's template, tokenize and check it.

        Raises:
            ApiError, RequestRefused: the request cannot be served as it is.
        """
        self._check(body)
        prompt = await asyncio.to_thread(self._read_chat, body)
        # Without a bound the answer may fill the context.
        room = self._model.card.max_model_len - len(prompt.token_ids)
        requests = self._choices(body, prompt, self._params(body, room))
        chat = self._model.tokenizer.chat
        parsed = [replace(request, tool_parser=body.tool_call_parser(chat)) for request in requests]
        return self._call(body, parsed)

    def _check(self, body: GenerationRequest) -> None:
        self._model.check_name(body.model)
        _check_limits(body, self._model.card)

    def _num_kept(self, body: GenerationRequest, default_max_tokens: int) -> int | None:
        """How many tokens of a prompt are kept; None: all."""
        if body.truncate_prompt_tokens != -1:
            return body.truncate_prompt_tokens
        wanted = body.asked_max_tokens or default_max_tokens
        return max(1, self._model.card.max_model_len - wanted)

    def _read_chat(self, body: ChatCompletionRequest) -> ReadPrompt:
        conversation = body.conversation()
        messages = [message.for_template() for message in conversation.messages]
        text = self._model.tokenizer.chat.render(messages, conversation.options())
        rules = PromptRules(
            adds_special_tokens=bool(body.add_special_tokens),
            num_kept=self._num_kept(body, default_max_tokens=1),
            skips_special_tokens=body.skips_special_tokens,
        )
        return read_prompt(self._model, text, rules, "messages")

    def _params(self, body: GenerationRequest, default_max_tokens: int) -> SamplingParams:
        return body.to_sampling_params(default_max_tokens, tuple(self._stop_texts(body)))

    def _choices(
        self, body: GenerationRequest, prompt: ReadPrompt, params: SamplingParams
    ) -> list[PreparedRequest]:
        """The n choices of one prompt."""
        rules = TextRules(
            stops=body.stop_strings,
            includes_stop=bool(body.include_stop_str_in_output),
            stop_texts=self._stop_texts(body),
            min_tokens=params.min_tokens,
            echo=prompt.echo,
            is_prompt_alone=body.wants_prompt_alone,
        )
        request = GenerateRequest(
            request_id="",
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            priority=priority_of(body, self._default_priority),
            chunk_size=self._chunker.size_for(len(prompt.token_ids)),
            arrival_time=time.time(),
            cache_salt=body.cache_salt or "",
        )
        return [
            PreparedRequest(_choice(request, index), prompt.detokenizer.fork(), rules)
            for index in range(body.num_choices_each)
        ]

    def _stop_texts(self, body: GenerationRequest) -> dict[int, str]:
        # A special token shows no text that a stop string could match, so the engine stops at its
        # id.
        ids = {stop: self._model.tokenizer.special_token_id(stop) for stop in body.stop_strings}
        return {token_id: stop for stop, token_id in ids.items() if token_id is not None}

    @staticmethod
    def _call(body: GenerationRequest, requests: Sequence[PreparedRequest]) -> PreparedCall:
        return PreparedCall(tuple(requests), body.num_choices_each, body.client_names, body.timeout)


def _choice(request: GenerateRequest, index: int) -> GenerateRequest:
    params = request.sampling_params
    seeded = replace(params, seed=derived_seed(params.seed, index))
    return replace(request, request_id=uuid.uuid4().hex, sampling_params=seeded)


def _check_limits(body: GenerationRequest, card: ModelCard) -> None:
    asked = body.asked_max_tokens
    if asked is not None and asked > card.max_model_len:
        name = body.client_names.get("max_tokens", "max_tokens")
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
