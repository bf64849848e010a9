"""Text out: nothing cut, nothing leaked, nothing lost (public faults B01, B02, B04, B10)."""

from __future__ import annotations

import random

import pytest
from api_doubles import byte_ids, make_tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from serve_app.detokenizer import IncrementalDetokenizer
from serve_app.tokenization import Tokenizer

HARD_TEXT = "ďábel 🌶️ 客单价 👩‍🚀 é"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A tokenizer of the Llama-2 kind: ▁ for a space, <0xNN> for what has no token of its own."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁time", "▁Once", "a", "▁"]
    backend = FastTokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend, chat=None)


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push([token_id]) for token_id in output), detokenizer.flush()]


def test_characters_that_span_tokens_arrive_whole(tokenizer: Tokenizer) -> None:
    """A character whose bytes lie in several tokens arrives as U+FFFD."""
    output = byte_ids(tokenizer, HARD_TEXT)
    deltas = stream(tokenizer, tokenizer.encode("hello"), output)
    assert "".join(deltas) == HARD_TEXT == tokenizer.decode(output)
    assert not any("\ufffd" in delta for delta in deltas)


def test_each_character_arrives_with_its_last_byte(tokenizer: Tokenizer) -> None:
    """Text is held back longer than the character it completes."""
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("hello"))
    assert [detokenizer.push([i]) for i in byte_ids(tokenizer, "a客b")] == ["a", "", "", "客", "b"]


def test_a_prompt_that_ends_within_a_character_does_not_come_back(tokenizer: Tokenizer) -> None:
    """The prompt's text is sent again when its last character was incomplete."""
    raw = "Hello world 🌶".encode()
    prompt = byte_ids(tokenizer, raw[:-2])
    assert stream(tokenizer, prompt, byte_ids(tokenizer, raw[-2:] + b"!")) == ["", "🌶", "!", ""]


def test_a_broken_prompt_character_stays_with_the_prompt(tokenizer: Tokenizer) -> None:
    """The U+FFFD of a character that the output does not complete shows up as output."""
    prompt = byte_ids(tokenizer, "Hello 🌶".encode()[:-2])
    assert "".join(stream(tokenizer, prompt, tokenizer.encode("hello"))) == "hello"


def test_a_real_replacement_character_in_the_prompt_is_not_output(tokenizer: Tokenizer) -> None:
    """A prompt that ends in a genuine U+FFFD has it sent back as output."""
    prompt = byte_ids(tokenizer, "bad \ufffd")
    assert "".join(stream(tokenizer, prompt, byte_ids(tokenizer, "x\ufffdy"))) == "x\ufffdy"


def test_the_first_space_is_kept(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    """The space at the start of the first generated token is dropped."""
    assert (
        stream(tokenizer, tokenizer.encode("Once upon a"), tokenizer.encode(" time"))[0] == " time"
    )
    # Ids of "▁Once" and "▁time".
    assert stream(sentencepiece, [258], [257])[0] == " time"


def test_bytes_of_sentencepiece_tokens_complete_a_character(sentencepiece: Tokenizer) -> None:
    """Byte-fallback tokens are decoded alone and give U+FFFD."""
    output = [byte + 1 for byte in "客👩‍🚀".encode()]
    deltas = stream(sentencepiece, [258], output)
    assert "".join(deltas) == "客👩‍🚀"
    assert b"".join(map(sentencepiece.token_bytes, [257, *output])) == " time客👩‍🚀".encode()


def test_special_and_unknown_ids_show_nothing_and_hold_nothing_back(tokenizer: Tokenizer) -> None:
    """A run of tokens without text makes the window grow, or splits what is around it."""
    end = tokenizer.special_token_id("<|im_end|>")
    assert end is not None
    first, second = byte_ids(tokenizer, "é")
    output = [first, *[end, 319] * 50, second, end]
    assert "".join(stream(tokenizer, tokenizer.encode("hello"), output)) == "é"


def test_endless_invalid_bytes_are_shown_and_forgotten(tokenizer: Tokenizer) -> None:
    """A run of bytes that never becomes a character is held for ever, at a growing cost."""
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("hello"))
    output = byte_ids(tokenizer, b"\xff" * 500 + b"\xf0\x9f\x8c" * 200 + b"ok")
    deltas = [detokenizer.push([token_id]) for token_id in output]
    assert len("".join(deltas[:400])) > 370
    assert len(detokenizer._ids) <= 4 * detokenizer.MAX_HELD_TOKENS
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(output)


def test_any_bytes_in_any_grouping_give_the_text_of_the_whole(tokenizer: Tokenizer) -> None:
    """The streamed text depends on how tokens were grouped, or is not that of the whole."""
    rng = random.Random(7)
    pieces = [
        *(character.encode() for character in HARD_TEXT + "\ufffd"),
        b"\xff",
        b"\xf0\x9f",
        b"\xe5",
    ]
    for _ in range(300):
        output = byte_ids(tokenizer, b"".join(rng.choices(pieces, k=rng.randrange(1, 40))))
        detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("hello"))
        text, rest = "", output
        while rest:
            size = rng.randrange(1, 5)
            text, rest = text + detokenizer.push(rest[:size]), rest[size:]
        assert text + detokenizer.flush() == tokenizer.decode(output)
        assert detokenizer.flush() == ""


def test_the_work_of_a_token_does_not_grow_with_the_output(tokenizer: Tokenizer) -> None:
    """Every token decodes all tokens before it."""
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("hello") * 100)
    for token_id in tokenizer.encode("hello time " * 200):
        detokenizer.push([token_id])
        assert len(detokenizer._ids) <= detokenizer.NUM_CONTEXT_TOKENS + 1


def test_token_bytes_concatenate_to_the_text(tokenizer: Tokenizer) -> None:
    """Text rebuilt from tokens is corrupt where a character straddles them."""
    output = [*byte_ids(tokenizer, HARD_TEXT), *tokenizer.encode("<|im_end|> time é")]
    assert b"".join(map(tokenizer.token_bytes, output)).decode() == tokenizer.decode(output)


def test_token_names_of_half_characters_are_distinct(tokenizer: Tokenizer) -> None:
    """Two different halves of characters have the same name, and one is lost from top_logprobs."""
    names = {tokenizer.token_name(token_id) for token_id in range(256)}
    assert len(names) == 256
    assert tokenizer.token_name(byte_ids(tokenizer, b"\xf0")[0]) == "bytes:\\xf0"
