"""The OpenAI-compatible generation requests as pydantic models, and their one translation into
SamplingParams.

Owns types and what a field may hold. Ranges of sampling fields live in `SamplingParams`, once.
Types are strict: "1" is no number, true is no integer, NaN is refused. Unknown fields are ignored,
because OpenAI clients send many that change nothing here; fields that would change the answer and
are not served are refused by name. Chat's own fields are in `chat_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from deployments import admission_config as limits
from deployments.protocol import Grammar, RequestRefused, SamplingParams
from serve_app.api_base import (
    MAX_SALT_LENGTH,
    REFUSED,
    SUFFIX_REFUSAL,
    ApiModel,
    Int64,
    Priority,
    Refusals,
    refuse,
)
from serve_app.errors import in_client_words
from serve_app.grammar_fields import (
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    choice_grammar,
    only_grammar,
    regex_grammar,
    schema_grammar,
)

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

ServiceTier = Literal["auto", "default", "flex", "priority"]


class StreamOptions(ApiModel):
    """What a stream carries beside its text: the usage at its end, or so far in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(ApiModel):
    """The fields completions and chat share.

    `top_k` -1 or 0 is off. `priority` 0 is most urgent. Requests with different `cache_salt` share
    no cached prefix. `timeout` is in seconds.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: (
        Annotated[list[Int64], Field(max_length=limits.MOST_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=limits.MOST_ANSWERS_EACH)] | None = None
    user: str | None = None
    priority: Priority | None = None
    service_tier: ServiceTier | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_LENGTH)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    add_special_tokens: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None

    @classmethod
    def refused_fields(cls) -> Refusals:
        """What this route does not serve."""
        return REFUSED

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_change_the_answer(cls, data: Any) -> Any:
        refuse(data, cls.refused_fields())
        return data

    @field_validator("stop")
    @classmethod
    def _few_real_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        most = limits.MOST_STOP_STRINGS
        if len(stops) > most:
            raise ValueError(f"may hold at most {most} strings, got {len(stops)}")
        if "" in stops:
            raise ValueError("must not hold an empty string; leave stop out to stop nowhere")
        if any(len(text) > limits.MOST_STOP_LENGTH for text in stops):
            raise ValueError(f"may hold strings of at most {limits.MOST_STOP_LENGTH} characters")
        return stop

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_something(cls, kept: int | None) -> int | None:
        if kept == 0:
            raise ValueError("must be at least 1, or -1 to fit the model's context")
        return kept

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, bias: object) -> object:
        # Before each of them is looked at: an error for every bad one of a huge map takes seconds.
        if isinstance(bias, dict) and len(bias) > limits.MOST_LOGIT_BIASES:
            raise ValueError(f"may hold at most {limits.MOST_LOGIT_BIASES} tokens")
        return bias

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or {}:
            # "05" is refused: beside "5" it would be a second bias of one token.
            if not (key.isascii() and key.isdigit() and len(key) < 19 and key == str(int(key))):
                raise ValueError(f"keys must be token ids, got {key[:40]!r}")
        return bias

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            message = "stream_options needs stream to be true; set stream or leave it out"
            raise RequestRefused.invalid("stream_options", message)
        return self

    @property
    def num_prompts(self) -> int:
        """Prompts in it."""
        return 1

    @property
    def num_choices_each(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def skips_special_tokens(self) -> bool:
        """Whether special tokens show no text."""
        return self.skip_special_tokens is not False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether each chunk of such a stream carries the usage up to it."""
        options = self.stream_options
        return bool(self.includes_usage and options and options.continuous_usage_stats)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives asked for per token; None: no logprobs at all."""
        raise NotImplementedError

    @property
    def asked_max_tokens(self) -> int | None:
        """The client's bound on the answer, in tokens."""
        return self.max_tokens

    @property
    def wants_prompt_alone(self) -> bool:
        """Whether the answer is the echoed prompt, and nothing is added to it."""
        return False

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the prompt's own tokens come with logprobs."""
        return False

    @property
    def client_names(self) -> Mapping[str, str]:
        """What the client calls fields of a GenerateRequest and its SamplingParams, where it
        differs.
        """
        found = self.grammar()
        return {} if found is None else {"grammar": found[0]}

    def grammar(self) -> tuple[str, Grammar] | None:
        """The structure the output must have, and the field that asks for it.

        Raises:
            RequestRefused: two fields ask for one, or one is too large.
        """
        return only_grammar(self.asked_grammars())

    def asked_grammars(self) -> dict[str, list[Grammar]]:
        """By field."""
        plain = self.response_format and self.response_format.grammar("response_format")
        several = self.structured_outputs and self.structured_outputs.grammars("structured_outputs")
        asked: dict[str, list[Grammar]] = {
            "response_format": [plain] if plain else [],
            "structured_outputs": several or [],
        }
        if self.guided_json is not None:
            asked["guided_json"] = [schema_grammar("guided_json", self.guided_json)]
        if self.guided_regex is not None:
            asked["guided_regex"] = [regex_grammar("guided_regex", self.guided_regex)]
        if self.guided_choice is not None:
            asked["guided_choice"] = [choice_grammar("guided_choice", self.guided_choice)]
        return asked

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
        found = self.grammar()
        asked["top_k"] = 0 if self.top_k in (None, -1) else self.top_k
        asked["logit_bias"] = tuple(
            (int(key), bias) for key, bias in (self.logit_bias or {}).items()
        )
        asked["stop_token_ids"] = tuple(self.stop_token_ids or ()) + extra_stop_ids
        asked["num_logprobs"] = self.num_logprobs
        asked["num_prompt_logprobs"] = self.num_logprobs if self.has_prompt_logprobs else None
        asked["grammar"] = None if found is None else found[1]
        asked["max_tokens"] = (
            default_max_tokens if self.asked_max_tokens is None else self.asked_max_tokens
        )
        if self.wants_prompt_alone:
            # An engine request ends with a token; this one's is left out of the answer.
            asked["max_tokens"] = 1
        try:
            return SamplingParams(**asked)
        except RequestRefused as refused:
            raise RequestRefused(in_client_words(refused.info, self.client_names)) from refused


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


