"""Random schedules from a seed: small pools, shared prefixes, salts, classes, aborts and
failures.
"""

from __future__ import annotations

from functools import cache
from random import Random

from doubles import make_limits
from schedule_net import Fate, ScheduleNet, Setup

from deployments.config import SchedulerConfig
from deployments.protocol import GenerateRequest, SamplingParams

MAX_LIVE = 9


def random_setup(rng: Random) -> Setup:
    """A tiny pool under a random configuration, so that every limit is met often."""
    chunk_size = rng.choice((1, 2, 3, 5, 8, 12))
    max_num_seqs = rng.randint(1, 6)
    config = SchedulerConfig(
        chunk_size=chunk_size,
        overlap_ratio=rng.choice((0.0, 0.1, 0.25, 0.5)),
        batch_timeout_ms=rng.choice((0.0, 3.0, 20.0, 1000.0)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(1, chunk_size + 4),
        max_num_passes=rng.choice((0, 1, 2, 5)),
    )
    limits = make_limits(
        num_blocks=rng.randint(3, 16),
        block_size=rng.choice((1, 2, 3, 4)),
        max_model_len=rng.choice((16, 30, 1000)),
    )
    return Setup(limits, config, rng.random() < 0.85, rng.choice((0, 0, 12)))


def random_prompt(rng: Random, block_size: int) -> tuple[int, ...]:
    """Blocks from a library of two, then a tail: prefixes are shared, blocks repeat elsewhere, and
    some prompts come again and again."""
    if rng.random() < 0.4:
        rng = Random(rng.randrange(4))
    prompt: list[int] = []
    for _ in range(rng.randint(0, 4)):
        prompt += [rng.randint(1, 2)] * block_size
    return tuple(prompt) + tuple(rng.randint(1, 2) for _ in range(rng.randint(0, 2 * block_size)))


@cache
def make_params(
    max_tokens: int, temperature: float, seed: int | None, ignore_eos: bool
) -> SamplingParams:
    """Checked once for each combination: the net makes them by the thousand."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos
    )


def random_request(rng: Random, setup: Setup, number: int) -> GenerateRequest:
    """Any request, one that must be refused now and then."""
    params = make_params(
        rng.randint(1, 12), rng.choice((0.0, 1.0)), rng.choice((None, 5)), rng.random() < 0.2
    )
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=random_prompt(rng, setup.limits.block_size),
        sampling_params=params,
        priority=rng.choice((0, 0, 1, 2)),
        chunk_size=rng.choice((None, None, None, 1, 4)),
        cache_salt=rng.choice(("", "", "", "b")),
    )


def random_fate(rng: Random, net: ScheduleNet, number: int) -> Fate:
    """Mostly nothing happens to a step but time."""
    duration_s = rng.choice((0.0, 0.001, 0.004, 0.03))
    luck = rng.random()
    if luck < 0.88:
        return Fate(duration_s)
    index = rng.randrange(MAX_LIVE)
    if luck < 0.905:
        return Fate(duration_s, raises=True)
    if luck < 0.945:
        return Fate(duration_s, bad_row=index)
    if luck < 0.98:
        return Fate(duration_s, meanwhile=(lambda: net.abort(index),))
    request = random_request(rng, net.setup, -number)
    return Fate(duration_s, meanwhile=(lambda: net.abort(index), lambda: net.add(request)))


def run_episode(rng: Random, num_steps: int) -> ScheduleNet:
    """At least so many steps under one configuration, and then until nothing is left."""
    net = ScheduleNet(random_setup(rng))
    number = 0
    while net.num_steps < num_steps:
        number += 1
        if len(net.live) < MAX_LIVE and rng.random() < 0.45:
            net.add(random_request(rng, net.setup, number))
        if rng.random() < 0.03:
            net.abort(rng.randrange(MAX_LIVE))
        if rng.random() < 0.05:
            net.clock.advance(rng.choice((0.001, 0.05, 2.0)))
        if net.live:
            net.step(random_fate(rng, net, number))
    net.drain()
    return net


def run_schedules(seed: int, num_steps: int, num_steps_an_episode: int = 200) -> list[ScheduleNet]:
    """Episodes of one seed until they have made so many steps; the same each time."""
    rng = Random(seed)
    nets: list[ScheduleNet] = []
    while sum(net.num_steps for net in nets) < num_steps:
        nets.append(run_episode(rng, num_steps_an_episode))
    return nets
