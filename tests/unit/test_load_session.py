"""A load keeps what it has on the way: whatever ends it takes the results of a minute at most."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from loadtest.client import Ask
from loadtest.load_arguments import LoadSettings, add_arguments, settings_of
from loadtest.load_result import Json
from loadtest.load_run import PlannedRequest
from loadtest.load_session import Load, LoadSession
from tests.unit.openai_stub import MODEL, complete, serving

LOAD = Load([PlannedRequest(Ask(f"hello {number}", 2), 2, None) for number in range(3)], 3)


def settings(url: str, folder: Path) -> LoadSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--base-url", url, "--max-concurrency", "1", "--save-result"]
    found = settings_of(parser.parse_args([*flags, "--result-dir", str(folder)]))
    return replace(found, target=replace(found.target, model=MODEL))


def test_a_result_is_kept_on_the_way(tmp_path: Path) -> None:
    """A run of hours that is killed leaves nothing, or one on its way replaces the last result."""

    async def wait_for_the_file(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        while body["prompt"] == "hello 2" and kept(tmp_path)["completed"] < 2:
            await asyncio.sleep(0)
        return await complete(request)

    async def scene() -> Json:
        async with serving(wait_for_the_file) as url:
            session = LoadSession(settings(url, tmp_path), LOAD, save_period_s=0.001)
            return await asyncio.wait_for(session.run(), 20.0)

    result = asyncio.run(scene())
    assert (result["completed"], result["num_prompts"]) == (3, 3)


def kept(folder: Path) -> Json:
    (path,) = folder.glob("*.json")
    result = json.loads(path.read_text())
    assert isinstance(result, dict)
    return result


def test_a_folder_that_cannot_be_written_ends_a_load_before_it_begins(tmp_path: Path) -> None:
    """Hours of load end in a result that cannot be written."""
    (tmp_path / "file").write_text("")

    async def refuse(_: web.Request) -> web.StreamResponse:
        raise AssertionError("a request was sent")

    async def scene() -> None:
        async with serving(refuse) as url:
            await LoadSession(settings(url, tmp_path / "file"), LOAD).run()

    with pytest.raises(OSError):
        asyncio.run(scene())
