"""What a simulated fleet is made of, from a file and from options, which overrule it.

The file is a fleet description such as `configs/sim.yaml`, or the configuration of a service, whose
scheduler, cache and routing are taken; it is a description if it names a cost model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from deployments.config import (
    CacheConfig,
    ConfigError,
    SchedulerConfig,
    Section,
    parse_service_config,
    read_yaml,
    service_tree,
)
from deployments.execution.cost_model import CostModel
from loadtest.measures import Slo
from loadtest.simulate import FleetConfig, SimulationError


class FleetDescription(Section):
    """A fleet as it is written down; see `FleetConfig`."""

    cost_model: str | None = None
    """A name, or the path of a file."""
    replicas: int = 1
    policy: str = "chunked"
    routing: str = "prefix"
    balance_factor: float = 1.25
    slo: tuple[str, ...] = ()
    """Of a good request, as in `ttft:300`."""
    max_model_len: int = Field(131_072, ge=1)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)

    def fleet(self) -> FleetConfig:
        """The fleet that it describes.

        Raises:
            SimulationError: it names no cost model.
            CostModelError: there is no such cost model.
            MeasuresError: the SLO cannot be read.
        """
        if self.cost_model is None:
            raise SimulationError(
                "no cost model: give --cost-model, or a --config that names one, such as sim.yaml"
            )
        return FleetConfig(
            cost_model=CostModel.load(self.cost_model),
            num_replicas=self.replicas,
            scheduler=self.scheduler,
            cache=self.cache,
            routing=self.routing,
            balance_factor=self.balance_factor,
            policy=self.policy,
            max_model_len=self.max_model_len,
            slo=Slo.parse(self.slo),
        )


def describe_fleet(config: Path | None, options: Mapping[str, Any]) -> FleetDescription:
    """The description of a file with options put over it.

    Args:
        config: a fleet description or a service's file; None: all by default.
        options: keys of a description; those of its scheduler and its cache are put over one by
            one.

    Raises:
        ConfigError: the file cannot be used.
        SimulationError: the settings do not fit together.
    """
    data = {} if config is None else _read(config)
    for key, value in options.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, Mapping) else value
    try:
        return FleetDescription.model_validate(data)
    except ValidationError as error:
        raise SimulationError(_explain(error)) from error


def _read(path: Path) -> dict[str, Any]:
    data = service_tree(read_yaml(path), path)
    if not isinstance(data, Mapping) or "cost_model" not in data:
        service = parse_service_config(data, str(path))
        return {
            "scheduler": service.scheduler.model_dump(),
            "cache": service.cache.model_dump(),
            "balance_factor": service.pool.routing.balance_factor,
        }
    try:
        FleetDescription.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error
    return dict(data)


def _explain(error: ValidationError) -> str:
    """The first fault, in one line."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
