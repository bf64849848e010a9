"""From the configuration to the engine deployments: how Serve runs the replicas of each pool."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from deployments.config import ServiceConfig
from deployments.replica import EngineReplica
from deployments.request_router import PrefixRouter

UNLIMITED = 1_000_000
"""Requests in one replica, as far as Serve is concerned."""


def build_engines(config: ServiceConfig, replica: type = EngineReplica) -> dict[str, Application]:
    """The engine deployments by pool, ready to be bound to an ingress: "engine-NAME" for each of
    `pools`, or "engine" alone, under the name "engine", for the one of `pool`.

    Args:
        config: of the whole service.
        replica: the class to deploy; takes the pool's configuration.
    """
    if not config.pools:
        return {"engine": _build("engine", config, replica)}
    return {name: _build(f"engine-{name}", config.for_pool(name), replica) for name in config.pools}


def _build(name: str, config: ServiceConfig, replica: type) -> Application:
    """Serve must not throttle the batch, nor hold back what a full engine would refuse: the refusal
    is what sends a request to another pool, or tells its client to come again.
    """
    pool = config.pool
    deploy = serve.deployment(
        name=name,
        max_ongoing_requests=UNLIMITED,
        max_queued_requests=-1,
        health_check_period_s=pool.health_check_period_s,
        graceful_shutdown_timeout_s=pool.graceful_shutdown_timeout_s,
        ray_actor_options={"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus},
        request_router_config=_router(config),
        **_num_replicas(config),
    )
    engine: Application = deploy(replica).bind(config)
    return engine


def _num_replicas(config: ServiceConfig) -> dict[str, Any]:
    autoscaling = config.pool.autoscaling
    if autoscaling is None:
        return {"num_replicas": config.pool.num_replicas}
    settings = autoscaling.model_dump(exclude_none=True)
    # Serve's own default of 2 would leave a batching engine almost empty.
    return {
        "autoscaling_config": {
            "target_ongoing_requests": float(config.scheduler.max_num_seqs),
            **settings,
        }
    }


def _router(config: ServiceConfig) -> RequestRouterConfig:
    routing = config.pool.routing
    if routing.policy == "serve":
        return RequestRouterConfig()
    settings = {
        "request_router_class": PrefixRouter,
        "request_router_kwargs": {
            "balance_factor": routing.balance_factor,
            "slack_tokens": config.scheduler.chunk_size,
            "block_size": config.cache.block_size,
        },
        "request_routing_stats_period_s": routing.stats_period_s,
    }
    return RequestRouterConfig.model_validate(settings)
