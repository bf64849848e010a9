"""A load's prompts are as long as asked for by the server's own count, or say that they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.load_prompts import (
    TextPrompts,
    TokenIdPrompts,
    WordPrompts,
    make_prompts,
)
from loadtest.tokenizer_source import TokenizerError
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
def test_a_tokenizer_makes_exact_prompts(kind: str, is_chat: bool, tmp_path: Path) -> None:
    """Prompts are longer than the trace says once the server adds its chat template."""
    tokenizer = made_tokenizer(kind)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = make_prompts(str(tmp_path), ENGLISH, 0, is_chat)
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


def test_a_server_with_another_tokenizer_is_not_fitted(tmp_path: Path) -> None:
    """Prompts shrink to nothing where the server counts ten times as many tokens."""
    made_tokenizer(KINDS[0]).save(str(tmp_path / "tokenizer.json"))
    prompts = make_prompts(str(tmp_path), ENGLISH, 0, is_chat=True)
    assert prompts.fitted(REQUEST, 1000) == prompts
    assert prompts.fitted(REQUEST, 50) == prompts


def test_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    """A wrong path is looked up at the hub, or ends in a traceback."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name in ("/nowhere/at/all", str(tmp_path / "empty"), str(tmp_path)):
        with pytest.raises(TokenizerError, match="--tokenizer") as error:
            make_prompts(name, ENGLISH, 0, is_chat=False)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_prompts_sent_before_a_load_are_none_of_its_own(seed: int) -> None:
    """The first try and the warm-ups, whose numbers are negative, leave prompts of the load in the
    prefix cache, and its TTFT is that of a hit.
    """
    prompts, request = WordPrompts(seed), TraceRequest(0.0, 64, 1)
    before = {prompts.prompt(request, -number) for number in range(1, 50)}
    assert not before & {prompts.prompt(request, number) for number in range(50)}
