"""The configuration of pools: how many replicas, which requests, how one is chosen.

Owns names, defaults and ranges. How a pool's settings and the service's become one tree is in
`config`; what Ray makes of them, in `builder`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deployments.config_base import Section, nearest_name


class AutoscalingConfig(Section):
    """Replicas follow the load. Ray Serve's own rule, by requests in flight per replica, and its
    names.
    """

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(ge=1)
    initial_replicas: int | None = Field(default=None, ge=0)
    target_ongoing_requests: float | None = Field(default=None, gt=0.0)
    """Requests in flight that a replica should have; by default as many as it runs at once
    (max_num_seqs).
    """
    upscale_delay_s: float = Field(default=30.0, ge=0.0)
    downscale_delay_s: float = Field(default=600.0, ge=0.0)
    upscaling_factor: float | None = Field(default=None, gt=0.0)
    downscaling_factor: float | None = Field(default=None, gt=0.0)
    metrics_interval_s: float = Field(default=10.0, gt=0.0)
    look_back_period_s: float = Field(default=30.0, gt=0.0)

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        if self.initial_replicas is not None and not (
            self.min_replicas <= self.initial_replicas <= self.max_replicas
        ):
            raise ValueError("initial_replicas must lie between min_replicas and max_replicas")
        return self


class RoutingConfig(Section):
    """Which replica of a pool takes a request."""

    policy: Literal["prefix", "serve"] = "prefix"
    """prefix: the one that holds most of the prompt, within the load bound, else the least loaded;
    serve: Ray Serve's own choice, the shorter queue of two.
    """
    balance_factor: float = Field(default=1.25, ge=1.0)
    """A replica may be preferred for its cache while its outstanding tokens are at most this
    multiple of the least loaded one's, or a chunk above them."""
    stats_period_s: float = Field(default=2.0, gt=0.0)
    """How often a replica reports its load to those who route."""


class PoolConfig(Section):
    """The replicas that serve the model, as Ray Serve runs them."""

    num_replicas: int = Field(default=1, ge=1)
    autoscaling: AutoscalingConfig | None = None
    """Instead of a fixed num_replicas."""
    num_cpus: float = Field(default=1.0, ge=0.0)
    num_gpus: float = Field(default=0.0, ge=0.0)
    routing: RoutingConfig = RoutingConfig()
    health_check_period_s: float = Field(default=10.0, gt=0.0)
    stuck_after_s: float = Field(default=120.0, gt=0.0)
    """A replica that has work and finished no step for so long is reported unhealthy and replaced.
    """
    graceful_shutdown_timeout_s: float = Field(default=120.0, ge=0.0)
    """How long running requests may go on after a replica was told to stop."""
    stream_interval_s: float = Field(default=0.0, ge=0.0, le=10.0)
    """Least time between two events of a stream, its first and its last one aside; tokens that come
    meanwhile travel together, which saves CPU where many streams are read at once. 0: each step's
    tokens leave at once.
    """
    no_replica_timeout_s: float = Field(default=30.0, gt=0.0)
    """How long a request waits while its pool has no running replica; then it is refused."""

    @model_validator(mode="after")
    def _number_of_replicas_is_given_once(self) -> PoolConfig:
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            raise ValueError("give either num_replicas or autoscaling, not both")
        return self

    @property
    def max_replicas(self) -> int:
        """Most replicas the pool can have."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas


class PriorityPoolConfig(PoolConfig):
    """One of several pools: the service's `pool` section, what differs here, and whom it serves."""

    priorities: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The priority classes it serves; classes without a pool go to the default pool."""
    spills_to: str | None = None
    """The pool that takes a request when this one is full or has no replica."""
    scheduler: dict[str, Any] = {}
    """Keys of the scheduler section that differ here."""
    cache: dict[str, Any] = {}
    """Keys of the cache section that differ here."""
    execution: dict[str, Any] = {}
    """Keys of the execution section that differ here."""


def inherited_pool(common: PoolConfig, own: PriorityPoolConfig) -> dict[str, Any]:
    """The `pool` section of one of several pools: what it sets, over what all share."""
    shared = common.model_dump(exclude_unset=True)
    mine = own.model_dump(exclude_unset=True, include=set(PoolConfig.model_fields))
    # Each of the two ways to say how many replicas replaces the other.
    if "num_replicas" in mine:
        shared.pop("autoscaling", None)
    if "autoscaling" in mine:
        shared.pop("num_replicas", None)
    return {**shared, **mine}


def check_pools(pools: Mapping[str, PriorityPoolConfig], default_pool: str | None) -> None:
    """See that the pools name each other and their classes without contradiction.

    Raises:
        ValueError: says which pool and what to change.
    """
    names = list(pools)
    owner: dict[int, str] = {}
    for name, pool in pools.items():
        if re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) is None:
            raise ValueError(
                f"pools.{name}: a pool's name is made of a-z, 0-9 and inner hyphens, for it names "
                "a deployment"
            )
        _check_reference(f"pools.{name}.spills_to", pool.spills_to, names)
        if pool.spills_to == name:
            raise ValueError(f"pools.{name}.spills_to: a pool cannot spill to itself")
        for priority in pool.priorities:
            if owner.setdefault(priority, name) != name:
                raise ValueError(
                    f"pools.{name}.priorities: class {priority} is served by pool "
                    f"'{owner[priority]}' already"
                )
    _check_reference("default_pool", default_pool, names)


def _check_reference(place: str, name: str | None, names: list[str]) -> None:
    if name is not None and name not in names:
        known = nearest_name(name, names) if names else "`pools` is empty"
        raise ValueError(f"{place}: there is no pool '{name}'; {known}")
