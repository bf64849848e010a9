"""Results that are kept, and where they came from: the command, the date, the machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime
from errno import EISDIR
from pathlib import Path
from typing import Any


def command_line() -> str:
    """The command of this process, as one would type it."""
    return shlex.join(["chunkserve", *sys.argv[1:]])


def origin() -> dict[str, str]:
    """What every kept result begins with."""
    return {
        "date": datetime.now().date().isoformat(),
        "machine": describe_machine(),
        "command": command_line(),
    }


def timestamp() -> str:
    """Now, as `vllm bench serve` writes it: 20261202-153000."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def check_can_keep(path: Path | None) -> None:
    """Find out before a long run whether its result can be written there; None: nowhere.

    Raises:
        OSError: it cannot.
    """
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def keep_result(path: Path, result: Mapping[str, Any]) -> None:
    """Replace the file by this result, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


def describe_machine() -> str:
    """Cores, processor, system and Python of this machine."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{os.cpu_count()} cores, {_processor()}, {platform.system()}, Python {python}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.machine()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
