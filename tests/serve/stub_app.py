"""The whole service over replicas without a model: the same deployments, thread, scheduler and
cache, and an executor that takes a fixed time a step and answers by rule.

Settings of a pool tell what its replicas do: `execution.num_threads: 13` fails to load.
"""

# No `from __future__ import annotations`: Serve reads the annotation of `args` as a class.

import time
from typing import Any

import torch
from api_doubles import make_card
from doubles import PagedFakeExecutor, make_limits
from ray.serve import Application

from deployments.builder import build_engines
from deployments.config import ServiceConfig
from deployments.engine.outputs import ModelOutput, SchedulerOutput
from deployments.execution.grammar import NoGrammars
from deployments.protocol import ModelCard
from deployments.replica import EngineReplica
from serve_app.app import compose

STEP_S = 0.02
MAX_MODEL_LEN = 2048
FAILS_TO_LOAD = 13


class StubExecutor(PagedFakeExecutor):
    """20 ms a step, whatever is in it."""

    def __init__(self, num_blocks: int) -> None:
        # The tokenizer of the card knows these ids, each as one byte.
        super().__init__(make_limits(num_blocks, 4, MAX_MODEL_LEN, vocab_size=256))
        self.device = torch.device("cpu")
        self.grammars = NoGrammars("a stub has no grammars")

    def model_card(self) -> ModelCard:
        return make_card(max_model_len=MAX_MODEL_LEN)

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        time.sleep(STEP_S)
        return super().execute(output)


class StubReplica(EngineReplica):
    """A replica of the product over a StubExecutor."""

    @staticmethod
    def load(config: ServiceConfig) -> Any:
        if config.execution.num_threads == FAILS_TO_LOAD:
            raise RuntimeError("this pool has no device")
        return StubExecutor(config.cache.num_blocks or 2000)


def build_app(args: ServiceConfig) -> Application:
    """As serve_app.app:build_app."""
    return compose(args, build_engines(args, StubReplica))
