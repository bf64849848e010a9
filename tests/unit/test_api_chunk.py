"""POST /chunk: windows, overlap, new spans and hashes, as this service would cut a prompt now."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_doubles import ScriptedBackend, byte_ids, error_of, make_tokenizer
from fastapi.testclient import TestClient

from deployments.config import IngressConfig, SchedulerConfig, ServiceConfig
from deployments.engine.block_hash import hash_block, root_hash
from serve_app.chunker import AdaptiveChunker, Chunker
from serve_app.ingress import make_api
from serve_app.tokenization import EncodedText

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(make_api(ScriptedBackend(), ServiceConfig()), raise_server_exceptions=False)


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": 5},
        {"chunk_size": 0},
        {"chunk_size": 65},
        {"overlap_ratio": 0.6},
        {"chunk_size": True},
        {"prompt": ""},
    ],
)
def test_bad_chunk_requests_are_named(client: TestClient, bad: dict[str, Any]) -> None:
    """/chunk fails with a 500 on what it cannot cut."""
    (name,) = bad
    assert error_of(client.post("/chunk", json={"prompt": "hi"} | bad), 400)["param"] == name


def test_chunks_cover_the_prompt_in_whole_characters(client: TestClient) -> None:
    """A window's text holds half a character, or windows leave text out."""
    text = "客单价 👩‍🚀 hello" * 3
    num_tokens = len(TOKENIZER.encode(text))
    for size in (1, 2, 5, 7, 64):
        body = {"prompt": text, "chunk_size": size, "overlap_ratio": 0}
        answer = client.post("/chunk", json=body).json()
        assert answer["num_tokens"] == num_tokens
        assert "".join(chunk["text"] for chunk in answer["chunks"]) == text
        assert [chunk["start"] for chunk in answer["chunks"][1:]] == [
            c["end"] for c in answer["chunks"][:-1]
        ]


def test_overlapping_windows_repeat_the_tail_of_the_one_before(client: TestClient) -> None:
    """The overlap shown is not the text that both windows share."""
    body = {"prompt": "abcdefghij" * 3, "chunk_size": 10, "overlap_ratio": 0.2}
    first, second, *_ = client.post("/chunk", json=body).json()["chunks"]
    assert second["num_overlap_tokens"] == 2 and second["start"] == first["end"] - 2
    assert second["text"].startswith(first["text"][-2:])
    assert json.loads(json.dumps(first))["index"] == 0
    assert len(byte_ids(TOKENIZER, first["text"])) == first["end"]


def test_tokens_around_the_prompt_have_no_text() -> None:
    """A token that the tokenizer adds, whose offsets are (0, 0), throws away the text before it."""
    encoded = EncodedText([1, 2, 3, 4], [(0, 1), (0, 0), (1, 2), (0, 0)])
    chunker = Chunker(SchedulerConfig(chunk_size=2, overlap_ratio=0))
    assert [chunk.text for chunk in chunker.describe("ab", encoded).chunks] == ["a", "b"]


@pytest.mark.parametrize("size, ratio", [(5, 0.0), (7, 0.25), (64, 0.5)])
def test_new_spans_partition_the_prompt_and_overlaps_precede_them(
    client: TestClient, size: int, ratio: float
) -> None:
    """A token is computed twice or by nobody, or the overlap shown is not what precedes."""
    body = {"prompt": "客单价 hello" * 4, "chunk_size": size, "overlap_ratio": ratio}
    answer = client.post("/chunk", json=body).json()
    assert (answer["chunk_size"], answer["overlap_ratio"]) == (size, ratio)
    at = 0
    for chunk in answer["chunks"]:
        assert chunk["new"]["start"] == at == chunk["overlap"]["end"]
        assert chunk["overlap"]["start"] == chunk["start"]
        assert chunk["new"]["end"] == chunk["end"]
        assert chunk["num_overlap_tokens"] == at - chunk["start"]
        at = chunk["end"]
    assert at == answer["num_tokens"]


def test_a_hash_covers_the_whole_prefix_however_it_is_cut(client: TestClient) -> None:
    """Two prompts that share a later chunk alone have the same hash for it, or the hash depends on
    the size of the chunks before.
    """
    text = "x" + "hello time " * 8
    ids = TOKENIZER.encode(text)

    def hashes(prompt: str, size: int) -> dict[int, str]:
        body = {"prompt": prompt, "chunk_size": size, "overlap_ratio": 0.2}
        chunks = client.post("/chunk", json=body).json()["chunks"]
        return {chunk["end"]: chunk["hash"] for chunk in chunks}

    found = [hashes(text, size) for size in (3, 6, 9)]
    for by_end in found:
        for end, value in by_end.items():
            assert value == hash_block(root_hash(""), ids[:end]).hex()
    other = hashes("y" + text[1:], 6)
    assert set(other) == set(found[1])
    assert not set(other.values()) & set(found[1].values())


def test_adaptive_sizes_follow_the_median_of_a_window() -> None:
    """The proposal never changes, exceeds the configured size, or remembers for ever."""
    sizes = AdaptiveChunker(max_chunk_size=400, window=4)
    assert sizes.propose() is None
    sizes.observe(1024)
    assert sizes.propose() == 256
    for _ in range(2):
        sizes.observe(1025)
    assert sizes.propose() == 400
    for _ in range(3):
        sizes.observe(10)
    assert sizes.propose() == 256
    assert AdaptiveChunker(max_chunk_size=64).propose() is None


@pytest.mark.parametrize("is_adaptive, wanted", [(False, None), (True, 256)])
def test_the_adaptive_size_travels_with_requests_and_shows_in_chunk(
    is_adaptive: bool, wanted: int | None
) -> None:
    """Adaptive chunk sizes are on without being asked for, or /chunk shows another size than what
    requests carry.
    """
    backend = ScriptedBackend([[65]])
    config = ServiceConfig(ingress=IngressConfig(adaptive_chunk_size=is_adaptive))
    client = TestClient(make_api(backend, config))
    client.post("/v1/completions", json={"prompt": "hello"})
    assert backend.requests[-1].chunk_size == wanted
    shown = client.post("/chunk", json={"prompt": "hello"}).json()["chunk_size"]
    assert shown == (wanted or 512)
