"""The texts that ship with `loadtest`, cut into units whose tokens do not depend on their
neighbours.

A unit is a word, a Chinese clause or an emoji, and stands after a space. Tokenizers split text
before a space that is followed by something, so the tokens of a passage are those of its units,
one after the other:

    text    " We" " the" " People" " 學而時習之，" ...
    tokens   [a]   [b]     [c]      [d, e, f, g]  ...    passage of 7 tokens: all four units

Owns passages of exactly so many tokens. What a prompt is made of is `prompts`' to say.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.resources import files
from itertools import accumulate
from operator import iconcat

from tokenizers import Tokenizer

LANGUAGES = ("en", "zh", "emoji")

_ANCHOR = "a"
"""What stands before a unit while its tokens are looked up: some tokenizers treat the start of a
text as they treat a space."""
_CLAUSE_END = "，。！？；：、,"
_CLAUSE = re.compile(f"[^{_CLAUSE_END}]+[{_CLAUSE_END}]*[”’」』》]*|[{_CLAUSE_END}]+")
_CHINESE = re.compile("[\u3400-\u9fff]")


class PromptError(ValueError):
    """Prompts that cannot be made with this tokenizer; one line that says what to change."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text and its tokens. It begins with a space."""

    text: str
    token_ids: list[int]


def read_units(language: str) -> list[str]:
    """The words, clauses or emoji of a text that ships with this package.

    Raises:
        PromptError: there is no text of that name.
    """
    if language not in LANGUAGES:
        raise PromptError(f"no text {language!r}: choose of {', '.join(LANGUAGES)}")
    text = (files("loadtest") / "texts" / f"{language}.txt").read_text(encoding="utf-8")
    return [unit for word in text.split() for unit in _units_of(word)]


def _units_of(word: str) -> list[str]:
    return _CLAUSE.findall(word) if _CHINESE.search(word) else [word]


def tokens_after_space(tokenizer: Tokenizer, units: Sequence[str]) -> list[list[int] | None]:
    """The tokens of each unit with the space before it, as within a text; None for a unit that
    changes the token before it.
    """
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids
    encodings = tokenizer.encode_batch(
        [f"{_ANCHOR} {unit}" for unit in units], add_special_tokens=False
    )
    found: list[list[int] | None] = []
    for encoding in encodings:
        ids = list(encoding.ids)
        follows = ids[: len(anchor)] == anchor and len(ids) > len(anchor)
        found.append(ids[len(anchor) :] if follows else None)
    return found


class TokenizedText:
    """A text that gives passages of exactly as many tokens as are asked for.

    Args:
        tokenizer: that of the model.
        units: of the text, in order.
        fillers: words of one token each, for the last tokens of a passage where no unit of the
            text fits.

    Raises:
        PromptError: the tokenizer makes nothing of the text, or there are no fillers.
    """

    def __init__(self, tokenizer: Tokenizer, units: Sequence[str], fillers: Sequence[str]) -> None:
        found = tokens_after_space(tokenizer, units)
        kept = [(unit, ids) for unit, ids in zip(units, found, strict=True) if ids is not None]
        if not kept or not fillers:
            raise PromptError("this tokenizer makes no tokens of the text: choose another text")
        self._units = [unit for unit, _ in kept]
        self._unit_ids = [ids for _, ids in kept]
        self._ends = list(accumulate(len(ids) for ids in self._unit_ids))
        self._by_length = _places_by_length(self._unit_ids)
        self._fillers = self._filler_passages(tokenizer, fillers)
        self._lengths = sorted(self._by_length)

    @property
    def num_units(self) -> int:
        """Places that a passage may start from."""
        return len(self._units)

    @property
    def num_tokens(self) -> int:
        """Of the whole text."""
        return self._ends[-1]

    def passage(self, place: int, num_tokens: int) -> Passage:
        """So many tokens from a unit on, over the end to the start again if need be. Where the
        next unit is too long, shorter ones from elsewhere fill what is left.

        Args:
            place: any whole number; equal ones give passages that begin alike.
            num_tokens: 0 or more.
        """
        start = place % len(self._units)
        units: list[str] = []
        ids: list[int] = []
        while num_tokens > len(ids):
            before = self._ends[start - 1] if start else 0
            end = bisect_right(self._ends, before + num_tokens - len(ids))
            units += self._units[start:end]
            ids = reduce(iconcat, self._unit_ids[start:end], ids)
            if end < len(self._units):
                break
            start = 0
        self._fill(units, ids, num_tokens, place)
        return Passage("".join(f" {unit}" for unit in units), ids)

    def is_exact(self, tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer makes of the text, as a whole, what it makes of its units."""
        ids = tokenizer.encode(
            _ANCHOR + "".join(f" {unit}" for unit in self._units), add_special_tokens=False
        ).ids
        anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids
        return list(ids) == [*anchor, *(each for unit in self._unit_ids for each in unit)]

    def _fill(self, units: list[str], ids: list[int], num_tokens: int, place: int) -> None:
        while (missing := num_tokens - len(ids)) > 0:
            fits = bisect_right(self._lengths, missing)
            if fits:
                places = self._by_length[self._lengths[fits - 1]]
                chosen = places[place % len(places)]
                units.append(self._units[chosen])
                ids += self._unit_ids[chosen]
            else:
                filler = self._fillers[(place + missing) % len(self._fillers)]
                units.append(filler.text)
                ids += filler.token_ids

    @staticmethod
    def _filler_passages(tokenizer: Tokenizer, fillers: Sequence[str]) -> list[Passage]:
        found = tokens_after_space(tokenizer, fillers)
        return [
            Passage(word, ids)
            for word, ids in zip(fillers, found, strict=True)
            if ids is not None and len(ids) == 1
        ]


def _places_by_length(unit_ids: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, ids in enumerate(unit_ids):
        places.setdefault(len(ids), []).append(place)
    return places
