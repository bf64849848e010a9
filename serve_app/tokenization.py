"""Text to token ids and back: the tokenizer of the served model, its chat template, and incremental
detokenizing.

Owns exactness: no character is ever cut, nothing of the prompt leaks into the output. Does not know
requests. Encoding runs off the event loop, and through `encode_batch`, because `encode` of the
tokenizers library holds the interpreter lock all along (seconds for a prompt of megabytes) and
`encode_batch` does not.
"""

from __future__ import annotations

import asyncio
import json
import os.path
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jinja2
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from deployments.protocol import RequestRefused

REPLACEMENT = "\ufffd"


class ChatRenderer(Protocol):
    """What is needed of a Hugging Face tokenizer beside its fast backend."""

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text, and for each the (start, end) of its characters in it."""

    token_ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """The served model's tokenizer. Thread-safe: nothing changes after construction.

    Args:
        backend: the tokenizer itself.
        chat: renders conversations; None if the model has no chat template.
    """

    def __init__(self, backend: FastTokenizer, chat: ChatRenderer | None) -> None:
        self._backend = backend
        self._chat = chat
        self._is_byte_level = "ByteLevel" in _decoder_types(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self._skipped_ids = frozenset(self._special_ids.values())

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Build from the files of a saved tokenizer, by name; never reads the network.

        Raises:
            ValueError: there is no tokenizer.json among them, or it cannot be read.
        """
        if "tokenizer.json" not in files:
            names = ", ".join(sorted(files)) or "nothing"
            raise ValueError(f"the model card has no tokenizer.json, only: {names}")
        # Not AutoTokenizer: it imports torch (seconds and 300 MB in every ingress process) to read
        # the same file.
        from transformers import PreTrainedTokenizerFast

        with tempfile.TemporaryDirectory(prefix="chunkserve-tokenizer-") as folder:
            for name, content in files.items():
                Path(folder, Path(name).name).write_bytes(content)
            loaded = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        has_template = bool(getattr(loaded, "chat_template", None))
        return cls(loaded.backend_tokenizer, loaded if has_template else None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with `add_special_tokens`, what the model wants around a bare prompt
        (BOS).
        """
        return list(self._encoding(text, add_special_tokens).ids)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> EncodedText:
        """Token ids of a text and where in it they come from."""
        encoding = self._encoding(text, add_special_tokens)
        return EncodedText(list(encoding.ids), list(encoding.offsets))

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn.

        Raises:
            RequestRefused: the model has no chat template, or its template refuses these messages.
        """
        if self._chat is None:
            message = "this model has no chat template; use /v1/completions"
            raise RequestRefused.invalid("messages", message)
        try:
            text = self._chat.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # Templates fail in all these ways on conversations they were not written for.
            message = f"the model's chat template refuses these messages: {error}"
            raise RequestRefused.invalid("messages", message) from error
        return self.encode(text, add_special_tokens=False)

    async def encode_async(self, text: str) -> list[int]:
        """`encode` of a bare prompt, off the event loop."""
        return await asyncio.to_thread(self.encode, text)

    async def apply_chat_template_async(self, messages: list[dict[str, Any]]) -> list[int]:
        """`apply_chat_template`, off the event loop."""
        return await asyncio.to_thread(self.apply_chat_template, messages)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def is_silent(self, token_id: int) -> bool:
        """Whether a token never shows in text: special, or an id the model has and the tokenizer
        lacks.
        """
        return token_id in self._skipped_ids or self._backend.id_to_token(token_id) is None

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token written exactly so."""
        return self._special_ids.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly the bytes a token adds to the text, so that those of all tokens concatenate to
        its UTF-8.

        Silent tokens add none.
        """
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._skipped_ids:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def token_name(self, token_id: int) -> str:
        """How a token is shown on its own: its text, `bytes:\\xNN…` for half a character, its name
        if silent.
        """
        if self.is_silent(token_id):
            return self._backend.id_to_token(token_id) or f"<{token_id}>"
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _decoder_types(backend: FastTokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {state["type"]} | {part["type"] for part in state.get("decoders", ())}


def _byte_of_char() -> dict[str, int]:
    # GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 in
    # order.
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        # An added token stands in the vocabulary as plain text.
        return token.encode()


class IncrementalDetokenizer:
    """The text of a growing list of output tokens, as deltas that concatenate to the text of the
    whole.

    Decodes a short window before and after the new tokens and takes the difference, so it needs to
    know nothing of how the tokenizer writes spaces or bytes, and the cost of a token does not grow
    with the output.

        ids    [ t t t t | t t t | n n ]
                 prefix    read          prefix: start of the window
                 shown = text(prefix:read), was emitted or belongs to the prompt
                 delta = text(prefix:) beyond what it shares with `shown`

    A window that ends in U+FFFD may end within a character and is held back.
    """

    NUM_CONTEXT_TOKENS = 8
    """Of the prompt's tail: enough for a character's bytes and what a decoder does at the start of
    a text.
    """
    MAX_HELD_TOKENS = 16
    """More tokens than this are no unfinished character but bytes that are none: they are shown as
    U+FFFD.
    """
    MAX_CHARACTER_TOKENS = 3
    """An unfinished character has at most three of its four bytes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        tail = [
            token_id
            for token_id in prompt_token_ids[-4 * self.NUM_CONTEXT_TOKENS :]
            if self._shows(token_id)
        ]
        self._ids = tail[-self.NUM_CONTEXT_TOKENS :]
        self._num_read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; may be empty."""
        self._ids.extend(token_id for token_id in token_ids if self._shows(token_id))
        num_held = len(self._ids) - self._num_read
        if num_held == 0:
            return ""
        text = self._decode(len(self._ids))
        if not text.endswith(REPLACEMENT):
            return self._emit(text, len(self._ids))
        if num_held <= self.MAX_HELD_TOKENS:
            return ""
        settled = len(self._ids) - self.MAX_CHARACTER_TOKENS
        return self._emit(os.path.commonprefix([self._decode(settled), text]), settled)

    def flush(self) -> str:
        """The text still held back, once no token will follow; the second call returns nothing."""
        if len(self._ids) == self._num_read:
            return ""
        return self._emit(self._decode(len(self._ids)), len(self._ids))

    def _emit(self, text: str, num_read: int) -> str:
        shown = os.path.commonprefix([self._decode(self._num_read), text])
        delta = text[len(shown) :]
        if delta or num_read - self._num_read > self.MAX_HELD_TOKENS:
            # What was read becomes the context of what comes next; what was context has done its
            # part.
            del self._ids[: self._num_read]
            self._num_read = num_read - self._num_read
        return delta

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[:end], skip_special_tokens=self._skips)

    def _shows(self, token_id: int) -> bool:
        return not (self._skips and self._tokenizer.is_silent(token_id))
