"""Grammars by llguidance: from a schema, an expression or a list to the tokens that may come next.

Masks are exact, token by token; a keyword the library does not know is refused, not ignored. A text
ends with an end-of-sequence token of the model. To the library that is one of our own, behind the
tokenizer's last, so that a model may have several and its tokenizer know none of them.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deployments.execution.grammar import (
    CachingCompiler,
    GrammarCompiler,
    GrammarStuck,
    NoGrammars,
    refuse_grammar,
)
from deployments.protocol import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 64 * 1024
"""Compiling takes seconds from here on; the worst case grows with the square."""
_MAX_MESSAGE_CHARS = 300
_LEXER_FUEL = 200_000
"""Bounds the effort of compiling, to less than a second; the library's own bound is five times
that, of which a nest of counted repeats takes seconds."""
_JSON_OPTIONS: JsonCompileOptions = {
    # Bounded, or a small model may write blanks until its tokens are used up.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}",
    "lenient": False,  # a schema must not switch off the refusal of what is not enforced
}
_END = "<|chunkserve end of grammar|>"


def make_grammar_compiler(
    tokenizer_files: Mapping[str, bytes], vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarCompiler:
    """The compiler for a model: a caching one, or one that says what is missing."""
    if importlib.util.find_spec("llguidance") is None:
        return NoGrammars(
            "structured output is not installed here; the operator can add it by "
            "pip install 'chunkserve[structured]'"
        )
    if "tokenizer.json" not in tokenizer_files:
        return NoGrammars("structured output needs the model's tokenizer.json, which is missing")
    if not eos_token_ids:
        return NoGrammars("structured output needs an end-of-sequence token; this model has none")
    return CachingCompiler(
        LlguidanceCompiler(tokenizer_files["tokenizer.json"].decode(), vocab_size, eos_token_ids)
    )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as the library knows them."""

    tokenizer: LLTokenizer
    end_token_id: int
    """Ends a text in the library's eyes; may lie beyond the model's vocabulary."""
    size: int
    """Of the model, which may pad its tokenizer's, or lack the end of it."""
    eos_token_ids: Sequence[int]

    @classmethod
    def read(cls, tokenizer_json: str, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """From the text of a tokenizer.json; takes seconds for a large one.

        Raises:
            GrammarStuck: the tokenizer has no number free for the library's own token.
        """
        from llguidance import LLTokenizer

        tokenizer = Tokenizer.from_str(tokenizer_json)
        taken = set(tokenizer.get_vocab().values())
        tokenizer.add_special_tokens([_END])
        end = tokenizer.token_to_id(_END)
        if end is None or end in taken:
            raise GrammarStuck("structured output does not know this model's tokenizer")
        return cls(LLTokenizer(tokenizer.to_str(), eos_token=end), end, size, list(eos_token_ids))


class LlguidanceCompiler:
    """Compiles grammars for one vocabulary, which is read at the first grammar.

    Args:
        tokenizer_json: the tokenizer's text.
        vocab_size: of the model.
        eos_token_ids: of the model, at least one.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._read = lambda: Vocabulary.read(tokenizer_json, vocab_size, eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> LlguidanceGrammar:
        """See `GrammarCompiler`."""
        from llguidance import LLMatcher

        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise refuse_grammar(
                f"{len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed"
            )
        source = _source_of(grammar)
        try:
            vocabulary = self._vocabulary_once()
            matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=_limits())
            # The first mask may be dearer than the rest of compiling; copies share it.
            LlguidanceMatcher(matcher, vocabulary).find_allowed(())
        except GrammarStuck as error:
            raise refuse_grammar(f"cannot be compiled: {error}") from error
        return LlguidanceGrammar(matcher, vocabulary)

    def _vocabulary_once(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read()
            return self._vocabulary


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)


def _source_of(grammar: Grammar) -> str:
    """The grammar in the library's own form.

    Raises:
        RequestRefused: it is not even well-formed.
    """
    from llguidance import LLMatcher

    choices = _choices_of(grammar) if grammar.kind == "choice" else []
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    try:
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        if grammar.kind == "choice":
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}")
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    except ValueError as error:  # also a text that is no Unicode
        raise refuse_grammar(_one_line(str(error))) from error


def _choices_of(grammar: Grammar) -> list[str]:
    try:
        choices = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise refuse_grammar(f"must be a list in JSON: {error}") from error
    is_list = isinstance(choices, list) and len(choices) > 0
    if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
        raise refuse_grammar("must be a list of strings, none of them empty")
    return list(choices)


def _one_line(message: str) -> str:
    return " ".join(message.split())[:_MAX_MESSAGE_CHARS]


class LlguidanceGrammar:
    """A compiled grammar; `matcher` stands at its beginning and is only copied."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def start(self) -> LlguidanceMatcher:
        """A matcher of its own."""
        return LlguidanceMatcher(self._matcher.deep_copy(), self._vocabulary)


class LlguidanceMatcher:
    """One text. What it has consumed is compared with the output at each step: it can lag behind,
    and never drift.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._consumed: list[int] = []

    def find_allowed(self, output_token_ids: Sequence[int]) -> Tensor:
        """See `GrammarMatcher`."""
        self._catch_up(list(output_token_ids))
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").astype(bool)
        allowed[self._vocabulary.end_token_id : self._vocabulary.end_token_id + 1] = False
        allowed[self._vocabulary.eos_token_ids] = self._matcher.is_accepting()
        if not allowed.any():
            raise GrammarStuck("the vocabulary has no token that can follow within the grammar")
        return torch.from_numpy(allowed)

    def _catch_up(self, output: list[int]) -> None:
        if self._consumed != output[: len(self._consumed)]:
            self._matcher.reset()
            self._consumed = []
        self._matcher.consume_tokens(output[len(self._consumed) :])
        self._check()
        self._consumed = output

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarStuck(_one_line(self._matcher.get_error()))
