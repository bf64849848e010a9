"""Text to token ids and back: the tokenizer of the served model.

Owns what a token is in bytes and characters. Does not know requests, nor how a growing text is
decoded (`detokenizer`). Encoding runs off the event loop, and through `encode_batch`, because
`encode` of the tokenizers library holds the interpreter lock all along (seconds for a prompt of
megabytes) and `encode_batch` does not.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from deployments.protocol import RequestRefused
from serve_app.chat_template import ChatOptions, ChatTemplate, Message

REPLACEMENT = "\ufffd"
_FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text, and for each the (start, end) of its characters in it."""

    token_ids: list[int]
    offsets: list[tuple[int, int]]

    def character_cuts(self, num_characters: int) -> list[int]:
        """For each token the character at which the text before it ends; one more for the end of
        the text. Never falls.

        A character whose bytes lie in several tokens belongs to the first of them. Where offsets
        leave characters out (a space trimmed from its token), they go to the token after the gap.
        """
        cuts = [0]
        for _, end in self.offsets:
            cuts.append(max(cuts[-1], end))
        cuts[-1] = num_characters
        return cuts


class Tokenizer:
    """The served model's tokenizer. Thread-safe: nothing changes after construction.

    Args:
        backend: the tokenizer itself.
        chat: renders conversations; None if the model has no chat template.
    """

    def __init__(self, backend: FastTokenizer, chat: ChatTemplate | None) -> None:
        self._backend = backend
        self._chat = chat
        decoders = _decoder_types(backend)
        self._is_byte_level = "ByteLevel" in decoders
        self._has_byte_fallback = "ByteFallback" in decoders
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
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
        return cls(loaded.backend_tokenizer, ChatTemplate(loaded) if has_template else None)

    @property
    def chat(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            RequestRefused: it has none.
        """
        if self._chat is None:
            message = "this model has no chat template; use /v1/completions"
            raise RequestRefused.invalid("messages", message)
        return self._chat

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

    def apply_chat_template(
        self,
        messages: list[Message],
        options: ChatOptions | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation; by default ready for the assistant's next turn.

        Raises:
            RequestRefused: the model has no chat template, or its template refuses these messages.
        """
        text = self.chat.render(messages, options or ChatOptions())
        return self.encode(text, add_special_tokens)

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode`, off the event loop."""
        return await asyncio.to_thread(self.encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        if self._has_byte_fallback:
            return self._decode_pieces(token_ids, skip_special_tokens)
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _decode_pieces(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """`decode` with byte fallback, whose own decoder gives up a whole run of byte tokens for
        one byte in it that is no UTF-8: characters before a half one would turn into U+FFFD.
        """
        pieces: list[str] = []
        run = bytearray()
        for token_id in token_ids:
            if self.is_silent(token_id, skip_special_tokens):
                continue
            byte = self._fallback_byte(token_id)
            if byte is not None:
                run.append(byte)
                continue
            # One piece a character: none of them can be taken for a byte token.
            pieces.extend(run.decode(errors="replace"))
            run.clear()
            pieces.append(self.entry(token_id))
        pieces.extend(run.decode(errors="replace"))
        text: str = self._backend.decoder.decode(pieces)
        return text

    def _fallback_byte(self, token_id: int) -> int | None:
        """The byte a token like `<0xE5>` stands for."""
        token = _FALLBACK_BYTE.fullmatch(self.entry(token_id))
        return int(token[1], 16) if token else None

    async def decode_async(self, token_ids: Sequence[int]) -> str:
        """The text of token ids with their special tokens, off the event loop."""
        return await asyncio.to_thread(self._decode_all, token_ids)

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        if self._has_byte_fallback:
            return self.decode(token_ids, skip_special_tokens=False)
        # decode() of many ids would hold the interpreter lock; decode_batch() does not.
        texts: list[str] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)
        return texts[0]

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether a token never shows in text: special and skipped, or an id the model has and the
        tokenizer lacks.
        """
        is_skipped = skip_special_tokens and token_id in self._skipped_ids
        return is_skipped or self._backend.id_to_token(token_id) is None

    def entry(self, token_id: int) -> str:
        """A token as the vocabulary writes it (`Ġtime`, `▁time`, `<0xE5>`)."""
        return self._backend.id_to_token(token_id) or f"<{token_id}>"

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token written exactly so."""
        return self._special_ids.get(text)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Exactly the bytes a token adds to the text, so that those of all tokens concatenate to
        its UTF-8.

        Silent tokens add none.
        """
        if self.is_silent(token_id, skip_special_tokens):
            return b""
        if token_id in self._added:
            # These stand in the vocabulary as plain text.
            return self._added[token_id].encode()
        token = self.entry(token_id)
        if self._is_byte_level:
            return _byte_level_bytes(token)
        byte = self._fallback_byte(token_id)
        if byte is not None:
            return bytes([byte])
        return token.replace("\u2581", " ").encode()

    def token_name(self, token_id: int) -> str:
        """How a token is shown on its own: its text, `bytes:\\xNN…` for half a character, its name
        if silent.
        """
        raw = self.token_bytes(token_id, skip_special_tokens=False)
        try:
            return raw.decode() or self.entry(token_id)
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
        # Not written in the byte alphabet, so it is plain text.
        return token.encode()
