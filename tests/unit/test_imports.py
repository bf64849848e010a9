"""Who may import whom, as the architecture page says: read from the source, so that a lazy import
counts too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("deployments", "serve_app", "loadtest")
STDLIB = frozenset(sys.stdlib_module_names)

RECORDS = ("deployments.protocol", "deployments.config")
CORE = ("deployments.engine", *RECORDS)
REPLICA = (
    "deployments.execution",
    "deployments.metrics",
    "deployments.replica",
    "deployments.replica_choice",
    "deployments.request_router",
    *CORE,
)
NONE_OUTSIDE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """What modules of a pattern may import.

    `ours`: modules of this project, with all below them; `outside`: packages of others, None: any;
    `never`: whatever the other two say.
    """

    pattern: str
    ours: tuple[str, ...]
    outside: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()


# The first rule whose pattern fits holds.
RULES = (
    Rule("deployments.protocol", (), NONE_OUTSIDE),
    Rule("deployments.config_base", (), ("pydantic",)),
    Rule("deployments.admission_config", ("deployments.config_base",), ("pydantic",)),
    Rule("deployments.pool_config", ("deployments.config_base",), ("pydantic",)),
    Rule(
        "deployments.config",
        ("deployments.admission_config", "deployments.config_base", "deployments.pool_config"),
        ("pydantic", "yaml"),
    ),
    # The routing decision is plain code, so that tests and benchmarks run it without Ray.
    Rule("deployments.replica_choice", ("deployments.protocol",), NONE_OUTSIDE),
    Rule("deployments.engine.clock", CORE, NONE_OUTSIDE, ("asyncio", "threading")),
    Rule("deployments.engine.engine_thread", CORE, NONE_OUTSIDE, ("time",)),
    # What stands between that thread and its readers: it waits on the event loop, and has no
    # thread.
    Rule("deployments.engine.token_stream", CORE, NONE_OUTSIDE, ("time", "threading")),
    Rule("deployments.engine.token_relay", CORE, NONE_OUTSIDE, ("time", "threading")),
    Rule("deployments.engine*", CORE, NONE_OUTSIDE, ("asyncio", "time", "threading")),
    # What the simulator is made of: no torch, so that it runs where no model does.
    Rule("deployments.execution.cost_model", (), NONE_OUTSIDE),
    Rule(
        "deployments.execution.sim_executor",
        (
            "deployments.execution.cost_model",
            "deployments.engine.request",
            "deployments.engine.outputs",
            *RECORDS,
        ),
        NONE_OUTSIDE,
    ),
    Rule(
        "deployments.execution*",
        (
            "deployments.execution",
            "deployments.engine.request",
            "deployments.engine.outputs",
            *RECORDS,
        ),
        never=("ray",),
    ),
    Rule("deployments.replica", REPLICA, never=("fastapi",)),
    Rule("deployments.builder", REPLICA),
    Rule("deployments.request_router", REPLICA),
    Rule("deployments.autoscaling", REPLICA),
    Rule("deployments.metrics", CORE),
    Rule("deployments", ()),
    Rule("serve_app.cli", ("deployments", "serve_app", "loadtest")),
    # What the command line composes for `generate`: an engine without Ray or HTTP.
    Rule("serve_app.local_engine", ("deployments", "serve_app")),
    Rule("serve_app.app", ("serve_app", "deployments.builder", *RECORDS)),
    Rule(
        "serve_app.chunker",
        ("serve_app", "deployments.engine.chunk_plan", "deployments.engine.block_hash", *RECORDS),
    ),
    Rule("serve_app.prompt_hashes", ("deployments.engine.block_hash", *RECORDS), NONE_OUTSIDE),
    # Hard bounds stand beside the configured ones.
    Rule("serve_app.api_models", ("serve_app", "deployments.admission_config", *RECORDS)),
    Rule("serve_app*", ("serve_app", *RECORDS)),
    # It measures the executor beside its peers, so it has to load one.
    Rule("loadtest.bench_engine", ("deployments", "loadtest")),
    # They measure the model's forward, so they have to load one and to make its steps.
    Rule("loadtest.bench_forward", ("deployments", "loadtest")),
    Rule("loadtest.bench_gpu", ("deployments", "loadtest")),
    Rule("loadtest.bench_steps", ("deployments.engine", *RECORDS)),
    # It measures the sampler and the inputs of the executor, and the way of a token to its client.
    Rule("loadtest.bench_own_cost", ("deployments.execution.startup", "loadtest")),
    Rule("loadtest.own_cost.model_side", ("deployments", "loadtest")),
    Rule("loadtest.own_cost.streaming", ("deployments", "serve_app", "loadtest")),
    Rule("loadtest.bench_quality", ("deployments", "loadtest")),
    # Our engine as one of the services that are compared.
    Rule("loadtest.peers.engine_child", ("deployments", "loadtest")),
    # What the peers' weights are made of.
    Rule(
        "loadtest.peers.model_files",
        (
            "loadtest",
            "deployments.execution.model_loader",
            "deployments.execution.model_source",
            "deployments.execution.quantized_weight",
            *CORE,
        ),
    ),
    # Applications without a model: a composition root like `serve_app.app`.
    Rule("loadtest.stub_app", ("deployments", "serve_app", "loadtest")),
    # A served model's name stands for its tokenizer too, also where that is made from a GGUF file.
    Rule("loadtest.tokenizer_source", ("loadtest", "deployments.execution.model_source", *CORE)),
    Rule(
        "loadtest*",
        (
            "loadtest",
            "deployments.execution.sim_executor",
            "deployments.execution.cost_model",
            "deployments.replica_choice",
            *CORE,
        ),
    ),
)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports_of(source: str) -> Iterator[str]:
    """The modules that a source imports, wherever in it; `from package import module` names the
    module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            assert node.module is not None
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if is_module(below) else node.module


