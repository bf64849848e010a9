"""A load's prompts are as long as asked for by the server's own count, or say that they are not."""

from __future__ import annotations

import pytest

from loadtest.load_prompts import (
    TextPrompts,
    TokenIdPrompts,
    WordPrompts,
    sendable_prompts,
)
from loadtest.prompts import PromptMaker
from loadtest.trace import TraceRequest
from tests.unit.made_tokenizers import KINDS, made_tokenizer

ENGLISH = {"en": 1.0}
REQUEST = TraceRequest(0.0, 100, 10)


def test_prompts_of_words_have_their_length_and_differ_early() -> None:
    """Prompts share a prefix that the server caches, or change when a run is repeated."""
    prompts = WordPrompts(seed=1)
    texts = [prompts.prompt(REQUEST, number) for number in range(20)]
    assert {len(text.split()) for text in texts} == {100}
    assert len({tuple(text.split()[:12]) for text in texts}) == 20
    assert texts[3] == WordPrompts(seed=1).prompt(REQUEST, 3) != WordPrompts(2).prompt(REQUEST, 3)
    assert prompts.fitted(REQUEST, 123) == prompts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_tokenizer_makes_exact_prompts(kind: str, is_chat: bool) -> None:
    """Prompts are longer than the trace says once the server adds its chat template."""
    tokenizer = made_tokenizer(kind)
    prompts = sendable_prompts(PromptMaker(tokenizer, ENGLISH), is_chat)
    if isinstance(prompts, TokenIdPrompts):
        assert not is_chat
        assert len(prompts.prompt(REQUEST, 1)) == 100
        assert prompts.fitted(REQUEST, 123) == prompts
        return
    assert isinstance(prompts, TextPrompts)
    num_template_tokens = 9

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids) + num_template_tokens

    fitted = prompts.fitted(REQUEST, count(prompts.prompt(REQUEST, -1)))
    if prompts.maker.has_exact_text():
        assert [count(fitted.prompt(REQUEST, number)) for number in range(5)] == [100] * 5


def test_a_server_with_another_tokenizer_is_not_fitted() -> None:
    """Prompts shrink to nothing where the server counts ten times as many tokens."""
    prompts = sendable_prompts(PromptMaker(made_tokenizer(KINDS[0]), ENGLISH), is_chat=True)
    assert prompts.fitted(REQUEST, 1000) == prompts
    assert prompts.fitted(REQUEST, 50) == prompts
