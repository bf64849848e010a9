"""Both services of `bench chunking` get the same load, and differ in nothing but their chunks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.config import parse_service_config
from loadtest.bench_chunking import ALONE, CHUNKED, WHOLE, ChunkingSettings, Contest, configs_of
from loadtest.client import Target
from loadtest.local_service import changed_config
from loadtest.trace import TraceRequest
from tests.unit.openai_stub import MODEL, serving

LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"
SETTINGS = ChunkingSettings(
    config=LOCAL,
    context=8192,
    num_rounds=2,
    round_s=0.1,
    short=TraceRequest(0.0, 8, 4),
    short_rate=40.0,
    long=TraceRequest(0.0, 50, 2),
    long_period_s=0.05,
)


def test_each_service_gets_the_same_load() -> None:
    """One service gets more requests than the other, or the long ones count among the short."""

    async def scene() -> dict[str, dict[str, dict[str, int]]]:
        async with serving() as url:
            target = Target(url, "/v1/completions", MODEL)
            return await Contest(SETTINGS, {CHUNKED: target, WHOLE: target}).run()

    result = asyncio.run(scene())
    for name in (ALONE, CHUNKED, WHOLE):
        assert result["short"][name]["completed"] == 8
        assert result["short"][name]["total_output_tokens"] == 32
    for name in (CHUNKED, WHOLE):
        assert result["long"][name]["completed"] == 4


def test_the_services_differ_in_their_chunks_alone() -> None:
    """A whole prompt does not fit into a step, so that the service is chunked all the same."""
    configs = configs_of(SETTINGS)
    trees = {
        name: parse_service_config(c["applications"][0]["args"]) for name, c in configs.items()
    }
    whole = trees[WHOLE].scheduler
    assert whole.chunk_size == 8192
    assert whole.token_budget >= whole.max_num_seqs + 8192
    same = {"chunk_size": 0, "overlap_ratio": 0, "max_num_batched_tokens": 0}
    plain = {
        name: tree.model_copy(update={"scheduler": tree.scheduler.model_copy(update=same)})
        for name, tree in trees.items()
    }
    assert plain[WHOLE] == plain[CHUNKED] and trees[WHOLE] != trees[CHUNKED]


def test_a_config_without_one_application_is_refused(tmp_path: Path) -> None:
    """A scheduler's file is taken for a Serve config, and ends in a traceback."""
    path = tmp_path / "scheduler.yaml"
    path.write_text("chunk_size: 256\n")
    with pytest.raises(ValueError, match="exactly one application"):
        changed_config(path, {})
