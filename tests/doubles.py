"""Doubles of what surrounds the engine core: executors without a model, and makers with sensible
defaults.

`PagedFakeExecutor` stands for a model: what it answers depends on everything the block tables lead
it to, so that a wrong table, a stale block or a wrong position changes its tokens. `oracle_tokens`
says what it must
answer: unchunked, unbatched, uncached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

from deployments.config import CacheConfig, SchedulerConfig
from deployments.engine.block_pool import BlockPool
from deployments.engine.clock import VirtualClock
from deployments.engine.engine import Engine, StepExecutor
from deployments.engine.kv_cache_manager import KVCacheManager
from deployments.engine.outputs import (
    ModelLimits,
    ModelOutput,
    RequestOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from deployments.engine.scheduler import Scheduler
from deployments.engine.stats import EngineObserver
from deployments.engine.step_budget import FixedBudget
from deployments.protocol import ErrorInfo, FinishReason, GenerateRequest, SamplingParams

EOS_TOKEN_ID = 0
_MASK = (1 << 60) - 1
_UNWRITTEN = -1
_GARBAGE = 7

_ids = count()


# --- makers ---------------------------------------------------------------------------------------


def make_limits(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 100_000,
    vocab_size: int = 1000,
) -> ModelLimits:
    """The limits of a model whose end-of-sequence token is EOS_TOKEN_ID."""
    return ModelLimits(max_model_len, vocab_size, num_blocks, block_size, frozenset({EOS_TOKEN_ID}))


def make_request(
    prompt: int | Sequence[int] = 8,
    request_id: str | None = None,
    *,
    priority: int = 0,
    cache_salt: str = "",
    chunk_size: int | None = None,
    **params: object,
) -> GenerateRequest:
    """A greedy request of four tokens; a prompt given as a number is that many tokens of its
    own.
    """
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = [1 + (number * 131 + position * 7) % 999 for position in range(prompt)]
    return GenerateRequest(
        request_id=request_id or f"request-{number}",
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **params}),
        priority=priority,
        cache_salt=cache_salt,
        chunk_size=chunk_size,
    )


def make_config(**settings: object) -> SchedulerConfig:
    """A small scheduler's section: chunks of 8 tokens without overlap, 8 requests at once."""
    defaults = {"chunk_size": 8, "overlap_ratio": 0.0, "max_num_seqs": 8}
    return SchedulerConfig(**{**defaults, **settings})


def make_scheduler(
    limits: ModelLimits | None = None,
    clock: VirtualClock | None = None,
    enable_prefix_caching: bool = True,
    **settings: object,
) -> Scheduler:
    """A scheduler over its own pool; `settings` are fields of SchedulerConfig."""
    limits = limits or make_limits()
    config = make_config(**settings)
    kv = KVCacheManager(BlockPool(limits.num_blocks), limits.block_size, enable_prefix_caching)
    return Scheduler(config, limits, kv, FixedBudget(config.token_budget), clock or VirtualClock())


def make_engine(
    executor: StepExecutor | None = None,
    clock: VirtualClock | None = None,
    enable_prefix_caching: bool = True,
    observers: Sequence[EngineObserver] = (),
    **settings: object,
) -> Engine:
    """An engine, by default over a PagedFakeExecutor; `settings` are fields of SchedulerConfig."""
    return Engine.build(
        make_config(**settings),
        CacheConfig(enable_prefix_caching=enable_prefix_caching),
        executor or PagedFakeExecutor(),
        clock or VirtualClock(),
        observers,
    )


@dataclass
class Outcome:
    """What one request's reader has seen so far."""

    token_ids: list[int] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    """In which step each token came."""
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    last: RequestOutput | None = None


def collect(outcomes: dict[str, Outcome], outputs: Iterable[RequestOutput], step: int = 0) -> None:
    """Add the outputs of a step to what the readers have seen."""
    for output in outputs:
        outcome = outcomes.setdefault(output.request_id, Outcome())
        assert outcome.finish_reason is None, f"{output.request_id} got an output after its last"
        if output.token_id is not None:
            outcome.token_ids.append(output.token_id)
            outcome.token_steps.append(step)
        outcome.num_cached_tokens = output.num_cached_tokens
        outcome.finish_reason = output.finish_reason
        outcome.error = output.error
        outcome.last = output


def run_until_done(
    engine: Engine,
    before_step: Callable[[int], None] = lambda step: None,
    max_steps: int = 2000,
) -> dict[str, Outcome]:
    """Step an engine until it has no requests, with an integrity check after each step."""
    outcomes: dict[str, Outcome] = {}
    for step in range(max_steps):
        before_step(step)
        if not engine.has_requests:
            return outcomes
        collect(outcomes, engine.step(), step)
        engine.check_integrity()
    raise AssertionError(f"requests are left after {max_steps} steps")


# --- a model that is none -------------------------------------------------------------------------


def first_entry(cache_salt: str) -> int:
    """What position 0 folds; differs by salt, so that sharing blocks across salts changes
    tokens.
    """
    return sum(ord(letter) * 31**place for place, letter in enumerate(cache_salt)) & _MASK


def fold(entry: int, position: int, token_id: int) -> int:
    """The entry at a position, from the entry before it."""
    return ((entry * 6364136223846793005) ^ (position << 32) ^ (token_id + 1)) & _MASK


