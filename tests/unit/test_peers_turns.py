"""Who is measured when, what a median over rounds is, and what is printed of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from loadtest.bench_serve import free_port
from loadtest.client import Answer, Ask, Target
from loadtest.load_prompts import WordPrompts
from loadtest.load_run import EndedRequest, PlannedRequest
from loadtest.peers.contest import Contest, ContestSettings, PromptForms
from loadtest.peers.hardware_limits import Limits, ModelShapes
from loadtest.peers.launch import HealthPage, Launch, LogLine, Place, completions
from loadtest.peers.launchers import PEERS
from loadtest.peers.process import ServerFailed, ServerProcess
from loadtest.peers.process_tree import ProcessTree
from loadtest.peers.ratios import ratio_of, spread_of
from loadtest.peers.summary import Entrant, summarise
from loadtest.peers.table import aligned, number, table_of
from loadtest.peers.turns import Turn, TurnResult, fault_of, interleaved
from loadtest.peers.workloads import Sizes
from loadtest.stream_reader import StreamedAnswer, TokenCount
from loadtest.stub_openai import STUB_MODEL
from tests.unit.peers_tools import QUIET, FakeService, make_result

RATE = "tokens/s after the first"
SHAPES = ModelShapes(((4, 2), (2, 2)), num_layers=3, attention_width=2)


# --- order and arithmetic -------------------------------------------------------------------------


def test_services_take_turns_within_each_workload() -> None:
    """One service plays all its workloads before another begins, and the machine changes between
    them.
    """
    order = [
        (turn.round_number, turn.workload, turn.service) for turn in interleaved("AB", "12", 2)
    ]
    assert order == [
        (0, "1", "A"),
        (0, "1", "B"),
        (0, "2", "A"),
        (0, "2", "B"),
        (1, "1", "A"),
        (1, "1", "B"),
        (1, "2", "A"),
        (1, "2", "B"),
    ]


def test_a_ratio_is_of_the_same_round() -> None:
    """A slow round of one service is held against a fast round of the other."""
    results = [
        make_result((0, "W5", "ours"), {RATE: 10.0}),
        make_result((0, "W5", "peer"), {RATE: 5.0}),
        make_result((1, "W5", "ours"), {RATE: 40.0}),
        make_result((1, "W5", "peer"), {RATE: 10.0}),
        make_result((2, "W5", "ours"), {RATE: 9.0}),
    ]
    ratio = ratio_of(results, ("ours", "peer"), "W5", RATE)
    assert ratio is not None
    assert (ratio.median, ratio.least, ratio.greatest, ratio.count) == (3.0, 2.0, 4.0, 2)


def test_a_dropped_turn_counts_nowhere() -> None:
    """A turn that others disturbed is in the median."""
    results = [
        make_result((0, "W5", "ours"), {RATE: 10.0}),
        make_result((1, "W5", "ours"), {RATE: 2.0}, dropped="others used 0.50 cores"),
        make_result((1, "W5", "peer"), {RATE: 4.0}),
    ]
    spread = spread_of(results, "ours", "W5", RATE)
    assert spread is not None
    assert (spread.median, spread.count) == (10.0, 1)
    assert ratio_of(results, ("ours", "peer"), "W5", RATE) is None


def test_flop_of_a_prefill_grows_with_the_square_of_its_length() -> None:
    """Attention is left out, or counted over the whole square."""
    linear = 2 * (4 * 2 + 2 * 2) * 3
    assert SHAPES.linear_flop(10) == linear * 10
    assert SHAPES.prefill_flop(10) == linear * 10 + 2 * 3 * 2 * 100


# --- table ----------------------------------------------------------------------------------------


def test_columns_line_up() -> None:
    """A long name breaks the table."""
    text = aligned(["", "a"], [["x", "1"], ["long", "1,000"]])
    assert text.splitlines() == [
        "|      |     a |",
        "| ---- | ----: |",
        "| x    |     1 |",
        "| long | 1,000 |",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (12.34, "12.3"), (1.234, "1.23"), (0.0123, "0.012")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """Figures are in powers of ten, or more exact than they are."""
    assert number(value) == text


def test_the_table_shows_figures_ratios_limits_and_what_was_dropped() -> None:
    """What was measured is not what is printed."""
    results = [
        make_result((0, "W5", "ours"), {RATE: 30.0}),
        make_result((0, "W5", "peer"), {RATE: 20.0}),
        make_result((1, "W5", "ours"), {RATE: 50.0}),
        make_result((1, "W5", "peer"), {RATE: 25.0}, dropped="others used 0.50 cores"),
    ]
    entrants = [Entrant("ours", "float32", 1e8, 9.0), Entrant("peer", "bf16", None, 100.0)]
    limits = Limits(1e10, {"float32": 2e11, "bfloat16": 1e10})
    text = table_of(summarise(results, entrants, limits, SHAPES, {}))
    assert "| W5   | tokens/s after the first |" in text
    assert "| ours |      40.0 (30.0 to 50.0) |" in text
    assert "| peer |                     20.0 |" in text
    assert "| peer |                     1.50 |" in text
    assert "| ours | 40% |" in text
    assert "read 10.0 GB/s; products: float32 200 GFLOP/s, bfloat16 10.0 GFLOP/s" in text
    assert "dropped: round 1 W5 peer: others used 0.50 cores" in text


def test_a_turn_with_failed_requests_is_named_and_counts_nowhere() -> None:
    """A server that answers half of what it is asked is in the median, and fast."""
    failed = TurnResult(
        Turn(0, "W5", "peer"), {RATE: 90.0}, 3, {"status 500": "out of blocks"}, QUIET
    )
    results = [make_result((0, "W5", "ours"), {RATE: 30.0}), failed]
    entrants = [Entrant(name, "float32", None, 1.0) for name in ("ours", "peer")]
    summary = summarise(results, entrants, None, SHAPES, {"gone": "gone ended while starting"})
    assert summary["figures"]["W5"][RATE].keys() == {"ours"}
    assert summary["ratios"]["W5"][RATE] == {}
    text = table_of(summary)
    assert "| peer |                   failed |" in text
    assert "failed: round 0 W5 peer: not counted, 3 requests: out of blocks" in text
    assert "left out: gone ended while starting" in text


# --- what a request has to be ---------------------------------------------------------------------


def ended_request(num_wanted: int, num_came: int, num_read: int | None) -> EndedRequest:
    """One with a prompt of 100 tokens, as its client saw it."""
    streamed = StreamedAnswer([float(i) for i in range(num_came)], TokenCount.USAGE, num_read, 0)
    planned = PlannedRequest(Ask("", num_wanted), 100, None)
    return EndedRequest(planned, 0.0, Answer(0.0, 9.0, streamed, None))


@pytest.mark.parametrize("num_read", [None, 99, 100, 102])
def test_an_answer_of_full_length_to_the_whole_prompt_counts(num_read: int | None) -> None:
    """A special token, or a server that does not count prompts, fails a turn."""
    assert fault_of(ended_request(8, 8, num_read)) is None


@pytest.mark.parametrize(("num_came", "num_read"), [(7, 100), (9, 100), (8, 50), (8, 120)])
def test_less_work_than_was_asked_is_a_failure(num_came: int, num_read: int) -> None:
    """A server that ends early, or cuts its prompt, has the best times."""
    assert fault_of(ended_request(8, num_came, num_read)) is not None


# --- a whole contest ------------------------------------------------------------------------------


@contextmanager
def stub_server() -> Iterator[Target]:
    port = free_port()
    command = [sys.executable, "-m", "loadtest.stub_openai", "--port", str(port)]
    target = Target(f"http://127.0.0.1:{port}", "/v1/completions", STUB_MODEL)
    launch = Launch(tuple(command), target, HealthPage("/health"), "none", None)
    server = ServerProcess("stub", launch, Path(os.devnull), os.environ)
    try:
        server.wait_until_ready(60.0)
        yield target
    finally:
        server.end()


def test_a_contest_pauses_all_but_the_one_that_is_measured() -> None:
    """Two services compute at once; or one is asked while it is paused."""
    lines: list[str] = []
    waits: list[str] = []

    class Quiet(AbstractContextManager[None]):
        def __enter__(self) -> None:
            waits.append("enter")

        def __exit__(self, *_: object) -> None:
            waits.append("leave")

    prompts = WordPrompts(0)
    settings = ContestSettings(("W5", "W4"), 2, Sizes(0.1), max_others=float("inf"))
    with stub_server() as target:
        services = [FakeService("a", target), FakeService("b", target)]
        contest = Contest(settings, services, PromptForms(prompts, prompts), lines.append, Quiet)
        contest.run()
    warm_up = ["start", "send", "send", "pause"]
    w5, w4 = ["resume", "send", "pause"], ["resume", "send", "send", "pause"]
    for service in services:
        assert service.history == [*warm_up, *w5, *w4, *w5, *w4, "end"]
    assert waits == ["enter", "leave"] * 10
    assert [r.turn.service for r in contest.results] == ["a", "b"] * 4
    assert all(r.num_failed == 0 and r.figures for r in contest.results)
    assert {r.counted_by for r in contest.results} == {("confirmed_events",)}


def test_a_service_that_fails_its_requests_is_left_out() -> None:
    """A server that does not answer stays in the table with nothing to show."""
    lines: list[str] = []
    prompts = WordPrompts(0)
    settings = ContestSettings(("W5",), 1, Sizes(0.1), max_others=float("inf"))
    nobody = Target(f"http://127.0.0.1:{free_port()}", "/v1/completions", "m")
    service = FakeService("silent", nobody)
    contest = Contest(settings, [service], PromptForms(prompts, prompts), lines.append)
    with pytest.raises(ServerFailed, match="silent fails"):
        contest.run()
    assert service.history == ["start", "send", "end", "end"]
    assert any("silent is left out: silent fails" in line for line in lines)


def test_a_peer_that_ends_on_the_way_is_left_out_from_there_on() -> None:
    """The first peer that crashes ends the benchmark, or fails all later turns one by one."""

    class Crashing(FakeService):
        async def send(
            self, planned: Sequence[PlannedRequest], max_concurrency: int | None
        ) -> list[EndedRequest]:
            if self.history.count("send") == 2:
                raise ServerFailed(f"{self.name} ended while it was asked")
            return await super().send(planned, max_concurrency)

    prompts = WordPrompts(0)
    settings = ContestSettings(("W5",), 2, Sizes(0.1), max_others=float("inf"))
    with stub_server() as target:
        services = [FakeService("ours", target), Crashing("weak", target)]
        contest = Contest(settings, services, PromptForms(prompts, prompts), lambda _: None)
        contest.run()
    assert [result.turn.service for result in contest.results] == ["ours", "ours"]
    assert contest.left_out == {"weak": "weak ended while it was asked"}


def test_a_load_at_its_own_capacity_needs_that_capacity() -> None:
    """W2half is played at the rate of another service, or at none."""
    prompts = WordPrompts(0)
    settings = ContestSettings(("W2half",), 1, Sizes(0.1), max_others=float("inf"))
    with stub_server() as target:
        contest = Contest(
            settings, [FakeService("a", target)], PromptForms(prompts, prompts), lambda _: None
        )
        with pytest.raises(ValueError, match="need W2cap before them"):
            contest.run()


# --- processes ------------------------------------------------------------------------------------


def test_a_server_that_ends_while_starting_shows_its_log(tmp_path: Path) -> None:
    """The benchmark waits ten minutes for a server that is gone."""
    command = (sys.executable, "-c", "print('no such flag'); raise SystemExit(2)")
    launch = Launch(command, completions(1, "m"), LogLine("ready"), "none", None)
    server = ServerProcess("broken", launch, tmp_path / "log", os.environ)
    with pytest.raises(ServerFailed, match="broken ended while starting:\nno such flag"):
        server.wait_until_ready(60.0)
    server.end()


def test_a_paused_tree_takes_no_processor_time() -> None:
    """Children of a paused server go on computing."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    tree = ProcessTree(process.pid)
    try:
        deadline_s = time.monotonic() + 60.0
        while len(tree.processes()) < 2 or tree.cpu_s() < 0.2:
            assert time.monotonic() < deadline_s
        tree.send(signal.SIGSTOP)
        while any(each.status() != "stopped" for each in tree.processes()):
            assert time.monotonic() < deadline_s
        before_s = tree.cpu_s()
        asyncio.run(asyncio.sleep(0.1))
        assert tree.cpu_s() == before_s
    finally:
        tree.send(signal.SIGKILL)
        process.wait()


# --- what is not installed ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PEERS if name != "serve-batch"])
def test_a_peer_that_is_not_installed_says_how_to_install_it(name: str, tmp_path: Path) -> None:
    """A missing peer ends the benchmark, or is left out in silence."""
    place = Place(tmp_path / "peers", tmp_path / "model")
    peer = PEERS[name]
    assert not peer.is_installed(place)
    line = peer.skip_line(place)
    assert f"{name} is skipped" in line
    assert f"chunkserve bench peers --install {tmp_path / 'peers'} --peers {name}" in line
