"""Hand-made faults of the core, each as a patch; `test_mutants` demands that the random schedules
find each.

A mutant is the smallest edit that makes the fault: it changes one method and leaves all asserts of
the core as they are, but where an assert of the core alone would find it (then `schedule_checks`
must find it as well).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.engine import block_hash, kv_cache_manager, scheduler, waiting_queue
from deployments.engine.block_pool import BlockPool
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import SchedulerOutput
from deployments.engine.request import Request
from deployments.engine.scheduler import Scheduler
from deployments.engine.step_plan import StepPlan
from deployments.protocol import FinishReason

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Enter a fault into the list under its function's name."""
    MUTANTS[apply.__name__] = apply
    return apply


@mutant
def unchained_hash(patch: Patch) -> None:
    """A block is found by its own tokens, whatever stands before it (B55)."""
    real = block_hash.hash_block

    def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
        return real(b"", token_ids)

    patch.setattr(block_hash, "hash_block", hash_block)


@mutant
def salt_ignored(patch: Patch) -> None:
    """Tenants share blocks (B55, B56)."""
    real = block_hash.root_hash
    patch.setattr(block_hash, "root_hash", lambda cache_salt: real(""))


@mutant
def early_publish(patch: Patch) -> None:
    """Blocks are published when they are scheduled, before anything is in them."""
    real = Scheduler._schedule_chunks

    def schedule_chunks(self: Scheduler, step: StepPlan, now: float) -> None:
        real(self, step, now)
        for row in step._chunks:
            request, before = row.request, row.num_computed_tokens
            request.num_computed_tokens += row.num_scheduled_tokens
            self._kv.publish(request, before)
            request.num_computed_tokens = before

    patch.setattr(Scheduler, "_schedule_chunks", schedule_chunks)


@mutant
def failed_row_published(patch: Patch) -> None:
    """The blocks of a row that came out unusable are left for others to find."""
    real = Scheduler._fail_row

    def fail_row(self: Scheduler, request: Request, result: Any) -> Any:
        self._kv.publish(request, 0)
        return real(self, request, result)

    patch.setattr(Scheduler, "_fail_row", fail_row)
    patch.setattr(KVCacheManager, "unpublish", lambda self, request: None)


@mutant
def wrong_victim(patch: Patch) -> None:
    """The most urgent running request is preempted, not the least."""

    def free_a_block_for(self: Scheduler, request: Request, step: StepPlan, now: float) -> bool:
        while self._kv.num_free_blocks == 0:
            victim = self._running[0]
            self._preempt(victim, step, now)
            if victim is request:
                return False
        return True

    patch.setattr(Scheduler, "_free_a_block_for", free_a_block_for)


@mutant
def wrong_victim_for_urgent_head(patch: Patch) -> None:
    """A full batch makes room for an urgent request by its most urgent member (B50)."""
    real = KVCacheManager.find_victims

    def find_victims(self: KVCacheManager, candidates: Any, num_blocks: int, keep: Any) -> Any:
        candidates = list(candidates)
        found = real(self, reversed(candidates), num_blocks, keep)
        return found or (found if found is None else candidates[-1:])

    patch.setattr(KVCacheManager, "find_victims", find_victims)


@mutant
def reentry_in_the_same_step(patch: Patch) -> None:
    """A preempted request comes back in the step that preempted it."""
    patch.setattr(StepPlan, "was_preempted", lambda self, request: False)
    real = StepPlan.seal

    def seal(self: StepPlan) -> SchedulerOutput:
        preempted, self._preempted = self._preempted, []
        return replace(real(self), preempted=tuple(preempted))

    patch.setattr(StepPlan, "seal", seal)


