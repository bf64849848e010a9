"""What there is to know of a server before it is started: the records every launcher gives.

One module of `loadtest.peers.launchers` each describes one server; `process` starts what they
describe, `install` makes the environment it runs in.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.client import Target

BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
REQUEST_TIMEOUT_S = 600.0
"""More than any workload takes: a server that hangs fails its turn instead of holding up all."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and of what servers are started.

    Args:
        folder: holds an environment for each peer.
        model_dir: safetensors, config and tokenizer that all of them serve.
        num_threads: that a server computes with.
        budget: tokens a step, for servers that have such a setting.
        max_model_len: of a request.
    """

    folder: Path
    model_dir: Path
    num_threads: int = 2
    budget: int = 512
    max_model_len: int = 8192

    def peer_dir(self, name: str) -> Path:
        """The environment of a peer."""
        return self.folder / name


@dataclass(frozen=True, slots=True)
class HealthPage:
    """Ready once this path answers 200."""

    path: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """Ready once its output has these words."""

    words: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that can be started.

    Args:
        command: starts it on the port that `target` names.
        target: how it is asked.
        ready: how it tells that it can be asked.
        dtype: of its weights, for people.
        weight_bytes: that one decode step reads; None: not known.
        env: added to the environment.
        can_be_stopped: whether it goes on after SIGSTOP and SIGCONT. One that cannot runs on while
            others are measured, and its idle cost is theirs.
        has_token_ids: whether it takes prompts as token ids; else they are sent as text.
    """

    command: tuple[str, ...]
    target: Target
    ready: HealthPage | LogLine
    dtype: str
    weight_bytes: float | None
    env: Mapping[str, str] = field(default_factory=dict)
    can_be_stopped: bool = True
    has_token_ids: bool = True


Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an installation: a command, or an action of Python's.

    Args:
        what: it does, for people.
        run: the command, or the action.
        env: added to the environment of a command.
    """

    what: str
    run: tuple[str, ...] | Action
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that others would choose.

    Args:
        name: as on the command line and in tables.
        what: it is, with its version.
        needs: the files without which it is not installed.
        launch: describes its start on a port.
        install: the steps that make its environment, in order.
    """

    name: str
    what: str
    needs: Callable[[Place], tuple[Path, ...]]
    launch: Callable[[Place, int], Launch]
    install: Callable[[Place], tuple[Step, ...]]

    def is_installed(self, place: Place) -> bool:
        """Whether all that it needs is there."""
        return all(path.exists() for path in self.needs(place))

    def skip_line(self, place: Place) -> str:
        """Says that it is left out, and how to install it."""
        return (
            f"{self.name} is skipped: it is not installed in {place.peer_dir(self.name)}; "
            f"chunkserve bench peers --install {place.folder} --peers {self.name}"
        )


def completions(port: int, model: str, **options: object) -> Target:
    """A target of completions on this machine, answers of full length."""
    return Target(
        f"http://127.0.0.1:{port}",
        "/v1/completions",
        model,
        ignores_eos=True,
        extra_body=options,
        timeout_s=REQUEST_TIMEOUT_S,
    )


def new_venv(folder: Path, *packages: str) -> tuple[Step, ...]:
    """Steps that make a virtual environment with these packages in it."""
    python = shutil.which("python3") or "python3"
    pip = (str(folder / "bin" / "python"), "-m", "pip")
    return (
        Step(f"make {folder}", (python, "-m", "venv", str(folder))),
        Step(f"install {' '.join(packages)}", (*pip, "install", *packages)),
    )


def weight_bytes(model_dir: Path, bytes_per_weight: float, held_bytes: float = 2.0) -> float:
    """Bytes of all weights, held as safetensors of `held_bytes` a weight.

    With tied embeddings, as small models have them, a decode step reads each of them once: the
    table of embeddings is the last layer's matrix too.
    """
    held = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    return held / held_bytes * bytes_per_weight
