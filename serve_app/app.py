"""The application Serve starts: `serve run` finds `serve_app.app:build_app` in the files of
configs/.

Composes the two deployments; Ray's options are decided here and in `deployments.builder`, nowhere
else.
"""

# No `from __future__ import annotations`: Serve reads the annotation of `args` as a class.

from ray import serve
from ray.serve import Application

from deployments.builder import build_engine
from deployments.config import ServiceConfig
from serve_app.ingress import Ingress


def build_app(args: ServiceConfig) -> Application:
    """The ingress over one pool of engine replicas.

    Serve validates `args` itself; an unknown key or a value out of range fails the deployment with
    a text that names the key and the nearest known one, and the replicas of the version before it
    go on serving.
    """
    deploy = serve.deployment(
        name="ingress",
        num_replicas=args.ingress.num_replicas,
        max_ongoing_requests=args.max_ingress_requests,
        ray_actor_options={"num_cpus": args.ingress.num_cpus},
        # A stream may last as long as its replica lets it.
        graceful_shutdown_timeout_s=args.pool.graceful_shutdown_timeout_s,
    )
    application: Application = deploy(serve.ingress()(Ingress)).bind(build_engine(args), args)
    return application
