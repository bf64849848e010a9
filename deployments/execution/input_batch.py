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

import numpy as np
import torch
from torch import Tensor

from deployments.engine.outputs import ScheduledRequest
from deployments.execution.prompt_logprobs import PromptSpan
from deployments.execution.upload import upload

NULL_TABLE = (0,)
"""The block table of a row that stands for nobody."""


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
        cls,
        scheduled: Sequence[ScheduledRequest],
        block_size: int,
        device: torch.device,
        num_padded_rows: int = 0,
    ) -> InputBatch:
        """Lay out a step's requests, those of one token first and otherwise in the given order.

        One copy takes all to the device, and nobody waits for it. Where there are fewer rows than
        `num_padded_rows`, all of one token, rows of the null block follow: they compute token 0 at
        position 0 into slot 0, and nothing is sampled from them.
        """
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
            slots += _slots_of(table, range(first, first + count), block_size)
            span = PromptSpan.of(item)
            if len(span) > 0:
                offset = rows[-1].start - first
                prompt_indices += range(offset + span.start, offset + span.stop)
                prompt_spans.append(span)
            if item.samples_token:
                logits_indices.append(len(input_ids) - 1)
        num_null = max(0, num_padded_rows - len(rows))
        rows += [BatchRow(len(input_ids) + i, 1, 0, NULL_TABLE) for i in range(num_null)]
        null = [0] * num_null
        columns = (
            input_ids + null,
            positions + null,
            slots + null,
            logits_indices + prompt_indices,
        )
        input_ids_there, positions_there, slots_there, kept_there = upload(
            [np.array(column, dtype=np.int64) for column in columns], device
        )
        return cls(
            input_ids=input_ids_there,
            positions=positions_there,
            slot_mapping=slots_there,
            logits_indices=kept_there,
            rows=tuple(rows),
            num_decodes=len(singles) + num_null,
            sampled=tuple(item for item in ordered if item.samples_token),
            prompt_spans=tuple(prompt_spans),
            block_size=block_size,
        )


def _slots_of(table: Sequence[int], positions: range, block_size: int) -> list[int]:
    """The flat slots of a row's positions."""
    return [table[at // block_size] * block_size + at % block_size for at in positions]
