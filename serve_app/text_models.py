"""Requests and answers of the routes that work on text alone: tokenize, detokenize, chunk.

Owns their types. The shapes of the first two are vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from deployments.protocol import RequestRefused
from serve_app import api_base
from serve_app.api_base import REFUSED, ApiModel, refuse
from serve_app.api_models import TokenIds
from serve_app.chat_models import ChatMessage, Conversation, Tool


class TokenizeRequest(ApiModel):
    """POST /tokenize: a bare `prompt`, or `messages` as chat would render them.

    `add_special_tokens` defaults to true for a prompt and to false for messages.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=api_base.MAX_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_change_the_answer(cls, data: Any) -> Any:
        refuse(data, {"chat_template": REFUSED["chat_template"]})
        return data

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            message = "prompt or messages must be sent, and not both"
            raise RequestRefused.invalid("prompt", message)
        return self

    def conversation(self) -> Conversation | None:
        """The messages and how they are rendered; None for a bare prompt."""
        if self.messages is None:
            return None
        return Conversation(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class TokenizeResponse(BaseModel):
    """The answer of POST /tokenize; `token_strs` as the vocabulary writes them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(ApiModel):
    """POST /detokenize: token ids, special ones included."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    """The answer of POST /detokenize."""

    prompt: str


class ChunkRequest(ApiModel):
    """POST /chunk: how a prompt is cut; without overrides, as this service cuts it now."""

    model: str | None = None
    prompt: str
    chunk_size: Annotated[int, Field(ge=1)] | None = None
    overlap_ratio: Annotated[float, Field(ge=0.0, le=0.5)] | None = None
