"""Where a text ends because of a stop string, however it arrives in pieces.

Owns the matching alone; which strings stop a text, and from when on, is `streaming`'s.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a growing text at the first of several stop strings.

    The result is `text[:min(text.find(stop) for stop in stops)]` of the whole text, however it was
    cut into pieces; with `includes_stop`, the stop string follows (of several that begin there, the
    shortest, which is complete first). Text that could still turn out to begin a stop string is
    held back, and no more than that.

    Args:
        stops: non-empty strings; none of them means that nothing is ever cut.
        includes_stop: whether the stop string that ended the text is part of it.
    """

    def __init__(self, stops: Sequence[str], includes_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""
        self.has_matched = False
        """Whether the text has ended; what is pushed later is dropped."""

    def push(self, text: str) -> str:
        """The text that is now certain to be part of the answer."""
        if not self._stops:
            return text
        if self.has_matched:
            return ""
        text = self._held + text
        found = self._find_match(text)
        begun = self._find_begun(text)
        if found < len(text) and found <= begun:
            self.has_matched, self._held = True, ""
            return self._cut(text, found)
        # A stop string that began before a match may still complete and be the first one, so both
        # are held.
        self._held = text[begun:]
        return text[:begun]

    def flush(self) -> str:
        """The text held back, once nothing will follow; cut if a match was only waiting for an
        earlier one.
        """
        text, self._held = self._held, ""
        found = self._find_match(text)
        self.has_matched = self.has_matched or found < len(text)
        return self._cut(text, found)

    def _cut(self, text: str, found: int) -> str:
        if not self._includes_stop:
            return text[:found]
        here = [len(stop) for stop in self._stops if text.startswith(stop, found)]
        return text[: found + min(here, default=0)]

    def _find_match(self, text: str) -> int:
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(starts, default=len(text))

    def _find_begun(self, text: str) -> int:
        longest = max((begun_length(text, stop) for stop in self._stops), default=0)
        return len(text) - longest


def begun_length(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
