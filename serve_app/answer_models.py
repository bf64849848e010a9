"""What clients get, as pydantic models: the schemas of the OpenAPI page.

Owns documentation that tests hold against real answers; answers themselves are written by `answers`
and `errors`, without the cost of a model for each token. A field is required unless it is missing
from some answers.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    """A part of an answer: nothing beyond what is named."""

    model_config = ConfigDict(extra="forbid")


def _without_default(schema: dict[str, Any]) -> None:
    """A field that may be missing has no default a client could rely on."""
    for field in schema.get("properties", {}).values():
        field.pop("default", None)


class ErrorDetail(AnswerModel):
    """OpenAI's error. `param` is the field of the request, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(AnswerModel):
    """Every answer that is an error, and the last event of a stream that failed."""

    error: ErrorDetail


class PromptTokensDetails(AnswerModel):
    """`cached_tokens` of the prompt came from the prefix cache."""

    cached_tokens: int


class UsageAnswer(AnswerModel):
    """Tokens of all prompts (each once) and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(AnswerModel):
    """One entry a token; those of an echoed prompt's first token are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(AnswerModel):
    """One answer, or in a stream a part of it; `finish_reason` is null in all parts but the
    last.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(AnswerModel):
    """The answer of /v1/completions. A stream's parts have a `usage` only if asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CompletionChunk(AnswerModel):
    """An event of a streamed completion."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_without_default)

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None


class ToolFunctionAnswer(AnswerModel):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(AnswerModel):
    """A call of a tool; in a stream always whole, with its `index`."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_without_default)

    id: str
    type: Literal["function"]
    function: ToolFunctionAnswer
    index: int | None = None


class TopLogprob(AnswerModel):
    """A token; `bytes` are what it adds to the text's UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The sampled token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    """One entry a token."""

    content: list[TokenLogprob]


ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatAnswerMessage(AnswerModel):
    """`content` is null where the answer is tool calls alone."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_without_default)

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(AnswerModel):
    """One answer."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class ChatAnswer(AnswerModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ChatDelta(AnswerModel):
    """What is new; the first of a choice has its role."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_without_default)

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChunkChoice(AnswerModel):
    """A part of one answer; `finish_reason` is null in all parts but the last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatChunk(AnswerModel):
    """An event of a streamed chat."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_without_default)

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None


class ModelAnswer(AnswerModel):
    """A served model and its context in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(AnswerModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelAnswer]


class StatusAnswer(AnswerModel):
    """The service is well; otherwise the answer is an error."""

    status: Literal["ok"]


class VersionAnswer(AnswerModel):
    """The version of this software."""

    version: str
