"""A step of the scheduler as tensors: one ragged row of tokens for all requests. Built once a step.

    scheduled       decode A | decode B | chunk of C (3 tokens)
    input_ids        a9      |  b4      |  c5 c6 c7              [num_tokens]
    positions         9      |   4      |   5  6  7              [num_tokens]
    row.start         0      |   1      |  2
    logits_indices   0          1                    4           [num_samples]; none if C goes on
                                         2  3                    after these, if C's prompt_logprobs
                                                                 are asked for

Rows of one token come first, so that a backend can take them as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.engine.outputs import ScheduledRequest
from deployments.execution.prompt_logprobs import PromptSpan


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a batch: tokens [start, start + num_queries) of the ragged row."""

    start: int
    num_queries: int
    num_context: int
    """Tokens before the first query, whose keys and values are in the cache."""
    block_table: Sequence[int]

    @property
    def num_keys(self) -> int:
        """Tokens that the last query sees where no window hides any."""
        return self.num_context + self.num_queries


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The tensors of a step, on the model's device."""

    input_ids: Tensor
    """[num_tokens], int64"""
    positions: Tensor
    """[num_tokens], int64"""
    slot_mapping: Tensor
    """[num_tokens], int64, flat slot = block_id * block_size + offset"""
    logits_indices: Tensor
    """[num_samples + positions of all prompt_spans], int64, into the ragged row"""
    rows: tuple[BatchRow, ...]
    num_decodes: int
    """So many of `rows`, the first ones, have one query each."""
    sampled: tuple[ScheduledRequest, ...]
    """The requests behind the first of `logits_indices`."""
    prompt_spans: tuple[PromptSpan, ...]
    """What the rest of `logits_indices` stand for."""
    block_size: int

    @classmethod
    def build(
        cls, scheduled: Sequence[ScheduledRequest], block_size: int, device: torch.device
    ) -> InputBatch:
        """Lay out a step's requests, those of one token first and otherwise in the given order."""
        singles = [row for row in scheduled if row.num_scheduled_tokens == 1]
        ordered = singles + [row for row in scheduled if row.num_scheduled_tokens > 1]
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits_indices: list[int] = []
        prompt_indices: list[int] = []
        prompt_spans: list[PromptSpan] = []
        rows: list[BatchRow] = []
        for item in ordered:
            first, count = item.num_computed_tokens, item.num_scheduled_tokens
            table = item.block_table
            rows.append(BatchRow(len(input_ids), count, first, table))
            input_ids += item.request.token_ids[first : first + count]
            positions += range(first, first + count)
            slots += [
                table[position // block_size] * block_size + position % block_size
                for position in range(first, first + count)
            ]
            span = PromptSpan.of(item)
            if len(span) > 0:
                offset = rows[-1].start - first
                prompt_indices += range(offset + span.start, offset + span.stop)
                prompt_spans.append(span)
            if item.samples_token:
                logits_indices.append(len(input_ids) - 1)
        return cls(
            input_ids=torch.tensor(input_ids, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            logits_indices=torch.tensor(
                logits_indices + prompt_indices, dtype=torch.int64, device=device
            ),
            rows=tuple(rows),
            num_decodes=len(singles),
            sampled=tuple(item for item in ordered if item.samples_token),
            prompt_spans=tuple(prompt_spans),
            block_size=block_size,
        )
