"""Prompts of real text: exact lengths, and who shares what."""

from __future__ import annotations

import random
from functools import cache

import pytest
from tokenizers import Tokenizer, models

from loadtest.prompts import PromptMaker, parse_languages
from loadtest.tokenized_text import LANGUAGES, PromptError, read_units
from loadtest.trace import TraceRequest
from tests.unit.made_tokenizers import KINDS, made_tokenizer

LENGTHS = (1, 2, 3, 7, 64, 511, 512, 513, 3000, 20_000)


@cache
def made_prompts(kind: str) -> PromptMaker:
    return PromptMaker(made_tokenizer(kind))


def request(input_length: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(0.0, input_length, 1, hash_ids)


def some_requests() -> list[TraceRequest]:
    chance = random.Random(5)
    plain = [request(length) for length in LENGTHS]
    shared = [request(n, *chance.sample(range(99), -(-n // 512))) for n in LENGTHS]
    return plain + shared + [request(2000, 7), request(100, 1, 2, 3)]


def num_shared(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    shortest = min(len(first), len(second))
    return next((place for place, (one, other) in pairs if one != other), shortest)


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_are_as_many_as_asked_for(kind: str) -> None:
    """A prompt is a token longer or shorter than the trace says."""
    for number, each in enumerate(some_requests()):
        assert len(made_prompts(kind).token_ids(each, number)) == each.input_length


@pytest.mark.parametrize("kind", KINDS)
def test_text_has_as_many_tokens_as_asked_for_once_it_is_tokenized_again(kind: str) -> None:
    """Words run together at a seam, BOS is forgotten, or the ids are of another text."""
    prompts, tokenizer = made_prompts(kind), made_tokenizer(kind)
    assert prompts.has_exact_text()
    for number, each in enumerate(some_requests()):
        ids = tokenizer.encode(prompts.text(each, number)).ids
        assert len(ids) == max(each.input_length, 1 + prompts.num_special_tokens)
        if not prompts.num_special_tokens:
            assert ids == prompts.token_ids(each, number)


def test_a_chat_template_has_its_place() -> None:
    """A chat prompt is longer than asked for by the tokens of its template."""
    text = made_prompts("gpt2").text(request(300), 0, num_template_tokens=21)
    assert len(made_tokenizer("gpt2").encode(text).ids) == 279


@pytest.mark.parametrize("kind", KINDS)
def test_equal_hash_ids_give_equal_prefixes_and_nothing_more(kind: str) -> None:
    """A prefix cache finds less than the trace shares, or more."""
    prompts = made_prompts(kind)
    first = prompts.token_ids(request(2000, 1, 2, 3, 4), 0)
    second = prompts.token_ids(request(1800, 1, 2, 9, 4), 1)
    assert num_shared(first, second) == 1024
    assert num_shared(first, prompts.token_ids(request(2000, 1, 2), 2)) == 1024


def test_blocks_of_a_scaled_trace_are_as_long_as_it_says() -> None:
    """A trace with blocks of 26 tokens is sent with blocks of 512: all of a prompt is shared."""
    prompts = PromptMaker(made_tokenizer("gpt2"), hash_block_tokens=26)
    first = prompts.token_ids(request(100, 1, 2, 3, 4), 0)
    assert num_shared(first, prompts.token_ids(request(90, 1, 2, 9, 8), 1)) == 52
    assert len(first) == 100


def test_text_shares_the_prefix_that_its_tokens_share() -> None:
    """Equal hash ids share nothing once a server has put BOS before the text."""
    prompts, tokenizer = made_prompts("llama2"), made_tokenizer("llama2")
    first, second = (
        tokenizer.encode(prompts.text(each, number)).ids
        for number, each in enumerate([request(2000, 1, 2, 3, 4), request(1800, 1, 2, 9, 4)])
    )
    assert num_shared(first, second) == 1024


def test_different_requests_differ_from_their_first_token() -> None:
    """Requests that share nothing hit each other's cache."""
    prompts = made_prompts("gpt2")
    num_requests = prompts.num_leads // 2
    assert num_requests > 100
    own = {prompts.token_ids(request(1), number)[0] for number in range(num_requests)}
    assert len(own) == num_requests
    blocks = {prompts.token_ids(request(1, number), 0)[0] for number in range(num_requests)}
    assert len(blocks) == num_requests
    assert not own & blocks


def test_more_requests_than_words_differ_in_their_second_token() -> None:
    """A long run repeats its prompts, so that its second half comes from the cache."""
    prompts = made_prompts("gpt2")
    num_requests = 3 * prompts.num_leads
    begins = {tuple(prompts.token_ids(request(2), number)) for number in range(num_requests)}
    assert len(begins) == num_requests


def test_the_seed_makes_the_prompts() -> None:
    """A run cannot be repeated, or every run says the same and hits the cache of the last."""
    tokenizer = made_tokenizer("gpt2")
    again, other = PromptMaker(tokenizer, seed=0), PromptMaker(tokenizer, seed=1)
    ids = made_prompts("gpt2").token_ids(request(300), 5)
    assert again.token_ids(request(300), 5) == ids
    assert num_shared(other.token_ids(request(300), 5), ids) < 16


@pytest.mark.parametrize(("language", "sign"), [("en", "the"), ("zh", "，"), ("emoji", "face")])
def test_each_language_is_its_text(language: str, sign: str) -> None:
    """Chinese is asked for and English sent."""
    prompts = PromptMaker(made_tokenizer("gpt2"), parse_languages(language))
    text = prompts.text(request(3000), 0)
    assert text.count(sign) > 5
    units = set(read_units(language))
    # All but the two words that tell this prompt, and what fills its last tokens.
    assert sum(unit not in units for unit in text.split()) < 20


def test_all_texts_ship() -> None:
    """A text is left out of the package."""
    for language in LANGUAGES:
        assert len(read_units(language)) > 1000


@pytest.mark.parametrize("text", ["", "fr", "en,fr:2", "en:x", "en:-1", "en:0", "en:nan"])
def test_bad_languages_are_told(text: str) -> None:
    """A language that is not there is left out of the mix."""
    with pytest.raises(PromptError, match="as in en:6,zh:3"):
        parse_languages(text)


def test_a_tokenizer_without_words_is_told() -> None:
    """Prompts are made of nothing, or a division by zero ends the run."""
    letters = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    with pytest.raises(PromptError, match="no words of one token"):
        PromptMaker(letters)
