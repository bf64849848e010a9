"""docs/api.md against the code: it names every field and every error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from deployments.config import ServiceConfig
from serve_app.api_models import CompletionRequest, StreamOptions
from serve_app.chat_models import ChatCompletionRequest
from serve_app.text_models import ChunkRequest, DetokenizeRequest, TokenizeRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
DOTTED = re.findall(r"`([a-z_.]+)`", PAGE)
NAMED = {*DOTTED, *(name.partition(".")[0] for name in DOTTED)}
BODIES = (
    CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest, ChunkRequest
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_the_page_names_every_field(body: type[BaseModel]) -> None:
    """A field is served and nobody is told."""
    assert set(body.model_fields) - NAMED == set()


def test_the_page_names_every_option_of_a_stream() -> None:
    """An option within a field is served and nobody is told."""
    assert {f"stream_options.{name}" for name in StreamOptions.model_fields} <= NAMED


@pytest.mark.parametrize("body", [CompletionRequest, ChatCompletionRequest])
def test_the_page_names_every_refused_field(body: type[CompletionRequest]) -> None:
    """A client learns by trying that a field is refused."""
    assert set(body.refused_fields()) - NAMED == set()


def test_the_page_has_a_row_for_every_error_code() -> None:
    """An error comes with a code that the table does not hold."""
    sources = "".join(path.read_text() for path in (ROOT / "serve_app").glob("*.py"))
    codes = set(re.findall(r'ApiError\([^()]*?(?:code=)?"([a-z]+(?:_[a-z]+)+)"', sources))
    codes |= set(re.findall(r'code="([a-z_]+)"', sources))
    assert {"engine_error", "rate_limit_exceeded", "model_not_found"} <= codes
    rows = set(re.findall(r"^\| \d{3} \| [^|]* \| `([a-z_]+)` \|", PAGE, re.MULTILINE))
    assert codes - rows == set()


def test_the_page_tells_the_limits_that_are_configured() -> None:
    """The page tells limits that no default has."""
    config = ServiceConfig().admission
    for name, told in re.findall(r"`admission\.(max_[a-z_]+)` \((\d+)\)", PAGE):
        assert getattr(config, name) == int(told), name
