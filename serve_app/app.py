"""The application Serve starts: `serve run` finds `serve_app.app:build_app` in the files of
configs/.

Composes the ingress and the pools; Ray's options are decided here and in `deployments.builder`,
nowhere else.
"""

# No `from __future__ import annotations`: Serve reads the annotation of `args` as a class.

from ray import serve
from ray.serve import Application

from deployments.builder import build_engines
from deployments.config import ServiceConfig
from serve_app.ingress import Ingress


def build_app(args: ServiceConfig) -> Application:
    """The ingress over the pools of engine replicas.

    Serve validates `args` itself; an unknown key or a value out of range fails the deployment with
    a text that names the key and the nearest known one, and the replicas of the version before it
    go on serving.
    """
    return compose(args, build_engines(args))


def compose(config: ServiceConfig, engines: dict[str, Application]) -> Application:
    """The ingress over engine deployments, by pool."""
    pools = [config.for_pool(name).pool for name in config.pools] or [config.pool]
    deploy = serve.deployment(
        name="ingress",
        num_replicas=config.ingress.num_replicas,
        max_ongoing_requests=config.max_ingress_requests,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        # A stream may last as long as its replica lets it.
        graceful_shutdown_timeout_s=max(pool.graceful_shutdown_timeout_s for pool in pools),
    )
    application: Application = deploy(serve.ingress()(Ingress)).bind(engines, config)
    return application
