"""Conversations as pydantic models: messages, tools, and the request of /v1/chat/completions.

Owns types and which fields need which. What the fields of all generating routes mean is in
`api_models`; what a template makes of messages is `chat_template`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from deployments.protocol import Grammar, RequestRefused
from serve_app import api_base
from serve_app.api_base import REFUSED, SUFFIX_REFUSAL, ApiModel, Int64, Refusals
from serve_app.api_models import GenerationRequest
from serve_app.chat_template import ChatOptions, ChatTemplate
from serve_app.grammar_fields import schema_grammar
from serve_app.strict_json import read_json
from serve_app.tool_calls import (
    FirstCallAlone,
    JsonToolCalls,
    NamedToolCall,
    TaggedToolCalls,
    ToolCallParser,
)
from serve_app.tool_schema import calls_schema

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class TextPart(ApiModel):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class CalledFunction(ApiModel):
    """What an assistant called; `arguments` is JSON text."""

    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object, which is what templates write out."""
        try:
            arguments = read_json(self.arguments or "{}")
        except ValueError as error:
            message = "messages hold a tool call whose arguments are not valid JSON"
            raise RequestRefused.invalid("messages", message) from error
        return {"name": self.name, "arguments": arguments}


class MessageToolCall(ApiModel):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(ApiModel):
    """One turn. Parts of a content list are joined by newlines; `developer` is an alias of
    `system`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
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
        """The message as chat templates read it.

        Raises:
            RequestRefused: the arguments of a tool call are not JSON.
        """
        fields = self.model_dump(exclude_none=True)
        fields["role"] = "system" if self.role == "developer" else self.role
        if not isinstance(self.content, str):
            fields["content"] = "\n".join(part.text for part in self.content or ())
        if self.tool_calls:
            fields["tool_calls"] = [
                call.model_dump(exclude_none=True) | {"function": call.function.for_template()}
                for call in self.tool_calls
            ]
        return fields


class ToolFunction(ApiModel):
    """A function the model may call; `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    """A tool; functions alone are served."""

    type: Literal["function"]
    function: ToolFunction

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """A schema of what the function takes."""
        return self.function.parameters or {"type": "object"}


class NamedFunction(ApiModel):
    """The function of a tool choice."""

    name: str


class NamedToolChoice(ApiModel):
    """The client chose the function."""

    type: Literal["function"]
    function: NamedFunction


class Conversation(ApiModel):
    """Messages and how they are rendered."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=api_base.MAX_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _opens_or_continues(self) -> Conversation:
        check_opens_or_continues(self.add_generation_prompt, self.continue_final_message)
        return self

    def options(self) -> ChatOptions:
        """How the messages are rendered."""
        continues = bool(self.continue_final_message)
        opens = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        tools = tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ())
        return ChatOptions(tools, opens, continues, self.chat_template_kwargs or {})


def check_opens_or_continues(opens: bool | None, continues: bool | None) -> None:
    """Refuse a conversation that is to open a new turn and to continue the last one.

    Raises:
        RequestRefused: names the field.
    """
    if opens and continues:
        message = (
            "add_generation_prompt must be false with continue_final_message: the model either "
            "opens a turn or goes on with the last one"
        )
        raise RequestRefused.invalid("add_generation_prompt", message)


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions. Without a bound, the answer may fill the model's context."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=api_base.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def refused_fields(cls) -> Refusals:
        """See GenerationRequest."""
        return {
            **REFUSED,
            "echo": ((None, False), "is served by /v1/completions alone; leave it out"),
            "suffix": SUFFIX_REFUSAL,
            "best_of": ((None, 1), "is not served; leave it out or set 1"),
        }

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            message = "top_logprobs needs logprobs to be true; set logprobs or leave it out"
            raise RequestRefused.invalid("top_logprobs", message)
        check_opens_or_continues(self.add_generation_prompt, self.continue_final_message)
        return self

    @model_validator(mode="after")
    def _choice_is_a_tool(self) -> ChatCompletionRequest:
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not self.tools:
            message = "tool_choice needs tools; send tools or leave it out"
            raise RequestRefused.invalid("tool_choice", message)
        name = self._chosen_function
        if name is not None and name not in self._tool_names:
            message = f"tool_choice names {name[:128]!r}, which is none of tools"
            raise RequestRefused.invalid("tool_choice", message)
        return self

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> int | None:
        """See GenerationRequest; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def client_names(self) -> Mapping[str, str]:
        """See GenerationRequest."""
        names = {"logprobs": "top_logprobs", "prompt": "messages", **super().client_names}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def asked_grammars(self) -> dict[str, list[Grammar]]:
        """See GenerationRequest; a tool the client insists on is a structure, too."""
        schema = self._schema_of_choice()
        forced = [] if schema is None else [schema_grammar("tool_choice", schema)]
        return {**super().asked_grammars(), "tool_choice": forced}

    def conversation(self) -> Conversation:
        """What the template reads; tools the model must not call are not shown to it."""
        return Conversation(
            messages=self.messages,
            tools=self._offered_tools or None,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def tool_call_parser(self, template: ChatTemplate) -> ToolCallParser | None:
        """A fresh reader of one answer's tool calls; None if there can be none."""
        if not self._offered_tools:
            return None
        parser = self._parser_of_all(template)
        return FirstCallAlone(parser) if self.parallel_tool_calls is False else parser

    def _parser_of_all(self, template: ChatTemplate) -> ToolCallParser:
        if self._chosen_function is not None:
            return NamedToolCall(self._chosen_function)
        if template.tells_tool_call_tags and self.tool_choice != "required":
            return TaggedToolCalls(self._tool_names)
        return JsonToolCalls(self._tool_names)

    @property
    def _offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def _tool_names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools or ())

    @property
    def _chosen_function(self) -> str | None:
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedToolChoice) else None

    def _schema_of_choice(self) -> dict[str, Any] | None:
        tools = self.tools or []
        if (name := self._chosen_function) is not None:
            return next(t.schema_of_arguments for t in tools if t.function.name == name)
        if self.tool_choice != "required":
            return None
        arguments = [(tool.function.name, tool.schema_of_arguments) for tool in tools]
        return calls_schema(arguments, 1 if self.parallel_tool_calls is False else None)
