"""Turns one C++ source into a shared library for this very machine, once, into a cache.

Mostly plain C functions, called through ctypes: a second to compile, where a source that includes
torch's headers takes ten. Does not know what the functions do.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

logger = logging.getLogger(__name__)

KernelsT = TypeVar("KernelsT")
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 120.0
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")


class CannotCompile(RuntimeError):
    """No library could be made; the message says why and what to install."""


def find_compiler() -> str:
    """The C++ compiler to use: $CXX, or the first of the usual ones.

    Raises:
        CannotCompile: there is none.
    """
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        found = shutil.which(name)
        if found:
            return found
    raise CannotCompile("there is no C++ compiler; install g++ or set CXX")


def _native_flag() -> str:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return "-march=native" if is_x86 else "-mcpu=native"


def _processor() -> str:
    """What tells two kinds of processor apart, as far as this system says: a cache may be shared
    between machines.
    """
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    said = info.read_text(errors="replace").splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in said if line.startswith(wanted)}))


def _key(source: bytes, compiler: str, flags: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=TIMEOUT_S).stdout
    parts = (source, version, _processor().encode(), " ".join((*_FLAGS, *flags)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _text_of(source: Path) -> bytes:
    """A source with all that it includes from beside it."""
    text = source.read_bytes()
    included = re.findall(rb'^#include "([^"]+)"', text, re.MULTILINE)
    return text + b"".join(_text_of(source.parent / name.decode()) for name in included)


def compile_once(source: Path, cache: Path, flags: Sequence[str] = ()) -> Path:
    """The shared library of this source, made now if the cache does not have it.

    Two processes may ask at once: one compiles, the other waits and finds it done.

    Args:
        flags: of the compiler, beside the usual ones.

    Raises:
        CannotCompile: there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    try:
        library = cache / f"{source.stem}-{_key(_text_of(source), compiler, flags)}.so"
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{library}.lock"):
            if not library.exists():
                _compile(compiler, source, library, flags)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompile(f"{source.name} could not be compiled: {error}") from error
    return library


def _compile(compiler: str, source: Path, library: Path, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        command = [compiler, *_FLAGS, _native_flag(), "-o", str(made), str(source), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise CannotCompile(f"{compiler} failed on {source.name}: {done.stderr.strip()[-500:]}")
        # Whole or not at all, whenever this process may die.
        made.replace(library)


def find_kernels(
    load: Callable[[Path], KernelsT], source: Path, compiles: bool, cache: Path, loss: str
) -> KernelsT | None:
    """Kernels by the library of this source; None where this machine cannot have them.

    Args:
        load: takes the library; raises OSError if it cannot be loaded.
        compiles: whether the machine's compiler may be used.
        cache: where the library is kept.
        loss: what it means to go without, for the log.
    """
    if not compiles:
        return None
    try:
        return load(compile_once(source, cache))
    except (CannotCompile, OSError) as error:
        logger.warning("%s: %s", loss, error)
        return None
