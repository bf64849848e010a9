"""Text of any language through prompts, streams, stops and logprobs, over a byte-level tokenizer
and one of the sentencepiece kind with byte fallback (public faults B01, B02, B04, B10).
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from api_doubles import (
    CHAT_TEMPLATE,
    SPECIAL,
    ScriptedBackend,
    client_of,
    make_card,
    post,
    post_stream,
    text_of,
    tokenizer_files,
)
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from deployments.protocol import ModelCard
from serve_app.tokenization import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXTS = {
    "czech": "ďábel běžel",
    "chinese": "客单价很高。",
    "japanese": "日本語のテキスト、ｶﾀｶﾅ",
    "korean": "한국어 문장",
    "rare han": "𠮷野家で𩸽",
    "hebrew": "שלום עולם!",
    "arabic": "مرحبا بالعالم، ١٢٣",
    "bidi marks": "abc \u202eשלום\u202c def \u200f\u200e",
    "devanagari": "क्षत्रिय नमस्ते",
    "thai": "ภาษาไทย",
    "combining": unicodedata.normalize("NFD", "ďábel é Å ñ") + " z\u0335\u0321\u0316",
    "zwj emoji": "👩‍🚀👨‍👩‍👧‍👦 🏳️‍🌈 🌶️",
    "flags and tones": "🇨🇿🇯🇵 👍🏽 ☕︎☕️",
    "controls": "a\tb\r\nc\u2028d\u2029e\u0085f\x7f",
    "separators": 'data: x\n\ndata: [DONE]\n\n"\\ </script>',
    "replacement": "a\ufffdb \ufeffc",
}


def sentencepiece_files() -> dict[str, bytes]:
    """The files of a tokenizer of the Llama-2 kind: a few words, and bytes for all else."""
    pieces = ["▁", "▁hello", "▁time", "客", "ש", "é", "!", "a", "b"]
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    backend = FastTokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[1],
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


FILES = {"byte-level": tokenizer_files(), "sentencepiece": sentencepiece_files()}
TOKENIZERS = {kind: Tokenizer.from_files(files) for kind, files in FILES.items()}


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text in the middle of another, one a byte where the tokenizer has bytes."""
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(1, 257)}
    by_bytes |= {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def card_of(kind: str) -> ModelCard:
    plain = make_card(max_model_len=512)
    return ModelCard(plain.name, 512, 320, 4, plain.eos_token_ids, FILES[kind])


def backend_of(kind: str, ids: list[int]) -> ScriptedBackend:
    return ScriptedBackend([[token_id] for token_id in ids], card=card_of(kind))


each_kind = pytest.mark.parametrize("kind", FILES)
each_text = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())


@each_kind
@each_text
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_text_arrives_whole_streamed_and_not(kind: str, text: str, path: str) -> None:
    """A character whose bytes lie in several tokens arrives as U+FFFD, or line separators break
    the event stream.
    """
    chat = {"messages": [{"role": "user", "content": text}]}
    body = {"prompt": text} if path == COMPLETIONS else chat
    ids = spelled(TOKENIZERS[kind], text)
    choice = post(backend_of(kind, ids), path, **body)["choices"][0]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == text
    events = post_stream(backend_of(kind, ids), path, **body)
    assert text_of(events) == text
    parts = [text_of([event, "end"]) for event in events[:-1]]
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@each_kind
@each_text
def test_logprob_bytes_make_up_the_text(kind: str, text: str) -> None:
    """Text rebuilt from the tokens of logprobs is corrupt where a character straddles them."""
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    ids = spelled(TOKENIZERS[kind], text)
    choice = post(backend_of(kind, ids), CHAT, **body)["choices"][0]
    rows = choice["logprobs"]["content"]
    assert bytes(byte for row in rows for byte in row["bytes"]).decode() == text
    assert choice["message"]["content"] == text and len(rows) == len(ids)
    events = post_stream(backend_of(kind, ids), CHAT, **body)
    streamed = [choice["logprobs"] for event in events[:-1] for choice in event["choices"]]
    assert [row for part in streamed if part for row in part["content"]] == rows


