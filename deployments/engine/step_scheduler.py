"""What an engine asks of its scheduler: the seam behind which another policy may stand."""

from __future__ import annotations

from typing import Protocol

from deployments.engine.outputs import ModelOutput, RequestOutput, SchedulerOutput
from deployments.protocol import ErrorInfo, GenerateRequest


class StepScheduler(Protocol):
    """Decides what each step computes, and books what came of it; see `Scheduler`."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def has_requests(self) -> bool:
        """Whether anything is waiting or running."""
        ...

    @property
    def request_ids(self) -> list[str]:
        """Of all requests that have not finished."""
        ...

    def add(self, incoming: GenerateRequest, seed: int) -> None:
        """Queue a request.

        Raises:
            RequestRefused: it can never be served, or not now.
        """
        ...

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free what it holds; None if there is no such request."""
        ...

    def fail(self, request_id: str, error: ErrorInfo) -> RequestOutput | None:
        """End a request with an error; None if there is no such request."""
        ...

    def find_hold_until_s(self) -> float | None:
        """Until when an idle engine should wait for more prompts; None: start now."""
        ...

    def schedule(self) -> SchedulerOutput:
        """Fill a step."""
        ...

    def update_from_output(self, step: SchedulerOutput, result: ModelOutput) -> list[RequestOutput]:
        """Book what a step computed."""
        ...

    def fail_step(self, step: SchedulerOutput, error: ErrorInfo) -> list[RequestOutput]:
        """End every request of a step that raised."""
        ...

    def check_integrity(self) -> None:
        """Compare all records with each other.

        Raises:
            IntegrityError: they contradict each other.
        """
        ...