@mutant
def block_too_many_at_block_end(patch: Patch) -> None:
    """A request whose tokens end with a block holds one block more (B37)."""
    patch.setattr(KVCacheManager, "num_blocks_for", lambda self, n: n // self._block_size + 1)


@mutant
def block_too_late_at_block_end(patch: Patch) -> None:
    """A decode gets its next block one token after it needed it (B37)."""
    patch.setattr(
        KVCacheManager,
        "needs_block",
        lambda self, request: (
            self.num_blocks_for(request.num_tokens - 1) > len(self._tables[request.request_id])
        ),
    )


@mutant
def published_before_it_is_full(patch: Patch) -> None:
    """A block is published one token before it is full."""

    def publish(self: KVCacheManager, request: Request, num_computed_before: int) -> None:
        last = min(request.num_computed_tokens + 1, request.num_tokens) // self._block_size
        if self._caches_prefixes:
            self._hash_up_to(request, last)
            table = self._tables[request.request_id]
            for index in range(num_computed_before // self._block_size, last):
                self._pool.publish(table[index], request.block_hashes[index])

    patch.setattr(KVCacheManager, "publish", publish)


@mutant
def hit_on_the_last_token(patch: Patch) -> None:
    """A prompt that is cached whole has nothing left to compute."""
    _find_hits_up_to(patch, lambda self, request: request.num_tokens // self._block_size)


def _find_hits_up_to(patch: Patch, limit: Callable[[Any, Request], int]) -> None:
    def find_cached_prefix(self: KVCacheManager, request: Request) -> list[int]:
        hits: list[int] = []
        for found in request.block_hashes[: limit(self, request)]:
            block_id = self._pool.find(found)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    patch.setattr(KVCacheManager, "find_cached_prefix", find_cached_prefix)


@mutant
def shared_block_written(patch: Patch) -> None:
    """A prompt that is cached whole computes its last token into the shared block."""
    hit_on_the_last_token(patch)
    real = KVCacheManager.admit

    def admit(self: KVCacheManager, request: Request, hits: list[int]) -> None:
        real(self, request, hits)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    patch.setattr(KVCacheManager, "admit", admit)
    patch.setattr(KVCacheManager, "_check_table", lambda self, request, table: None)


@mutant
def hits_remembered_from_the_queue(patch: Patch) -> None:
    """Hits are found when a request queues and used when it runs, evicted meanwhile (B40)."""
    real = KVCacheManager.find_cached_prefix
    remembered: dict[tuple[int, int], list[int]] = {}

    def enqueue(self: Scheduler, request: Request) -> None:
        found = real(self._kv, request)
        remembered[id(request), request.num_preemptions] = found
        self._waiting.add(request, request.num_tokens - len(found) * self._limits.block_size)

    def find_cached_prefix(self: KVCacheManager, request: Request) -> list[int]:
        return remembered[id(request), request.num_preemptions]

    patch.setattr(Scheduler, "_enqueue", enqueue)
    patch.setattr(KVCacheManager, "find_cached_prefix", find_cached_prefix)


@mutant
def lost_free_on_finish(patch: Patch) -> None:
    """A request that ends keeps its blocks (B52)."""
    _lose_free(patch, lambda reason: reason in (FinishReason.STOP, FinishReason.LENGTH))


@mutant
def lost_free_on_abort(patch: Patch) -> None:
    """A request that is aborted keeps its blocks (B52)."""
    _lose_free(patch, lambda reason: reason is FinishReason.ABORT)


@mutant
def lost_free_on_failure(patch: Patch) -> None:
    """A request whose step failed keeps its blocks (B52)."""
    _lose_free(patch, lambda reason: reason is FinishReason.ERROR)


def _lose_free(patch: Patch, is_lost: Callable[[FinishReason], bool]) -> None:
    """The blocks stay counted although the table is gone, so that only the counts can tell."""
    real_finish, real_free = Scheduler._finish, KVCacheManager.free

    def finish(self: Scheduler, request: Request, reason: FinishReason, *a: Any, **k: Any) -> Any:
        if is_lost(reason):
            self._kv.loses = True
        output = real_finish(self, request, reason, *a, **k)
        self._kv.loses = False
        return output

    def free(self: KVCacheManager, request: Request) -> None:
        if getattr(self, "loses", False):
            del self._tables[request.request_id]
        else:
            real_free(self, request)

    patch.setattr(Scheduler, "_finish", finish)
    patch.setattr(KVCacheManager, "free", free)


@mutant
def evicted_hash_kept(patch: Patch) -> None:
    """A block that is taken again is still found by what it held before."""
    patch.setattr(BlockPool, "unpublish", lambda self, block_ids: None)


@mutant
def revived_block_left_free(patch: Patch) -> None:
    """A free block that is shared stays in the free queue, and is handed out again."""

    def share(self: BlockPool, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._ref_counts[block_id] += 1

    patch.setattr(BlockPool, "share", share)
    patch.setattr(BlockPool, "check_integrity", lambda self: None)


@mutant
def forced_ignored(patch: Patch) -> None:
    """Age forces nobody ahead (requirement 2.3)."""
    patch.setattr(waiting_queue, "is_overdue", lambda request, now, timeout_s: False)


@mutant
def forced_youngest_first(patch: Patch) -> None:
    """Of the forced, running prefills the youngest goes first."""
    real = waiting_queue.order_key

    def order_key(request: Request, num_tokens: int, now: float, timeout_s: float) -> Any:
        key = real(request, num_tokens, now, timeout_s)
        return (key[0], key[1], -key[2] if key[1] == 0 else key[2], key[3])

    patch.setattr(waiting_queue, "order_key", order_key)
    patch.setattr(scheduler, "order_key", order_key)


@mutant
def budget_overrun(patch: Patch) -> None:
    """A chunk is not cut to what the budget leaves."""
    real = StepPlan.__init__

    def init(self: StepPlan, budget: int) -> None:
        real(self, budget + 1)

    patch.setattr(StepPlan, "__init__", init)


@mutant
def chunk_cap_ignored(patch: Patch) -> None:
    """One request takes all the budget, whatever chunk_size says (B46)."""
    patch.setattr(
        Scheduler, "_next_chunk_size", lambda self, request: request.num_uncomputed_tokens
    )


@mutant
def passing_bound_removed(patch: Patch) -> None:
    """A waiting request that does not fit is overtaken for ever (B47)."""
    patch.setattr(
        Scheduler,
        "_may_admit_past",
        lambda self, passed: len(self._running) < self._config.max_num_seqs,
    )


@mutant
def decode_skipped(patch: Patch) -> None:
    """A step leaves out its last decode (stall-free order)."""
    real = Scheduler._schedule_decodes

    def schedule_decodes(self: Scheduler, step: StepPlan, now: float) -> None:
        real(self, step, now)
        if len(step._decodes) > 1:
            step._decodes.pop()
            step.num_tokens_left += 1

    patch.setattr(Scheduler, "_schedule_decodes", schedule_decodes)


@mutant
def token_after_abort(patch: Patch) -> None:
    """A request that was aborted while its step ran still gets the step's token (B53)."""
    patch.setattr(Request, "is_finished", property(lambda self: False))


@mutant
def output_lost_at_preemption(patch: Patch) -> None:
    """A resumed request takes its output for prompt (B44)."""
    real = Request.transition

    def transition(self: Request, status: Any, now: float) -> None:
        real(self, status, now)
        if status.value == "preempted":
            self.num_prompt_tokens = len(self.token_ids)

    patch.setattr(Request, "transition", transition)


@mutant
def null_block_given(patch: Patch) -> None:
    """The null block is handed out, which padding overwrites."""
    real = BlockPool.__init__

    def init(self: BlockPool, num_blocks: int) -> None:
        real(self, num_blocks)
        self._free[0] = None
        self._free.popitem(last=False)

    patch.setattr(BlockPool, "__init__", init)
    patch.setattr(BlockPool, "check_integrity", lambda self: None)
    patch.setattr(kv_cache_manager, "NULL_BLOCK", -1)
