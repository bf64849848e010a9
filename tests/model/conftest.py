"""Every test of this folder runs a real model on one thread, and is marked `model`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# Where `make test` puts what tests alone need.
sys.path.append(str(Path(sys.prefix, "test-packages")))
if not torch.cuda.is_available():
    # Read when Triton is first imported: its kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
_HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def one_thread():
    """Undo what a test did to the number of threads."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.model)
