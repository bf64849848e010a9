"""A cost model of this very machine: an engine's own steps, fitted, and simulated again."""

from __future__ import annotations

import random
from pathlib import Path

from tiny_models import VOCAB_SIZE, load, make_model

from deployments.config import CacheConfig, ExecutionConfig, SchedulerConfig, ServiceConfig
from deployments.engine.clock import Clock, VirtualClock, WallClock
from deployments.engine.engine import Engine, StepExecutor
from deployments.engine.stats import EngineObserver
from deployments.engine.step_log_file import StepLogFile
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.sim_executor import SimExecutor
from deployments.protocol import GenerateRequest, SamplingParams
from loadtest.calibrate import calibrate, read_step_log

SCHEDULER = SchedulerConfig(chunk_size=32, max_num_seqs=8, max_num_batched_tokens=64)
CACHE = CacheConfig(num_blocks=128, block_size=16, enable_prefix_caching=False)
LABELS = {"name": "here", "model": "tiny", "gpu": "CPU", "source": "a test", "num_kv_tokens": 2000}


def requests() -> list[GenerateRequest]:
    chance = random.Random(3)
    return [
        GenerateRequest(
            str(number),
            tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 200))),
            SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        )
        for number in range(24)
    ]


def serve_all(executor: StepExecutor, clock: Clock, observers: list[EngineObserver]) -> float:
    """Seconds from the first step to the end of the last."""
    engine = Engine.build(SCHEDULER, CACHE, executor, clock, observers)
    for request in requests():
        engine.add(request)
    began_s = clock.now()
    while engine.has_requests:
        engine.step()
    return clock.now() - began_s


def test_a_fitted_machine_takes_as_long_as_it_does(tmp_path: Path) -> None:
    """What an engine writes cannot be fitted, or the fit says nothing of the machine: a user who
    calibrates plans with the figures of another one.
    """
    # Recording tapes would be most of so short a run.
    execution = ExecutionConfig(device="cpu", num_threads=1, tape_steps=False)
    config = ServiceConfig(scheduler=SCHEDULER, cache=CACHE, execution=execution)
    executor = ModelExecutor(load(make_model("llama", max_position_embeddings=256), ()), config)
    log = tmp_path / "steps.jsonl"
    serve_all(executor, WallClock(), [])  # the first steps warm up
    serve_all(executor, WallClock(), [StepLogFile(log)])
    steps = read_step_log(log)
    model = calibrate(steps, LABELS)
    assert {"decode", "mixed"} <= set(model.fit_error)
    clock = VirtualClock()
    simulated_s = serve_all(SimExecutor(model, executor.limits, clock), clock, [])
    measured_s = sum(step.step_s for step in steps)
    # Other work may run beside the one and not the other.
    assert measured_s / 3 < simulated_s < measured_s * 3
