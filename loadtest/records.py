"""One request as its client saw it, and the bounds by which it is good.

Owns what TTFT, TPOT, gaps and lag of one request are; many requests come together in `measures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class MeasuresError(ValueError):
    """An SLO that cannot be read; one line that says what to change."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds on one clock.

    Args:
        intended_s: when it was meant to be sent.
        sent_s: when it was sent.
        num_prompt_tokens: as the server counted them.
        token_times_s: when each output token came, ascending; several may come at once.
        end_s: when the answer ended or failed.
        num_cached_tokens: of the prompt, found in a prefix cache.
        error: kind of its failure; None: it completed.
        priority: 0 is the most urgent.
    """

    intended_s: float
    sent_s: float
    num_prompt_tokens: int
    token_times_s: Sequence[float]
    end_s: float
    num_cached_tokens: int = 0
    error: str | None = None
    priority: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens that came."""
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """Intended send to first token; None: none came."""
        return self.token_times_s[0] - self.intended_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None: fewer than two came."""
        if len(self.token_times_s) < 2:
            return None
        return (self.end_s - self.token_times_s[0]) / (len(self.token_times_s) - 1)

    @property
    def e2e_s(self) -> float:
        """Intended send to end."""
        return self.end_s - self.intended_s

    @property
    def worst_gap_s(self) -> float | None:
        """Longest gap between tokens; None: fewer than two came."""
        return max(self.gaps_s(), default=None)

    @property
    def lag_s(self) -> float:
        """Intended send to send."""
        return self.sent_s - self.intended_s

    def gaps_s(self) -> list[float]:
        """Between consecutive tokens."""
        gaps_s: list[float] = np.diff(np.asarray(self.token_times_s, float)).tolist()
        return gaps_s


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that one request has to keep, in seconds; None: no bound.

    Args:
        ttft_s: on its first token.
        tpot_s: on its mean time per token.
        itl_s: on each gap between its tokens.
        e2e_s: on its end.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, bounds: Sequence[str]) -> Slo:
        """From `["ttft:300", "itl:50"]`, in milliseconds.

        Raises:
            MeasuresError: a name is unknown or twice there, or a bound is not above 0.
        """
        found: dict[str, float] = {}
        for bound in bounds:
            name, _, text = bound.partition(":")
            if name not in _SLO_FIELDS:
                known = ", ".join(_SLO_FIELDS)
                raise MeasuresError(
                    f"no SLO {name!r} in {bound!r}: give NAME:MS with one of {known}"
                )
            if _SLO_FIELDS[name] in found:
                raise MeasuresError(f"the SLO {name} is given twice: give each name once")
            found[_SLO_FIELDS[name]] = _milliseconds(bound, text) / 1e3
        return cls(**found)

    @property
    def has_bounds(self) -> bool:
        """Whether anything is asked for."""
        return any(
            bound is not None for bound in (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s)
        )

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request completed within every bound.

        A bound on what a request does not have, such as gaps of a one-token answer, is kept; but
        one without any token misses a bound on the first.
        """
        if record.error is not None or (self.ttft_s is not None and record.ttft_s is None):
            return False
        return all(
            bound is None or value is None or value <= bound
            for bound, value in (
                (self.ttft_s, record.ttft_s),
                (self.tpot_s, record.tpot_s),
                # Not looked for unless asked: it is the one that costs.
                (self.itl_s, None if self.itl_s is None else record.worst_gap_s),
                (self.e2e_s, record.e2e_s),
            )
        )

    def as_text(self) -> list[str]:
        """What `parse` takes."""
        values = {name: getattr(self, field) for name, field in _SLO_FIELDS.items()}
        return [f"{name}:{value * 1e3:g}" for name, value in values.items() if value is not None]


_SLO_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}


def _milliseconds(bound: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise MeasuresError(
            f"the SLO {bound!r} needs a number of milliseconds above 0, as in ttft:300"
        )
    return value
