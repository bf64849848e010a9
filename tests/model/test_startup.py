"""How a process starts to serve: what loading leaves behind (`deployments.execution.startup`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deployments.execution.startup import call_apart

_COUNTS_THREADS = """
import time
from pathlib import Path
import torch
from deployments.execution.startup import call_apart

torch.set_num_threads(3)

def multiply():
    torch.ones(1 << 20).add_(1).sum()

def num_threads():
    return len(list(Path("/proc/self/task").iterdir()))

before = num_threads()
{call}
end_s = time.monotonic() + {wait_s}
while num_threads() > before and time.monotonic() < end_s:
    time.sleep(0.01)
print(num_threads() - before)
"""


def _num_threads_left(call: str, wait_s: float) -> int:
    code = _COUNTS_THREADS.format(call=call, wait_s=wait_s)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
def test_what_loads_leaves_no_team_of_threads_behind() -> None:
    """With the team of the thread that loaded beside that of the engine there were more threads
    than cores: libgomp let all of them sleep between two operations, and a token of one stream took
    15.0 ms instead of 14.2.
    """
    assert _num_threads_left("call_apart(multiply)", wait_s=10.0) == 0
    assert _num_threads_left("multiply()", wait_s=0.0) == 2, "called here, its team stays"


def test_the_caller_gets_what_was_made_or_raised() -> None:
    assert call_apart(lambda: 3) == 3

    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        call_apart(fail)