TokenIds = Annotated[list[Int64], Field(fail_fast=True)]
Prompt = str | list[int]
"""One prompt: a text or token ids."""


def _kind_of_prompt(prompt: Any) -> str:
    # Names that are no identifiers, so that no client takes them for a part of the request.
    # Told by the first item, because trying each kind on 100,000 ids costs an error for each.
    if not isinstance(prompt, list):
        return "a text"
    first = prompt[0] if prompt else None
    if isinstance(first, str):
        return "some texts"
    return "id lists" if isinstance(first, list) else "token ids"


AnyPrompts = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[list[str], Field(fail_fast=True, max_length=limits.MOST_PROMPTS), Tag("some texts")]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[
        list[TokenIds],
        Field(fail_fast=True, max_length=limits.MOST_PROMPTS),
        Tag("id lists"),
    ],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: prompts as texts or token ids. `logprobs` is a number of
    alternatives. With `echo` each answer begins with its prompt.
    """

    prompt: AnyPrompts
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @classmethod
    def refused_fields(cls) -> Refusals:
        """See GenerationRequest."""
        tools = "are served by /v1/chat/completions alone; leave them out"
        return {**REFUSED, "suffix": SUFFIX_REFUSAL, "tools": ((None, []), tools)}

    @model_validator(mode="after")
    def _as_many_as_are_returned(self) -> CompletionRequest:
        if self.best_of not in (None, self.num_choices_each):
            message = f"best_of must equal n ({self.num_choices_each}): all answers are returned"
            raise RequestRefused.invalid("best_of", message)
        if self.wants_prompt_alone and self.min_tokens:
            message = "min_tokens must be 0 where max_tokens is 0, which asks for the prompt alone"
            raise RequestRefused.invalid("min_tokens", message)
        num_choices = len(self.prompts) * self.num_choices_each
        if num_choices > limits.MOST_CHOICES:
            message = (
                f"n: {len(self.prompts)} prompts with {self.num_choices_each} answers each are "
                f"{num_choices} answers; one request may ask for at most {limits.MOST_CHOICES}"
            )
            raise RequestRefused.invalid("n", message)
        return self

    @property
    def num_prompts(self) -> int:
        """See GenerationRequest."""
        return len(self.prompts)

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts; at least one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # An empty list is one empty prompt, which is refused with its own words.
        is_one = not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return self.logprobs

    @property
    def wants_prompt_alone(self) -> bool:
        """See GenerationRequest."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def has_prompt_logprobs(self) -> bool:
        """See GenerationRequest."""
        return bool(self.echo) and self.logprobs is not None
