"""The sampler alone, against plain formulas that sort whole rows and loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_checks import (
    assert_drawn_from,
    at_index,
    distribution,
    make_row,
    penalised,
    random_logits,
)

from deployments.execution.sampler import MIN_LOGPROB, Sampler
from deployments.execution.truncated_draw import NUM_CANDIDATES, uniforms

SMALL, LARGE = 40, 600
"""Vocabularies below and above the number of candidates."""


def sample(logits, requests, eos_token_ids=()):
    """Token ids in the order of the requests; `logits` is one row for all, or a row each."""
    if logits.dim() == 1:
        logits = logits.expand(len(requests), -1)
    out = Sampler(eos_token_ids).sample(logits, requests)
    assert not out.errors
    return [out.token_ids[request.request_id] for request in requests]


# --- greedy and draws -----------------------------------------------------------------------------


def test_greedy_takes_the_likeliest_token_of_each_row() -> None:
    """At temperature 0 each row's token is its own argmax, whatever the other fields say."""
    logits = torch.stack([random_logits(LARGE, seed) for seed in range(8)])
    rows = [make_row(seed=i, top_k=5 * i, top_p=0.5, min_p=0.1) for i in range(8)]
    assert sample(logits, rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(vocab_size: int, temperature: float) -> None:
    """Over many seeds, and over the indices of one seed, tokens come as often as softmax(logits /
    t) says.
    """
    logits = random_logits(vocab_size)
    want = distribution(logits, temperature)
    by_seed = [make_row(seed=seed, temperature=temperature) for seed in range(2000)]
    assert_drawn_from(sample(logits, by_seed), want)
    by_index = [at_index(index, seed=5, temperature=temperature) for index in range(1000)]
    assert_drawn_from(sample(logits, by_index), want)


TRUNCATIONS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": NUM_CANDIDATES},
    {"top_k": NUM_CANDIDATES + 1},
    {"top_k": 500},
    {"top_k": 10**9},
    {"top_k": 10**30},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 0.9},
    {"min_p": 1e-6},
    {"top_k": 300, "top_p": 0.7},
    {"top_k": 9, "top_p": 0.6, "min_p": 0.05},
    {"top_k": 1000, "top_p": 0.8, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.01},
    {"top_p": 0.99, "min_p": 1e-4},
]


@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
@pytest.mark.parametrize("cut", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_truncated_draws_are_those_of_a_full_sort(
    vocab_size: int, cut: dict[str, float], temperature: float
) -> None:
    """top_k, top_p and min_p leave exactly the tokens a full sort leaves, in its proportions, also
    where more than the candidates are needed.
    """
    logits = random_logits(vocab_size)
    rows = [make_row(seed=seed, temperature=temperature, **cut) for seed in range(1200)]
    drawn = sample(logits, rows[:300])
    if len(set(drawn)) > 1:
        drawn += sample(logits, rows[300:])
    assert_drawn_from(drawn, distribution(logits, temperature, **cut))


def test_the_edge_of_a_support_is_exact() -> None:
    """The last token that top_k, top_p or min_p keeps is drawn, the next one never is."""
    for vocab_size in (6, LARGE):
        shares = torch.zeros(vocab_size, dtype=torch.float64)
        shares[:6] = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.09, 0.06])
        logits = shares.log().float()
        for cut, size in (
            ({"top_k": 3}, 3),
            ({"top_p": 0.7}, 3),
            ({"top_p": 0.76}, 4),
            ({"min_p": 0.3}, 3),
            ({"min_p": 0.2}, 5),
            ({"top_k": 4, "top_p": 0.88}, 3),
            ({"top_p": 0.76, "min_p": 0.3}, 3),
        ):
            rows = [make_row(seed=seed, temperature=1.0, **cut) for seed in range(400)]
            assert set(sample(logits, rows)) == set(range(size)), cut


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-300])
def test_a_temperature_next_to_zero_is_greedy(temperature: float) -> None:
    """However small a temperature is, a token of the vocabulary is drawn, and it is the likeliest
    one.
    """
    for vocab_size in (SMALL, LARGE):
        logits = 10.0 * random_logits(vocab_size)
        rows = [
            make_row(temperature=temperature, seed=1),
            make_row(temperature=temperature, top_p=0.9),
        ]
        assert sample(logits, rows) == [int(logits.argmax())] * 2


