"""A step while it is being filled: what is in it so far and how much room is left. Keeps the books,
decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.engine.block_pool import IntegrityError
from deployments.engine.outputs import ChunkReason, ScheduledRequest, SchedulerOutput
from deployments.engine.request import Request


def _chunk_reason(request: Request) -> ChunkReason:
    if request.num_computed_tokens > request.num_reused_tokens:
        return ChunkReason.CONTINUED
    return ChunkReason.RESUMED if request.num_preemptions else ChunkReason.ADMITTED


class StepPlan:
    """The rows of a step in the making.

    Args:
        budget: most tokens the step may hold.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._decodes: list[ScheduledRequest] = []
        self._chunks: list[ScheduledRequest] = []
        self._preempted: list[Request] = []
        self.num_tokens_left = budget
        self.is_open_to_newcomers = True

    @property
    def num_decodes(self) -> int:
        """Decodes in it so far."""
        return len(self._decodes)

    @property
    def has_preempted(self) -> bool:
        """Whether anybody lost its blocks in this step."""
        return bool(self._preempted)

    def add_decodes(
        self, requests: Sequence[Request], block_tables: Mapping[str, Sequence[int]]
    ) -> None:
        """Put in the token that each of them sampled last; `block_tables` are by request id."""
        self.num_tokens_left -= len(requests)
        row_of = ScheduledRequest.decode
        self._decodes += [row_of(each, block_tables[each.request_id]) for each in requests]

    def add_decode(self, request: Request, block_table: Sequence[int]) -> None:
        """Put in the token it sampled last."""
        self.num_tokens_left -= 1
        self._decodes.append(ScheduledRequest.decode(request, block_table))

    def add_chunk(
        self, request: Request, num_tokens: int, block_table: Sequence[int], is_forced: bool
    ) -> None:
        """Put in its next `num_tokens` uncomputed tokens."""
        self.num_tokens_left -= num_tokens
        self._chunks.append(
            ScheduledRequest(
                request,
                request.num_computed_tokens,
                num_tokens,
                block_table,
                num_tokens == request.num_uncomputed_tokens,
                _chunk_reason(request),
                is_forced,
            )
        )

    def close_to_newcomers(self) -> None:
        """Let nobody be admitted any more: blocks ran out for those who are in."""
        self.is_open_to_newcomers = False

    def note_preempted(self, request: Request) -> None:
        """Remember that it lost its blocks in this step, so that it does not come back in it."""
        self._preempted.append(request)

    def was_preempted(self, request: Request) -> bool:
        """Whether it lost its blocks in this step."""
        return request in self._preempted

    def seal(self) -> SchedulerOutput:
        """The finished step.

        Raises:
            IntegrityError: over budget, a request twice, or one both scheduled and preempted.
        """
        scheduled = (*self._decodes, *self._chunks)
        distinct = {row.request for row in scheduled}
        if self.num_tokens_left < 0:
            raise IntegrityError(
                f"step exceeds its budget of {self._budget} by {-self.num_tokens_left}"
            )
        if len(distinct) != len(scheduled) or not distinct.isdisjoint(self._preempted):
            raise IntegrityError("a request is in a step twice, or both scheduled and preempted")
        num_decode_tokens = len(self._decodes)
        return SchedulerOutput(
            scheduled=scheduled,
            preempted=tuple(self._preempted),
            num_prefill_tokens=self._budget - self.num_tokens_left - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
        )
