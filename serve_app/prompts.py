"""A prompt as the model reads it: token ids, and what of it the answer repeats.

Owns truncation and echo. All of it blocks and belongs off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from serve_app.detokenizer import IncrementalDetokenizer
from serve_app.served_model import ServedModel
from serve_app.streaming import PromptEcho
from serve_app.tokenization import EncodedText, Tokenizer


@dataclass(frozen=True, slots=True)
class PromptRules:
    """How the prompts of one request are read.

    Args:
        adds_special_tokens: whether a text gets what the model wants around a bare prompt.
        num_kept: only so many of the last tokens are kept; None: all.
        skips_special_tokens: whether special tokens show no text.
        is_echoed: whether the answer repeats the prompt.
        has_logprobs: whether the echo comes with the place of each token.
    """

    adds_special_tokens: bool = True
    num_kept: int | None = None
    skips_special_tokens: bool = True
    is_echoed: bool = False
    has_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt ready for an engine. `detokenizer` stands at its end; fork it for each answer."""

    token_ids: tuple[int, ...]
    detokenizer: IncrementalDetokenizer
    echo: PromptEcho | None = None


def read_prompt(
    model: ServedModel, prompt: str | Sequence[int], rules: PromptRules, param: str = "prompt"
) -> ReadPrompt:
    """A prompt, given as text or token ids, as `rules` have it.

    Raises:
        RequestRefused: it is empty, too long or has ids the model lacks; names `param`.
    """
    encoded: EncodedText | None = None
    if not isinstance(prompt, str):
        all_ids = list(prompt)
    elif rules.is_echoed:
        encoded = model.tokenizer.encode_with_offsets(prompt, rules.adds_special_tokens)
        all_ids = encoded.token_ids
    else:
        # A hundred thousand offsets are a hundred thousand objects, made under the interpreter's
        # lock.
        all_ids = model.tokenizer.encode(prompt, rules.adds_special_tokens)
    ids = all_ids if rules.num_kept is None else all_ids[-rules.num_kept :]
    model.check_prompt(ids, param)
    plain = IncrementalDetokenizer(model.tokenizer, ids, rules.skips_special_tokens)
    if not rules.is_echoed:
        return ReadPrompt(tuple(ids), plain)
    if encoded is not None and isinstance(prompt, str) and len(ids) == len(all_ids):
        return ReadPrompt(tuple(ids), plain, _echo_of_text(prompt, encoded, rules))
    echo, detokenizer = _echo_of_ids(model.tokenizer, ids, rules)
    # Within a character the detokenizer has to go on where the echo left it.
    return ReadPrompt(tuple(ids), detokenizer if detokenizer.is_holding else plain, echo)


def _echo_of_text(text: str, encoded: EncodedText, rules: PromptRules) -> PromptEcho:
    # The client's own characters, whatever the tokenizer's normalizer made of them.
    cuts = encoded.character_cuts(len(text))[:-1] if rules.has_logprobs else []
    return PromptEcho(text, tuple(encoded.token_ids), tuple(cuts))


def _echo_of_ids(
    tokenizer: Tokenizer, ids: Sequence[int], rules: PromptRules
) -> tuple[PromptEcho, IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(tokenizer, [], rules.skips_special_tokens)
    if not rules.has_logprobs:
        return PromptEcho(detokenizer.push(ids), tuple(ids)), detokenizer
    texts = [detokenizer.push([token_id]) for token_id in ids]
    ends = list(accumulate(map(len, texts)))
    return PromptEcho("".join(texts), tuple(ids), (0, *ends[:-1])), detokenizer
