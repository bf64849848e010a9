"""Stop strings: cut exactly, hold back exactly (public fault B05)."""

from __future__ import annotations

import random

from serve_app.stops import StopMatcher


def cut(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.has_matched


def test_a_stop_string_over_several_pieces_is_never_sent() -> None:
    """The beginning of a stop string is sent before the match completes."""
    matcher = StopMatcher(["DEF"])
    assert [matcher.push(piece) for piece in ["AB", "CD", "E", "FG"]] == ["AB", "C", "", ""]
    assert matcher.has_matched


def test_a_stop_string_may_begin_and_end_within_pieces() -> None:
    """A stop string matches at the ends of tokens alone."""
    assert cut(["BC"], ["AB", "CD"]) == ("A", True)


def test_no_more_is_held_than_could_begin_a_stop_string() -> None:
    """The whole length of a stop string is held back, so that text comes late."""
    matcher = StopMatcher(["xyz"])
    assert [matcher.push("abcx"), matcher.push("a"), matcher.push("xy")] == ["abc", "xa", ""]
    assert matcher.flush() == "xy"


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    """After a false start, the match that began within it is missed."""
    assert cut(["aab"], list("aaab!")) == ("a", True)


def test_the_first_stop_in_the_text_wins_over_the_first_to_complete() -> None:
    """Where the text is cut depends on how it was cut into tokens."""
    assert cut(["abc", "b"], ["abc"]) == cut(["abc", "b"], list("abc")) == ("", True)
    assert cut(["abc", "b"], list("abd")) == ("a", True)
    assert cut(["abc", "b"], ["ab"]) == ("a", True)


def test_without_stops_nothing_is_held() -> None:
    """Text is delayed although no stop string was asked for."""
    assert StopMatcher([]).push("abc") == "abc"


def test_any_cutting_gives_the_text_before_the_first_match() -> None:
    """Some way of cutting the text into pieces finds another end than the whole text has."""
    rng = random.Random(3)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randrange(12)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        ends = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        starts = [start for stop in stops if (start := text.find(stop)) >= 0]
        assert cut(stops, pieces) == (text[: min(starts, default=len(text))], bool(starts))