@dataclass(frozen=True)
class TokenRule:
    """How a token is chosen from the entries of a whole sequence."""

    vocab_size: int
    eos_one_in: int = 0
    """One token in so many ends the text; 0: none ever."""

    def choose(self, entries: Sequence[int], seed: int, num_prompt_tokens: int) -> int:
        """`seed` is 0 where sampling is greedy. Knows where the output begins, as penalties do."""
        value = hash((tuple(entries), seed, num_prompt_tokens)) >> 3
        if self.eos_one_in and value % self.eos_one_in == 0:
            return EOS_TOKEN_ID
        return 1 + value % (self.vocab_size - 1)


class PagedFakeExecutor:
    """A paged cache of numbers. Context is read before anything of the step is written, so that a
    block which this very step fills is of no use to another row of it."""

    def __init__(self, limits: ModelLimits | None = None, eos_one_in: int = 0) -> None:
        self._limits = limits or make_limits()
        self.rule = TokenRule(self._limits.vocab_size, eos_one_in)
        self.cache = [
            [_UNWRITTEN] * self._limits.block_size for _ in range(self._limits.num_blocks)
        ]
        self.num_steps = 0

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        self.num_steps += 1
        before = [self._read_entry_before(row) for row in output.scheduled]
        for row, entry in zip(output.scheduled, before, strict=True):
            self._write(row, entry)
        return ModelOutput(
            {
                row.request.request_id: self.sample(row)
                for row in output.scheduled
                if row.samples_token
            }
        )

    def _read_entry_before(self, row: ScheduledRequest) -> int:
        if row.num_computed_tokens == 0:
            return first_entry(row.request.cache_salt)
        block, offset = divmod(row.num_computed_tokens - 1, self._limits.block_size)
        return self.cache[row.block_table[block]][offset]

    def _write(self, row: ScheduledRequest, entry: int) -> None:
        size, table, tokens = self._limits.block_size, row.block_table, row.request.token_ids
        first = row.num_computed_tokens
        for position in range(first, first + row.num_scheduled_tokens):
            entry = fold(entry, position, tokens[position])
            self.cache[table[position // size]][position % size] = entry

    def sample(self, row: ScheduledRequest) -> int:
        """The next token, from all that is read back through the block table."""
        request = row.request
        num_tokens = row.num_computed_tokens + row.num_scheduled_tokens
        read = tuple(chain.from_iterable(self.cache[block] for block in row.block_table))
        seed = 0 if request.sampling_params.is_greedy else request.seed
        return self.rule.choose(read[:num_tokens], seed, request.num_prompt_tokens)

    def scribble(self, row: ScheduledRequest) -> None:
        """Leave garbage where the row's share of the step should have been written."""
        size, first = self._limits.block_size, row.num_computed_tokens
        for position in range(first, first + row.num_scheduled_tokens):
            self.cache[row.block_table[position // size]][position % size] = _GARBAGE


def oracle_tokens(
    request: GenerateRequest, limits: ModelLimits, *, seed: int = 0, eos_one_in: int = 0
) -> tuple[list[int], FinishReason]:
    """What a PagedFakeExecutor must answer, however its steps were cut; `seed` is the engine's
    own.
    """
    params = request.sampling_params
    rule = TokenRule(limits.vocab_size, eos_one_in)
    if params.seed is not None:
        seed = params.seed
    seed = 0 if params.is_greedy else seed
    tokens, entries, entry = list(request.prompt_token_ids), [], first_entry(request.cache_salt)
    num_prompt_tokens = len(tokens)
    while True:
        for position in range(len(entries), len(tokens)):
            entry = fold(entry, position, tokens[position])
            entries.append(entry)
        token = rule.choose(entries, seed, num_prompt_tokens)
        tokens.append(token)
        output = tokens[num_prompt_tokens:]
        ends = token in params.stop_token_ids or (token == EOS_TOKEN_ID and not params.ignore_eos)
        if ends and len(output) > params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens or len(tokens) >= limits.max_num_tokens:
            return output, FinishReason.LENGTH


class FaultyExecutor(PagedFakeExecutor):
    """Fails as told, and leaves garbage where it should have written.

    Args:
        raise_in: by step, counted from 0: what to raise.
        bad_rows: requests whose row is unusable whenever it samples.
    """

    def __init__(
        self,
        limits: ModelLimits | None = None,
        raise_in: Mapping[int, BaseException] | None = None,
        bad_rows: Iterable[str] = (),
    ) -> None:
        super().__init__(limits)
        self.raise_in = dict(raise_in or {})
        self.bad_rows = set(bad_rows)

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        error = self.raise_in.get(self.num_steps)
        result = super().execute(output)
        for row in output.scheduled:
            request_id = row.request.request_id
            if error is not None or request_id in self.bad_rows:
                self.scribble(row)
            if request_id in self.bad_rows and result.token_ids.pop(request_id, None) is not None:
                result.errors[request_id] = "the logits of this row are not numbers"
        if error is not None:
            raise error
        return result


class ScriptedExecutor:
    """Emits chosen tokens: by request id or by prompt, then end-of-sequence.

    Args:
        scripts: from a request id or a prompt (a tuple) to the tokens to emit.
    """

    def __init__(
        self,
        scripts: Mapping[str | tuple[int, ...], Sequence[int]],
        limits: ModelLimits | None = None,
    ) -> None:
        self.limits = limits or make_limits()
        self._scripts = scripts

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        return ModelOutput(
            {
                row.request.request_id: self._next_token(row)
                for row in output.scheduled
                if row.samples_token
            }
        )

    def _next_token(self, row: ScheduledRequest) -> int:
        request = row.request
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        script = self._scripts.get(request.request_id) or self._scripts.get(prompt, ())
        index = request.num_output_tokens
        return script[index] if index < len(script) else EOS_TOKEN_ID