def test_random_numbers_are_uniform_and_below_one() -> None:
    """The hash of seed and index fills [0, 1) evenly, over seeds and over indices, and never
    reaches 1.
    """
    for numbers in (
        torch.from_numpy(uniforms(range(4000), [0] * 4000)),
        torch.from_numpy(uniforms([-7] * 4000, range(4000))),
        torch.from_numpy(uniforms([2**63 - 1 - seed for seed in range(4000)], range(4000))),
    ):
        assert float(numbers.min()) >= 0.0
        assert float(numbers.max()) < 1.0
        counts = torch.histc(numbers, bins=20, min=0.0, max=1.0)
        assert float(((counts - 200.0) ** 2 / 200.0).sum()) < 55.0
        lag = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
        assert abs(float(lag)) < 0.08


def splitmix(seed: int, index: int) -> float:
    mask = 2**64 - 1
    state = seed & mask
    for step in (index, 0x9E3779B97F4A7C15):
        state = (state + (step + 1) * 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return (state >> 41) / 2**23


def test_random_numbers_stay_what_they_are() -> None:
    """A seed gives other numbers than the hash it is named after, on this machine or in the next
    version, and with them another text.
    """
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**64 + 5]
    for index in (0, 1, 77, 10**6):
        want = [splitmix(seed, index) for seed in seeds]
        assert uniforms(seeds, [index] * len(seeds)).tolist() == want


# --- seeds and neighbours -------------------------------------------------------------------------


def test_a_row_depends_on_its_seed_and_index_alone() -> None:
    """B43, B76: neighbours, batch position and their parameters change nothing; equal seeds draw
    equal tokens.
    """
    logits = random_logits(LARGE)
    others = random_logits(LARGE, seed=9)
    for cut in ({}, {"top_k": 20}, {"top_p": 0.95}, {"min_p": 0.001}):
        alone = [
            sample(logits, [at_index(index, seed=42, temperature=1.5, **cut)])[0]
            for index in range(20)
        ]
        assert len(set(alone)) > 5
        for index, want in enumerate(alone):
            mine = [at_index(index, seed=42, temperature=1.5, **cut) for _ in range(2)]
            rows = [
                make_row(seed=7, temperature=1.0),
                mine[0],
                make_row(),
                make_row(seed=8, temperature=0.7, top_p=0.5, presence_penalty=1.0),
                mine[1],
                make_row(seed=42, temperature=2.0, top_k=3),
            ]
            table = torch.stack([others, logits, others, others, logits, others])
            drawn = sample(table, rows)
            assert drawn[1] == drawn[4] == want
            assert drawn[2] == int(others.argmax())


def test_different_seeds_draw_different_texts() -> None:
    """Two seeds give two sequences, so the samples of n=2 differ."""
    logits = random_logits(LARGE)
    texts = {
        tuple(sample(logits, [at_index(i, seed=seed, temperature=1.0) for i in range(12)]))
        for seed in range(20)
    }
    assert len(texts) == 20


# --- edits of the logits --------------------------------------------------------------------------

PENALTIES = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.3},
    {"frequency_penalty": 0.8},
    {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"logit_bias": ((3, 4.0), (5, -100.0), (39, 2.5))},
    {"logit_bias": ((3, 4.0),), "repetition_penalty": 1.5, "frequency_penalty": 1.0},
]


@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_penalties_and_bias_are_the_plain_formulas(params: dict[str, object]) -> None:
    """Each edit moves each token's logit by its formula: repetition over prompt and output,
    presence and frequency over the output alone; the greedy token and the drawn distribution
    follow.
    """
    generator = torch.Generator().manual_seed(3)
    for trial in range(30):
        logits = random_logits(SMALL, seed=trial)
        prompt, output = torch.randint(0, SMALL, (2, 12), generator=generator).tolist()
        request = make_row(prompt, output, **params)
        want = penalised(logits, request)
        assert sample(logits, [request]) == [int(want.argmax())]
        assert bool((logits == random_logits(SMALL, seed=trial)).all()), (
            "the model's logits changed"
        )
    rows = [make_row(prompt, output, seed=s, temperature=1.0, **params) for s in range(2000)]
    assert_drawn_from(sample(logits, rows), distribution(want, 1.0))