def is_under(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def find_breaches(module: str, source: str) -> list[str]:
    """What this module imports and must not."""
    rule = next((rule for rule in RULES if fnmatch(module, rule.pattern)), None)
    if rule is None:
        return [f"{module}: no rule says what it may import"]
    return [f"{module} imports {name}" for name in imports_of(source) if not is_allowed(name, rule)]


def is_allowed(name: str, rule: Rule) -> bool:
    top = name.split(".")[0]
    if is_under(name, rule.never):
        return False
    if top in PACKAGES:
        return is_under(name, rule.ours)
    return top in STDLIB or rule.outside is None or top in rule.outside


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_no_module_imports_what_it_must_not() -> None:
    """A module imports one that the architecture page keeps from it."""
    assert sources()
    breaches = [
        breach for path in sources() for breach in find_breaches(module_of(path), path.read_text())
    ]
    assert breaches == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deployments.protocol", "import pydantic"),
        ("deployments.config", "from deployments.engine.request import Request"),
        ("deployments.engine.scheduler", "import torch"),
        ("deployments.engine.scheduler", "def f():\n    import asyncio"),
        ("deployments.engine.engine", "from time import monotonic"),
        ("deployments.engine.engine", "import threading"),
        ("deployments.engine.engine_thread", "import ray"),
        ("deployments.engine.outputs", "from deployments.execution import sampler"),
        ("deployments.execution.sampler", "from deployments.engine import scheduler"),
        ("deployments.execution.sampler", "import ray"),
        ("deployments.execution.sim_executor", "import torch"),
        ("deployments.execution.sim_executor", "from deployments.engine.scheduler import X"),
        ("deployments.replica", "from serve_app.tokenization import Tokenizer"),
        ("deployments.unheard_of", ""),
        ("serve_app.ingress", "from deployments.builder import build_engines"),
        ("serve_app.ingress", "from deployments.engine.chunk_plan import plan_chunks"),
        ("serve_app.chunker", "from deployments.engine import scheduler"),
        ("serve_app.app", "import deployments.replica"),
        ("loadtest.report", "import serve_app"),
        ("loadtest.report", "from deployments.execution.model_executor import ModelExecutor"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    """A forbidden import goes unnoticed."""
    assert len(find_breaches(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deployments.engine.clock", "import time"),
        ("deployments.engine.engine_thread", "import asyncio, threading"),
        ("deployments.execution.sampler", "import torch\nfrom deployments.engine import outputs"),
        ("serve_app.app", "from deployments.builder import build_engines"),
        ("serve_app.cli", "from deployments.engine.engine import Engine"),
    ],
)
def test_what_is_allowed_is_no_breach(module: str, source: str) -> None:
    """The rules refuse what the architecture page allows."""
    assert find_breaches(module, source) == []
