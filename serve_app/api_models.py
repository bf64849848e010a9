"""The OpenAI-compatible requests as pydantic models, and their one translation into SamplingParams.

Owns types and what a field may hold. Ranges of sampling fields live in `SamplingParams`, once.
Types are strict: "1" is no number, true is no integer, NaN is refused. Unknown fields are ignored,
because OpenAI clients send many that change nothing here; fields that would change the answer and
are not served are refused by name (`_REFUSED`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.protocol import ErrorInfo, RequestRefused, SamplingParams

MAX_STOP_STRINGS = 4
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What fits the integers of the engine's tensors."""


class ApiModel(BaseModel):
    """A part of a request: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(ApiModel):
    """What a stream carries beside its text."""

    include_usage: bool | None = None


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((None, False), "is not served: the prompt is never repeated; leave it out"),
    "suffix": ((None,), "is not served: text is only continued at its end; leave it out"),
    "best_of": ((None, 1), "is not served; leave it out or set 1"),
    "tools": ((None, []), "are not served; leave them out"),
    "functions": ((None, []), "are not served; leave them out"),
    "response_format": ((None, {"type": "text"}), "other than text is not served; leave it out"),
    "tool_choice": ((None, "none", "auto"), "needs tools, which are not served; leave it out"),
    "truncate_prompt_tokens": ((None,), "is not served; shorten the prompt yourself"),
    "include_stop_str_in_output": ((None, False), "is not served; append it yourself"),
    "skip_special_tokens": ((None, True), "is always on; leave it out"),
    "add_special_tokens": ((None, True), "is always on; leave it out, or send token ids"),
    "continue_final_message": ((None, False), "is not served; leave it out"),
    "chat_template_kwargs": ((None, {}), "are not served; leave them out"),
    **{
        name: ((None,), "is not served; leave it out")
        for name in (
            "prompt_logprobs",
            "bad_words",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
        )
    },
}
"""field -> (values that change nothing, why others are refused)."""


class GenerationRequest(ApiModel):
    """The fields completions and chat share.

    `top_k` -1 or 0 is off. `priority` 0 is most urgent. Requests with different `cache_salt` share
    no cached prefix.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: list[Int64] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_change_the_answer(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, (harmless, why) in _REFUSED.items():
                if not any(data.get(name) == value for value in harmless):
                    raise RequestRefused.invalid(name, f"{name} {why}")
        return data

    @field_validator("n")
    @classmethod
    def _one_choice(cls, n: int | None) -> int | None:
        if n not in (None, 1):
            raise ValueError(f"must be 1, got {n}; for several answers send several requests")
        return n

    @field_validator("stop")
    @classmethod
    def _few_real_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"may hold at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
        if "" in stops:
            raise ValueError("must not hold an empty string; leave stop out to stop nowhere")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 19):
                raise ValueError(f"keys must be token ids, got {key[:40]!r}")
        return bias

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            message = "stream_options needs stream to be true; set stream or leave it out"
            raise RequestRefused.invalid("stream_options", message)
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives asked for per token; None: no logprobs at all."""
        raise NotImplementedError

    @property
    def asked_max_tokens(self) -> int | None:
        """The client's bound on the answer, in tokens."""
        return self.max_tokens

    def client_name(self, param: str) -> str:
        """What this kind of request calls a field of SamplingParams."""
        return param

    def to_sampling_params(
        self, default_max_tokens: int, extra_stop_ids: tuple[int, ...] = ()
    ) -> SamplingParams:
        """How to choose tokens; `default_max_tokens` holds where the client set no bound.

        Raises:
            RequestRefused: a field is outside its range; named as the client named it.
        """
        asked: dict[str, Any] = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        asked["top_k"] = 0 if self.top_k in (None, -1) else self.top_k
        asked["logit_bias"] = tuple(
            (int(key), bias) for key, bias in (self.logit_bias or {}).items()
        )
        asked["stop_token_ids"] = tuple(self.stop_token_ids or ()) + extra_stop_ids
        asked["num_logprobs"] = self.num_logprobs
        asked["max_tokens"] = (
            default_max_tokens if self.asked_max_tokens is None else self.asked_max_tokens
        )
        try:
            return SamplingParams(**asked)
        except RequestRefused as refused:
            raise self._in_client_words(refused) from refused

    def _in_client_words(self, refused: RequestRefused) -> RequestRefused:
        info = refused.info
        if info.param is None:
            return refused
        name = self.client_name(info.param)
        message = name + info.message.removeprefix(info.param)
        return RequestRefused(ErrorInfo(info.kind, message, name))


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
)
"""Fields of SamplingParams that clients name and type as we do."""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: one prompt, as text or token ids. `logprobs` is a number of
    alternatives.
    """

    prompt: str | list[int]
    logprobs: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            if len(prompt) > 1:
                raise ValueError(f"holds {len(prompt)} prompts; send one prompt a request")
            return prompt[0]
        return prompt

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return self.logprobs


class TextPart(ApiModel):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(ApiModel):
    """One turn. Parts of a content list are joined by newlines; `developer` is an alias of
    `system`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(
                    f"holds a part of type {kind[:40]!r}; this model reads text parts alone"
                )
        return content

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        fields = self.model_dump(exclude_none=True)
        fields["role"] = "system" if self.role == "developer" else self.role
        if not isinstance(self.content, str):
            fields["content"] = "\n".join(part.text for part in self.content or ())
        return fields


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions. Without a bound, the answer may fill the model's context."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            message = "top_logprobs needs logprobs to be true; set logprobs or leave it out"
            raise RequestRefused.invalid("top_logprobs", message)
        return self

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> int | None:
        """See GenerationRequest; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def client_name(self, param: str) -> str:
        """See GenerationRequest."""
        if param == "logprobs":
            return "top_logprobs"
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return param


class ChunkRequest(ApiModel):
    """POST /chunk: how a prompt is cut; without overrides, as this service cuts it."""

    prompt: str
    chunk_size: Annotated[int, Field(ge=1)] | None = None
    overlap_ratio: Annotated[float, Field(ge=0.0, le=0.5)] | None = None