def test_a_forbidden_token_is_never_drawn() -> None:
    """A bias of -100 takes a token out, and one of +100 makes it certain."""
    logits = random_logits(SMALL)
    best = int(logits.argmax())
    rows = [make_row(seed=s, temperature=1.0, logit_bias=((best, -100.0),)) for s in range(300)]
    assert best not in sample(logits, rows)
    rows = [make_row(seed=s, temperature=1.0, logit_bias=((4, 100.0),)) for s in range(50)]
    assert set(sample(logits, rows)) == {4}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_whatever_would_end_the_text(ignore_eos: bool) -> None:
    """B11: until min_tokens are out, no end-of-sequence id of several and no stop_token_id is
    sampled.
    """
    logits = torch.zeros(SMALL)
    logits[[5, 6, 7]] = 50.0
    logits[9] = 1.0
    params = {"min_tokens": 3, "stop_token_ids": (7,), "ignore_eos": ignore_eos}
    for num_output in range(3):
        request = make_row(output=[0] * num_output, **params)
        assert sample(logits, [request], eos_token_ids=(5, 6)) == [9]
        drawn = [
            make_row(output=[0] * num_output, seed=s, temperature=1.0, **params) for s in range(99)
        ]
        assert not {5, 6, 7} & set(sample(logits, drawn, eos_token_ids=(5, 6)))
    assert sample(logits, [make_row(output=[0] * 3, **params)], (5, 6))[0] in {5, 6, 7}


# --- logprobs and broken rows ---------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    """Log-probabilities come from the model's own logits, before any field changes them, for 0 to n
    alternatives.
    """
    logits = random_logits(SMALL)
    want = torch.log_softmax(logits.double(), dim=0)
    for num_logprobs in (0, 1, 5, 20):
        request = make_row(
            num_logprobs=num_logprobs, logit_bias=((4, 100.0),), repetition_penalty=2.0
        )
        entry = Sampler(()).sample(logits[None], [request]).logprobs[request.request_id]
        assert entry.token_id == 4
        assert entry.logprob == pytest.approx(float(want[4]), abs=1e-5)
        best = want.topk(num_logprobs)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_go_to_those_who_ask_and_are_always_numbers() -> None:
    """B32: minus infinity is clamped; rows that ask for none get none; more than the vocabulary is
    all of it.
    """
    logits = torch.full((5,), float("-inf"))
    logits[1] = 0.0
    asks = make_row(num_logprobs=20, logit_bias=((3, 5.0),))
    out = Sampler(()).sample(logits.expand(2, -1), [asks, make_row()])
    assert list(out.logprobs) == [asks.request_id]
    values = [value for _, value in out.logprobs[asks.request_id].top]
    assert values == [0.0] + [MIN_LOGPROB] * 4
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_a_broken_row_is_an_error_of_its_own(bad: float, params: dict[str, float]) -> None:
    """B32: a row with NaN or infinity is its own request's error; the others get their tokens."""
    logits = torch.stack([random_logits(SMALL, seed) for seed in range(4)])
    sound = logits.clone()
    logits[1, 17] = bad
    logits[2] = float("-inf")
    rows = [make_row(seed=i, num_logprobs=2, repetition_penalty=1.1, **params) for i in range(4)]
    out = Sampler(()).sample(logits, rows)
    broken = {rows[1].request_id, rows[2].request_id}
    assert out.errors.keys() == broken
    assert out.token_ids.keys() == out.logprobs.keys() == {r.request_id for r in rows} - broken
    for index in (0, 3):
        want = Sampler(()).sample(sound[index : index + 1], rows[index : index + 1])
        assert out.token_ids[rows[index].request_id] == want.token_ids[rows[index].request_id]


def test_a_step_that_samples_nothing_gives_nothing() -> None:
    """A step of unfinished chunks has no rows to sample, and that is no error."""
    out = Sampler(()).sample(torch.empty(0, SMALL), [])
    assert not out.token_ids
    assert not out.errors
