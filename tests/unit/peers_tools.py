"""Records, turns and services that tests of the peers' benchmark are made of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loadtest.client import Client, Target
from loadtest.load_run import EndedRequest, LoadRun, PlannedRequest
from loadtest.peers.machine_share import MachineShare
from loadtest.peers.process_tree import ProcessTree
from loadtest.peers.turns import Turn, TurnResult
from loadtest.records import RequestRecord

QUIET = MachineShare(2.0, 1.5, 0.05, 0.01, 0.0)


def make_record(
    sent_s: float, token_times_s: Sequence[float], num_prompt_tokens: int = 64
) -> RequestRecord:
    """A request that was sent when it was due and ended with its last token."""
    return RequestRecord(sent_s, sent_s, num_prompt_tokens, token_times_s, token_times_s[-1])


def make_result(
    turn: tuple[int, str, str], figures: Mapping[str, float], dropped: str = ""
) -> TurnResult:
    """A turn (round, workload, service) of these figures on a quiet machine."""
    return TurnResult(Turn(*turn), figures, 0, {}, QUIET, dropped=dropped)


class FakeService:
    """A service that a server in this process answers for; counts how it is treated.

    Args:
        name: in tables.
        target: of the server.
    """

    dtype = "float32"
    weight_bytes: float | None = 1e6
    has_token_ids = False

    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self._target = replace(target)
        self.tree = ProcessTree(os.getpid())
        self.history: list[str] = []

    def start(self) -> float:
        self.history.append("start")
        return 1.0

    async def send(
        self, planned: Sequence[PlannedRequest], max_concurrency: int | None
    ) -> list[EndedRequest]:
        self.history.append("send")
        ended: list[EndedRequest] = []
        async with Client(self._target) as client:
            await LoadRun(client, ended.append, max_concurrency).run(planned)
        return ended

    def can_take(self, workload: str) -> bool:
        return True

    def pause(self) -> None:
        self.history.append("pause")

    def resume(self) -> None:
        self.history.append("resume")

    def end(self) -> None:
        self.history.append("end")
