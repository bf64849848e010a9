"""Tool calls in the text of an answer: found while the text grows, whole or not at all.

Owns the formats models write them in. Does not know tokens or OpenAI's shapes. What looks like a
call and is none stays text, so nothing a model wrote is lost.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve_app.stops import begun_length
from serve_app.strict_json import read_json


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is JSON text, as OpenAI's clients expect it."""

    index: int
    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What became certain: text for the reader, and calls."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Reads one growing answer."""

    @property
    def is_forced(self) -> bool:
        """Whether the client chose the function: such a call is no reason to end, so the answer
        ends with `stop`, as OpenAI's do.
        """
        ...

    def push(self, text: str) -> ParsedText:
        """What became certain with this text."""
        ...

    def flush(self) -> ParsedText:
        """The rest, once nothing will follow."""
        ...


def _call_of(index: int, data: Any, names: Collection[str]) -> ToolCall | None:
    """The call that parsed JSON stands for; None if it is none of the tools'."""
    if not isinstance(data, dict):
        return None
    name = data.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(index, name, json.dumps(arguments, ensure_ascii=False))


def _loads(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return None


class TaggedToolCalls:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes, Qwen and their kin write.

    Space around calls is dropped. A call that the end of the answer left open still counts if its
    JSON is complete.

    Args:
        names: of the tools the model was given.
    """

    is_forced = False
    OPENING = "<tool_call>"
    CLOSING = "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._num_calls = 0
        self._drops_space = False

    def push(self, text: str) -> ParsedText:
        """See ToolCallParser."""
        self._hold(text)
        shown: list[str] = []
        calls: list[ToolCall] = []
        while (end := self._held.find(self.CLOSING)) >= 0:
            end += len(self.CLOSING)
            block, rest = self._held[:end], self._held[end:]
            before, call = self._read(block)
            shown.append(before)
            calls.extend(call)
            self._held = ""
            self._hold(rest)
        num_certain = self._num_certain()
        shown.append(self._held[:num_certain])
        self._held = self._held[num_certain:]
        return ParsedText("".join(shown), tuple(calls))

    def flush(self) -> ParsedText:
        """See ToolCallParser."""
        text, call = self._read(self._held)
        self._held = ""
        return ParsedText(text, call)

    def _hold(self, text: str) -> None:
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        self._held += text

    def _read(self, block: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The text and the call of a block that holds at most one call, at its end."""
        before, _, inner = block.partition(self.OPENING)
        data = _loads(inner.removesuffix(self.CLOSING))
        call = _call_of(self._num_calls, data, self._names)
        if call is None:
            return block, ()
        self._num_calls += 1
        self._drops_space = True
        return before.rstrip(), (call,)

    def _num_certain(self) -> int:
        """How much of what is held can be no part of a call, nor the space before one."""
        opened = self._held.find(self.OPENING)
        if opened < 0:
            opened = len(self._held) - begun_length(self._held, self.OPENING)
        return len(self._held[:opened].rstrip())


class JsonToolCalls:
    """An answer that is nothing but JSON: one call, or a list of them, as Llama 3 writes.

    An answer that begins otherwise is text, and passed on as it comes.

    Args:
        names: of the tools the model was given.
    """

    is_forced = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: str | None = ""

    def push(self, text: str) -> ParsedText:
        """See ToolCallParser."""
        if self._held is None:
            return ParsedText(text)
        self._held += text
        if not self._held.strip() or self._held.lstrip()[0] in "{[":
            return ParsedText()
        text, self._held = self._held, None
        return ParsedText(text)

    def flush(self) -> ParsedText:
        """See ToolCallParser."""
        text, self._held = self._held or "", None
        data = _loads(text)
        items = data if isinstance(data, list) else [data]
        calls = [_call_of(index, item, self._names) for index, item in enumerate(items)]
        found = tuple(call for call in calls if call is not None)
        # All or nothing: a half of the JSON is of use to nobody.
        return ParsedText("", found) if found and len(found) == len(items) else ParsedText(text)


class NamedToolCall:
    """An answer that is the arguments of one function, because the client chose it.

    Args:
        name: of the function.
    """

    is_forced = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = ""

    def push(self, text: str) -> ParsedText:
        """See ToolCallParser."""
        self._held += text
        return ParsedText()

    def flush(self) -> ParsedText:
        """See ToolCallParser."""
        text, self._held = self._held, ""
        if not isinstance(_loads(text), dict):
            return ParsedText(text)
        return ParsedText("", (ToolCall(0, self._name, text),))


class FirstCallAlone:
    """What another parser reads, but for the calls after the first: the client takes one at a time.

    Args:
        parser: reads the answer.
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._has_called = False

    @property
    def is_forced(self) -> bool:
        """See ToolCallParser."""
        return self._parser.is_forced

    def push(self, text: str) -> ParsedText:
        """See ToolCallParser."""
        return self._limited(self._parser.push(text))

    def flush(self) -> ParsedText:
        """See ToolCallParser."""
        return self._limited(self._parser.flush())

    def _limited(self, parsed: ParsedText) -> ParsedText:
        calls = () if self._has_called else parsed.calls[:1]
        self._has_called = self._has_called or bool(calls)
        return ParsedText(parsed.text, calls)
