"""The bytes that the peers' benchmark says a quantised model reads are those that are kept."""

from __future__ import annotations

import pytest
from tiny_models import make_model

from deployments.execution.quantized import Quantization, quantize_linears
from deployments.execution.quantized_products import TorchProducts
from loadtest.peers.model_files import quantized_bytes


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_decode_step_reads_what_quantising_keeps(quantization: Quantization) -> None:
    """Scales are left out, the head is counted as the other layers, or layers that narrow are."""
    model = make_model("llama")
    expected = quantized_bytes(model.config, quantization)
    report = quantize_linears(model, quantization, TorchProducts())
    assert expected == report.num_quantized_bytes
