"""The prompts of a load: by the model's tokenizer if there is one, of plain words if not.

Owns in which form a prompt is sent. What prompts say is `prompts`'.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from loadtest.prompts import PromptMaker
from loadtest.trace import TraceRequest
from loadtest.words import WORDS

MAX_TEMPLATE_TOKENS = 512
"""What is more than this is no template around a message, but another tokenizer."""


class Prompts(Protocol):
    """Makes prompts of wanted lengths."""

    def prompt(self, request: TraceRequest, number: int) -> str | Sequence[int]:
        """The prompt of the request of this number; the same for the same number and request."""

    def fitted(self, request: TraceRequest, num_counted: int) -> Prompts:
        """The same prompts, so that the server counts what was wanted.

        Args:
            request: one whose prompt was sent.
            num_counted: tokens that the server counted of it.
        """


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """Prompts of simple words, each about one token in English vocabularies; for a target whose
    tokenizer is not at hand. They differ within their first words, and share no prefix.

    Args:
        seed: of the words.
    """

    seed: int

    def prompt(self, request: TraceRequest, number: int) -> str:
        """So many words as the request has prompt tokens."""
        # As text: of a number, Random takes the absolute value, and -1 would say what 1 says.
        chance = random.Random(f"{self.seed} {number}")
        return "".join(chance.choices(WORDS, k=request.input_length)).lstrip()

    def fitted(self, request: TraceRequest, num_counted: int) -> WordPrompts:
        """The same: what a word is to the server is not known."""
        return self


@dataclass(frozen=True, slots=True)
class TokenIdPrompts:
    """Prompts as token ids; for tokenizers whose text would not come back as it was cut."""

    maker: PromptMaker

    def prompt(self, request: TraceRequest, number: int) -> list[int]:
        """Exactly so many token ids as the request has prompt tokens."""
        return self.maker.token_ids(request, number)

    def fitted(self, request: TraceRequest, num_counted: int) -> TokenIdPrompts:
        """The same: ids are counted as they are."""
        return self


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Prompts as real text.

    Args:
        maker: cuts them.
        num_template_tokens: what the server puts around a text; 0: the tokenizer's own special
            tokens.
    """

    maker: PromptMaker
    num_template_tokens: int = 0

    def prompt(self, request: TraceRequest, number: int) -> str:
        """A text of which the server counts so many tokens as the request has."""
        return self.maker.text(request, number, self.num_template_tokens)

    def fitted(self, request: TraceRequest, num_counted: int) -> TextPrompts:
        """The same with what this server puts around a text: its chat template's tokens."""
        assumed = self.num_template_tokens or self.maker.num_special_tokens
        num_around = num_counted - max(1, request.input_length - assumed)
        if not 0 < num_around <= MAX_TEMPLATE_TOKENS:
            return self
        return replace(self, num_template_tokens=num_around)


def sendable_prompts(maker: PromptMaker, is_chat: bool) -> Prompts:
    """The prompts that a maker makes, in the form that comes back to the server as they were cut.

    Args:
        maker: of the model's tokenizer.
        is_chat: whether they are sent in chats, which take text alone.
    """
    if is_chat or maker.has_exact_text():
        return TextPrompts(maker)
    return TokenIdPrompts(maker)
