"""Prompts of load tests, counted by the service's own tokenizer of the default model."""

from __future__ import annotations

import pytest

from deployments.config import ModelConfig
from deployments.execution.model_source import read_tokenizer_files, resolve_model_dir
from loadtest.prompts import PromptMaker
from loadtest.tokenizer_source import load_tokenizer
from loadtest.trace import TraceRequest
from serve_app.tokenization import Tokenizer

pytestmark = pytest.mark.model


def test_the_service_counts_the_tokens_that_were_asked_for() -> None:
    """Text and token ids of a load make prompts of other lengths in the service, or other ones."""
    model = ModelConfig()
    service = Tokenizer.from_files(read_tokenizer_files(resolve_model_dir(model)))
    prompts = PromptMaker(load_tokenizer(model.source))
    assert prompts.has_exact_text()
    # Enough first words for a trace of thousands of requests that share nothing.
    assert prompts.num_leads > 5000
    for number, length in enumerate((1, 2, 17, 300, 513, 4000, 9000)):
        for hash_ids in ((), (3, 4)):
            request = TraceRequest(0.0, length, 1, hash_ids)
            text = prompts.text(request, number)
            assert service.encode(text) == prompts.token_ids(request, number)
            assert len(service.encode(text)) == length