@each_kind
@each_text
def test_completion_offsets_point_into_the_text(kind: str, text: str) -> None:
    """text_offset runs backwards or counts bytes."""
    ids = spelled(TOKENIZERS[kind], text)
    choice = post(backend_of(kind, ids), COMPLETIONS, prompt="a", logprobs=0)["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert choice["text"] == text and len(offsets) == len(ids)
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(text)


@each_kind
@each_text
def test_a_prompt_is_echoed_and_chunked_to_the_letter(kind: str, text: str) -> None:
    """The text of a prompt is changed by echo, or characters are split between its chunks."""
    backend = backend_of(kind, spelled(TOKENIZERS[kind], "!"))
    choice = post(backend, COMPLETIONS, prompt=text, echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == text + "!"
    chunks = client_of(backend).post(
        "/chunk", json={"prompt": text, "chunk_size": 3, "overlap_ratio": 0}
    )
    assert "".join(chunk["text"] for chunk in chunks.json()["chunks"]) == text


@each_kind
@each_text
def test_a_stop_string_of_any_script_is_found(kind: str, text: str) -> None:
    """A stop string is found only where it ends with a token, or half a character of it is sent."""
    ids = spelled(TOKENIZERS[kind], f"a{text}b{text}")
    for includes, wanted in ((False, "a"), (True, f"a{text}")):
        body: dict[str, Any] = {"stop": [text], "include_stop_str_in_output": includes}
        choice = post(backend_of(kind, ids), COMPLETIONS, prompt="a", **body)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (wanted, "stop")
        events = post_stream(backend_of(kind, ids), COMPLETIONS, prompt="a", **body)
        assert text_of(events) == wanted


@each_kind
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_of_ids_may_end_within_a_character(kind: str, cut: int) -> None:
    """The prompt is sent again when its last character was incomplete."""
    ids = spelled(TOKENIZERS[kind], "hello 🌶 客!")
    at = len(b"hello ") + 4 - cut
    backend = backend_of(kind, ids[at:])
    assert post(backend, COMPLETIONS, prompt=ids[:at])["choices"][0]["text"] == "🌶 客!"
    echoed = post(backend, COMPLETIONS, prompt=ids[:at], echo=True)["choices"][0]["text"]
    assert echoed == "hello 🌶 客!"


@each_kind
def test_the_first_space_of_an_answer_is_kept(kind: str) -> None:
    """The space at the start of the first generated token is dropped."""
    tokenizer = TOKENIZERS[kind]
    prompt, time = tokenizer.encode("hello"), tokenizer.encode("hello time")[-1:]
    if kind == "sentencepiece":
        # Pieces alone: this tokenizer has no merges.
        prompt, time = [258], [259]
        assert [tokenizer.entry(i) for i in (258, 259)] == ["▁hello", "▁time"]
    answers = [
        post(backend_of(kind, time), COMPLETIONS, prompt=prompt, echo=echo)["choices"][0]["text"]
        for echo in (False, True)
    ]
    assert answers == [" time", "hello time"] == [" time", tokenizer.decode([*prompt, *time])]


@each_kind
def test_byte_tokens_beside_whole_characters_are_one_text(kind: str) -> None:
    """A character written as one token and one written in bytes do not join, or share a name."""
    tokenizer = TOKENIZERS[kind]
    whole = tokenizer.encode("é")[-1]
    assert tokenizer.token_bytes(whole) == "é".encode()
    ids = [whole, *spelled(tokenizer, "é"), whole]
    choice = post(backend_of(kind, ids), COMPLETIONS, prompt="a", logprobs=1)["choices"][0]
    assert choice["text"] == "ééé"
    assert choice["logprobs"]["tokens"] == ["é", "bytes:\\xc3", "bytes:\\xa9", "é"]
