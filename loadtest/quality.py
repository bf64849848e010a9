"""What quantising costs a model in quality, on real text: how likely it finds the text, and how far
its predictions are from those of the weights as they were.

    perplexity    exp of the mean of -log p(next token); lower is better
    kl            mean of KL(reference || quantised) over positions, nats
    top1          share of positions at which both hold the same token for the likeliest

The windows are the same for all, and so is the code: transformers' forward of each model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor


@dataclass(slots=True)
class Tally:
    """Sums over the positions seen."""

    num_positions: int = 0
    nll: float = 0.0
    kl: float = 0.0
    num_same: int = 0

    def add(self, next_ids: Tensor, log_probs: Tensor, reference: Tensor) -> None:
        """Count positions: the tokens that follow [n], and what the model and the reference say
        [n, vocab_size].
        """
        self.num_positions += len(next_ids)
        self.nll -= float(log_probs.gather(1, next_ids[:, None]).sum())
        self.kl += float((reference.exp() * (reference - log_probs)).sum())
        self.num_same += int((reference.argmax(-1) == log_probs.argmax(-1)).sum())

    def figures(self) -> dict[str, float]:
        """As the module says."""
        return {
            "perplexity": round(math.exp(self.nll / self.num_positions), 3),
            "kl": round(self.kl / self.num_positions, 5),
            "top1": round(self.num_same / self.num_positions, 4),
        }


def read_windows(tokenizer: Tokenizer, language: str, num_windows: int, size: int) -> list[Tensor]:
    """Windows of a text that ships with this package, spread evenly over it.

    Raises:
        ValueError: it has fewer tokens.
    """
    text = (files("loadtest") / "texts" / f"{language}.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if num_windows * size > len(ids):
        raise ValueError(
            f"{num_windows} windows of {size} tokens do not fit into the {len(ids)} of the text; "
            "ask for fewer or shorter ones"
        )
    stride = len(ids) // max(1, num_windows)
    return [torch.tensor(ids[i * stride : i * stride + size]) for i in range(num_windows)]


def _log_probs(model: Any, window: Tensor) -> Tensor:
    """Of each next token: [size - 1, vocab_size], float32."""
    ids = window.to(model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def compare(
    reference: Any, models: Mapping[str, Any], windows: Sequence[Tensor]
) -> dict[str, dict[str, float]]:
    """The figures of each model."""
    tallies = {name: Tally() for name in models}
    with torch.inference_mode():
        for window in windows:
            want = _log_probs(reference, window)
            for name, model in models.items():
                tallies[name].add(window[1:].to(want.device), _log_probs(model, window), want)
    return {name: tally.figures() for name, tally in tallies.items()}
