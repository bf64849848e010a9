"""A model's chat template: what a conversation looks like as one text, and whether it knows tools.

Owns how the template is called and what it may be told. Does not know token ids or HTTP.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jinja2

from deployments.protocol import RequestRefused

Message = dict[str, Any]


class ChatRenderer(Protocol):
    """What is needed of a Hugging Face tokenizer beside its fast backend."""

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool, **options: Any
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is rendered, beside its messages.

    `continues_final_message` leaves the last message open, for the model to go on with. `variables`
    are the template's own (`enable_thinking` and the like).
    """

    tools: tuple[dict[str, Any], ...] = ()
    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


_PROBE_MESSAGES: list[Message] = [{"role": "user", "content": "hi"}]
_PROBE_NAME = "chunkserve_probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatTemplate:
    """The chat template of one model. Thread-safe: nothing changes after construction.

    Args:
        renderer: runs the template.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        parameters = inspect.signature(renderer.apply_chat_template).parameters
        # A client that could set these would bring its own template, or break the call.
        own = {"self", "messages", "raise_exception", "strftime_now"}
        self._reserved = frozenset(parameters) | own
        self._probe = self._render_probe()

    @property
    def knows_tools(self) -> bool:
        """Whether tools given to the template reach the model."""
        return _PROBE_NAME in self._probe

    @property
    def tells_tool_call_tags(self) -> bool:
        """Whether it tells the model to write `<tool_call>{…}</tool_call>`, as Hermes and Qwen."""
        return "<tool_call>" in self._probe

    def render(self, messages: list[Message], options: ChatOptions) -> str:
        """The conversation as one text.

        Raises:
            RequestRefused: the template knows no tools, or refuses these messages or variables.
        """
        if options.tools and not self.knows_tools:
            message = "tools: the model's chat template knows no tools; leave them out"
            raise RequestRefused.invalid("tools", message)
        for name in options.variables:
            if name in self._reserved:
                message = f"chat_template_kwargs must not hold {name!r}; it is set by the service"
                raise RequestRefused.invalid("chat_template_kwargs", message)
        try:
            return self._render(messages, options)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # Templates fail in all these ways on conversations they were not written for.
            brief = str(error)[:500]
            message = f"the model's chat template refuses these messages: {brief}"
            raise RequestRefused.invalid("messages", message) from error

    def _render(self, messages: list[Message], options: ChatOptions) -> str:
        text: str = self._renderer.apply_chat_template(
            messages,
            tokenize=False,
            tools=list(options.tools) or None,
            add_generation_prompt=options.adds_generation_prompt,
            continue_final_message=options.continues_final_message,
            **options.variables,
        )
        return text

    def _render_probe(self) -> str:
        # Rendered rather than read: what counts is what reaches the model, however it is written.
        try:
            return self._render(_PROBE_MESSAGES, ChatOptions(tools=(_PROBE_TOOL,)))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError):
            # A template that cannot render tools does not know them.
            return ""
