"""The text of output tokens as they come: exact deltas of a text that is still growing.

Owns the window that is decoded again for each token. Does not know requests or stop strings.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from serve_app.tokenization import REPLACEMENT, Tokenizer


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

    @property
    def is_holding(self) -> bool:
        """Whether the last tokens may be the beginning of a character."""
        return len(self._ids) > self._num_read

    def fork(self) -> IncrementalDetokenizer:
        """Another one at the same place in the same text."""
        other = IncrementalDetokenizer(self._tokenizer, (), self._skips)
        other._ids, other._num_read = list(self._ids), self._num_read
        return other

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
        shown = self._decode(self._num_read)
        if not text.startswith(shown):
            shown = os.path.commonprefix([shown, text])
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
        return not self._tokenizer.is_silent(token_id, self._skips)
