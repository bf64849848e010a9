"""Starts ray.serve.llm with one model on a port. Runs in that peer's own environment, so it knows
nothing of this project.

    python ray_serve_llm_app.py MODEL_DIR PORT MAX_MODEL_LEN BUDGET DTYPE
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time


def main() -> None:
    """Serve until ended."""
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    model_dir, port, max_model_len, budget, dtype = sys.argv[1:6]
    # A cluster of its own, in a folder of its own: others on this machine are not touched.
    folder = tempfile.mkdtemp(prefix="peer-ray-")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    config = LLMConfig(
        model_loading_config={"model_id": "m", "model_source": model_dir},
        deployment_config={
            "autoscaling_config": None,
            "num_replicas": 1,
            "ray_actor_options": {"num_cpus": 0},
        },
        engine_kwargs={
            "dtype": dtype,
            "max_model_len": int(max_model_len),
            "max_num_batched_tokens": int(budget),
            "disable_log_stats": True,
        },
        # Nothing else is placed on this machine, which may have two cores.
        placement_group_config={"bundles": [{"CPU": 1}]},
        log_engine_metrics=False,
    )
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
    print(f"serving on {port}", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
