"""From the configuration to the engine deployment: how Serve runs the replicas of a pool."""

from __future__ import annotations

from ray import serve
from ray.serve import Application

from deployments.config import ServiceConfig
from deployments.replica import EngineReplica


def build_engine(config: ServiceConfig) -> Application:
    """The pool of engine replicas, named "engine", ready to be bound to an ingress.

    Serve must not throttle the batch: a replica takes as many requests as the engine runs and
    queues, and the engine itself refuses more.
    """
    pool = config.pool
    scheduler = config.scheduler
    deploy = serve.deployment(
        name="engine",
        num_replicas=pool.num_replicas,
        max_ongoing_requests=scheduler.max_num_seqs + scheduler.max_num_waiting,
        max_queued_requests=-1,
        health_check_period_s=pool.health_check_period_s,
        graceful_shutdown_timeout_s=pool.graceful_shutdown_timeout_s,
        ray_actor_options={"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus},
    )
    engine: Application = deploy(EngineReplica).bind(config)
    return engine
