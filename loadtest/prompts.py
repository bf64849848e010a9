"""Prompts of real text, of exactly the token length that a trace asks for.

Owns who shares what: equal hash ids give equal tokens at equal places, and nothing else does.

    hash_ids (0, 14), 700 tokens      [ block 0: 512 tokens | block 14: 188 tokens ]
    no hash_ids, request number 3     [ own text of request 3: 700 tokens          ]

Each stretch begins with a word or two that no other has (its lead), so that prompts that share
nothing differ from their first token on. Does not know the server or the time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from tokenizers import Tokenizer

from loadtest.tokenized_text import (
    LANGUAGES,
    Passage,
    PromptError,
    TokenizedText,
    read_units,
    tokens_after_space,
)
from loadtest.trace import HASH_BLOCK_TOKENS, TraceRequest

DEFAULT_LANGUAGES: Mapping[str, float] = {"en": 6.0, "zh": 3.0, "emoji": 1.0}
_MIN_LEAD_LETTERS = 2


@dataclass(frozen=True, slots=True)
class Lead:
    """A word that is one token, at the start of a text and within it."""

    word: str
    id_at_start: int
    id_after_space: int


def parse_languages(text: str) -> dict[str, float]:
    """From `en:6,zh:3,emoji:1`, or names alone for equal shares.

    Raises:
        PromptError: it is not of that form, or a language is not known.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        try:
            weights[name] = float(weight or 1.0)
        except ValueError:
            weights[name] = -1.0
    _check_languages(weights)
    return weights


def _check_languages(weights: Mapping[str, float]) -> None:
    known = ", ".join(LANGUAGES)
    if not weights or any(name not in LANGUAGES for name in weights):
        raise PromptError(f"no languages {', '.join(weights)}: choose of {known}, as in en:6,zh:3")
    if min(weights.values()) < 0 or not 0 < sum(weights.values()) < float("inf"):
        raise PromptError("languages need weights of 0 or more, one above 0, as in en:6,zh:3")


class PromptMaker:
    """Makes the prompts of one run. Thread-safe: nothing changes after construction.

    Prompts that share no hash id differ in their first token as long as there are fewer than
    `num_leads / 2` of them, and in their first two tokens up to half of the square of that.

    Args:
        tokenizer: that of the model.
        languages: shares of the texts that stretches are cut from, in any unit.
        seed: equal ones give equal prompts.
        hash_block_tokens: tokens that a hash id of a request stands for.

    Raises:
        PromptError: a language is not known, or the tokenizer has no words of one token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        languages: Mapping[str, float] = DEFAULT_LANGUAGES,
        seed: int = 0,
        hash_block_tokens: int = HASH_BLOCK_TOKENS,
    ) -> None:
        _check_languages(languages)
        self._hash_block_tokens = hash_block_tokens
        self._tokenizer = tokenizer
        self._seed = seed
        self._leads = _find_leads(tokenizer, seed)
        words = [lead.word for lead in self._leads]
        names = [name for name, weight in languages.items() if weight > 0]
        self._texts = [TokenizedText(tokenizer, read_units(name), words) for name in names]
        self._weights = [languages[name] for name in names]
        self.num_special_tokens = len(tokenizer.encode("").ids)
        """That a server puts around a prompt that comes as text, such as BOS."""

    @property
    def num_leads(self) -> int:
        """Different first tokens."""
        return len(self._leads)

    def has_exact_text(self) -> bool:
        """Whether text, tokenized anew, has exactly as many tokens as was asked for. Takes a
        moment: all the texts are tokenized as a whole.

        Without, send token ids; those are always exact.
        """
        return all(text.is_exact(self._tokenizer) for text in self._texts)

    def token_ids(self, request: TraceRequest, number: int) -> list[int]:
        """A prompt of exactly `input_length` tokens, to be sent as token ids.

        Args:
            request: whose prompt it is.
            number: of the request in its run; its own text depends on it.
        """
        return [
            token_id
            for stretch in self._stretches(request, number, request.input_length)
            for token_id in stretch.token_ids
        ]

    def text(self, request: TraceRequest, number: int, num_template_tokens: int = 0) -> str:
        """A prompt to be sent as text. A server that tokenizes it with the same tokenizer counts
        `input_length` tokens, the special ones and those of a chat template included; but there is
        always at least one token of text.

        Args:
            request: whose prompt it is.
            number: of the request in its run; its own text depends on it.
            num_template_tokens: what the server's chat template puts around a message, special
                tokens included; 0: no template, the special tokens of the tokenizer.
        """
        around = num_template_tokens or self.num_special_tokens
        num_tokens = max(1, request.input_length - around)
        return "".join(each.text for each in self._stretches(request, number, num_tokens))

    def _stretches(self, request: TraceRequest, number: int, num_tokens: int) -> Iterator[Passage]:
        # Special tokens come first on the server: its blocks then start where the trace's do.
        room = self._hash_block_tokens - (request.input_length - num_tokens)
        is_first = True
        for hash_id in request.hash_ids:
            length = min(max(room, 1), num_tokens)
            if not length:
                return
            yield self._stretch("block", hash_id, length, is_first)
            num_tokens -= length
            room = self._hash_block_tokens
            is_first = False
        if num_tokens:
            yield self._stretch("own", number, num_tokens, is_first)

    def _stretch(self, kind: str, number: int, num_tokens: int, is_first: bool) -> Passage:
        digest = blake2b(f"{self._seed}:{kind}:{number}".encode(), digest_size=12).digest()
        chance = random.Random(int.from_bytes(digest[:4], "little"))
        source = chance.choices(self._texts, self._weights)[0]
        leads = self._leads_of(2 * number + (kind == "block"))[:num_tokens]
        ids = [lead.id_after_space for lead in leads]
        text = "".join(f" {lead.word}" for lead in leads)
        if is_first:
            ids[0] = leads[0].id_at_start
            text = text[1:]
        place = int.from_bytes(digest[4:], "little")
        rest = source.passage(place, num_tokens - len(leads))
        return Passage(text + rest.text, ids + rest.token_ids)

    def _leads_of(self, number: int) -> list[Lead]:
        count = len(self._leads)
        # Both together are this number's alone up to the square of the count; the second is another
        # word for each number, so that the text reads less like a list.
        places = number, number // count + number + 1
        return [self._leads[place % count] for place in places]


def _find_leads(tokenizer: Tokenizer, seed: int) -> list[Lead]:
    """All words of one token, an even number of them, so that own text and blocks, whose numbers
    are even and odd, never begin alike.
    """
    tokens = tokenizer.decode_batch([[token_id] for token_id in range(tokenizer.get_vocab_size())])
    words = sorted({word for token in tokens if _is_word(word := token.strip())})
    starts = tokenizer.encode_batch(words, add_special_tokens=False) if words else []
    after_space = tokens_after_space(tokenizer, words)
    leads = {
        start.ids[0]: Lead(word, start.ids[0], ids[0])
        for word, start, ids in zip(words, starts, after_space, strict=True)
        if len(start.ids) == 1 and ids is not None and len(ids) == 1
    }
    found = list(leads.values())
    random.Random(seed).shuffle(found)
    if len(found) < 2:
        raise PromptError("this tokenizer has no words of one token: give that of a language model")
    return found[: len(found) // 2 * 2]


def _is_word(text: str) -> bool:
    return len(text) >= _MIN_LEAD_LETTERS and text.isascii() and text.isalpha()
