"""How long a step takes on a GPU, from the token counts of the step.

Owns the formula and its files. Does not know requests, schedulers or clocks.

A step without a prompt chunk is bound by memory: weights and the KV cache are read once. A step
with one is bound by the larger of reading the weights and multiplying with them:

    decode step   fixed + per_decode * n + per_context_token * C
    chunk step    fixed + max(weights, per_token * T) + per_context_token * C + per_decode * n
                  + per_attention_pair * Q + per_prefill_context_token * K

    n  decodes                            C  tokens of KV cache that the decodes read
    T  tokens in the step                 Q  (query, key) pairs of the chunks
    K  tokens that the chunks attend to, each chunk's own included

Where the contexts of the decodes differ, the longest holds up a part of the others' attention: C
counts as if each context were a share, `context_skew`, of the way from its length to the longest
(the skew of LLMServingSim's profiles).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

COST_MODELS_DIR = Path(__file__).parent / "cost_models"
"""In the package, so that an installed one has them; `configs/cost_models` is a link to it."""


class CostModelError(ValueError):
    """A cost model that cannot be used; one line that says what to change."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on.

    Args:
        num_decodes: requests that compute one token each.
        decode_context_tokens: tokens in the KV cache that these decodes read, their own included.
        prefills: of each chunk, its new tokens and how many of its prompt were computed before.
        skew_tokens: how many more the decodes would read were each as long as the longest.
    """

    num_decodes: int
    decode_context_tokens: int
    prefills: tuple[tuple[int, int], ...] = ()
    skew_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Coefficients of a step without a chunk, in milliseconds."""

    fixed_ms: float
    per_decode_ms: float
    per_context_token_ms: float


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Coefficients of a step with a chunk, in milliseconds."""

    fixed_ms: float
    weights_ms: float
    per_token_ms: float
    per_context_token_ms: float
    per_decode_ms: float
    per_attention_pair_ms: float
    per_prefill_context_token_ms: float


_Cost = TypeVar("_Cost", DecodeCost, ChunkCost)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The step times of one model on one GPU.

    `num_kv_tokens` is how many tokens its KV cache holds beside the weights; `fit_error` is in
    percent of the step time, by kind of step; `context_skew` is 0 where nobody measured it.
    """

    name: str
    model: str
    gpu: str
    source: str
    num_kv_tokens: int
    decode: DecodeCost
    chunk: ChunkCost
    fit_error: Mapping[str, Mapping[str, float]]
    context_skew: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        """Seconds that a step takes."""
        if not shape.prefills:
            return self.decode_steps_s(shape, 1)[0]
        n = shape.num_decodes
        context = shape.decode_context_tokens + self.context_skew * shape.skew_tokens
        num_tokens, num_pairs, num_attended = n, 0.0, 0
        for num_new, num_computed in shape.prefills:
            num_tokens += num_new
            num_pairs += num_new * (num_computed + (num_new + 1) / 2)
            num_attended += num_new + num_computed
        chunk = self.chunk
        return (
            chunk.fixed_ms
            + max(chunk.weights_ms, chunk.per_token_ms * num_tokens)
            + chunk.per_context_token_ms * context
            + chunk.per_decode_ms * n
            + chunk.per_attention_pair_ms * num_pairs
            + chunk.per_prefill_context_token_ms * num_attended
        ) / 1e3

    def decode_steps_s(self, first: StepShape, num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` steps without a chunk, of which each reads a token more by
        every decode than the one before.
        """
        decode, num_decodes = self.decode, first.num_decodes
        # Whole tokens are added up first: each step takes to the last bit what it does by itself.
        context, skew = first.decode_context_tokens, self.context_skew * first.skew_tokens
        base_ms = decode.fixed_ms + decode.per_decode_ms * num_decodes
        per_token_ms = decode.per_context_token_ms
        return [
            (base_ms + per_token_ms * (context + num_decodes * step + skew)) / 1e3
            for step in range(num_steps)
        ]

    @classmethod
    def load(cls, name_or_path: str | Path) -> CostModel:
        """Read a cost model: a JSON file, or one of `configs/cost_models` by its name.

        Raises:
            CostModelError: there is no such model, or the file is not one.
        """
        path = Path(name_or_path)
        if not path.is_file():
            path = COST_MODELS_DIR / f"{name_or_path}.json"
        if not path.is_file():
            known = ", ".join(cost_model_names()) or "none"
            raise CostModelError(
                f"no cost model {name_or_path}: give the path of a JSON file, or one of: {known}"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CostModelError(f"{path}: is not JSON: {error}") from error
        return _parse(data, str(path))

    def save(self, path: Path) -> None:
        """Write it as a file that `load` reads."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def cost_model_names() -> list[str]:
    """What `CostModel.load` knows by name."""
    return sorted(path.stem for path in COST_MODELS_DIR.glob("*.json"))


def _parse(data: Any, where: str) -> CostModel:
    values = _keys_of(CostModel, data, where)
    for key in ("name", "model", "gpu", "source"):
        if not isinstance(values[key], str):
            raise CostModelError(f"{where}: {key} must be a text, got {values[key]!r}")
    num_kv_tokens = values["num_kv_tokens"]
    if type(num_kv_tokens) is not int or num_kv_tokens < 1:
        raise CostModelError(f"{where}: num_kv_tokens must be at least 1, got {num_kv_tokens!r}")
    _check_number(values, "context_skew", where)
    values["decode"] = _coefficients(DecodeCost, values["decode"], f"{where}: decode")
    values["chunk"] = _coefficients(ChunkCost, values["chunk"], f"{where}: chunk")
    return CostModel(**values)


def _coefficients(cost: type[_Cost], data: Any, where: str) -> _Cost:
    values = _keys_of(cost, data, where)
    for key in values:
        _check_number(values, key, where)
    return cost(**values)


def _check_number(values: Mapping[str, Any], key: str, where: str) -> None:
    value = values[key]
    # A negative one would let a step end before it began.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise CostModelError(f"{where}.{key} must be a number, at least 0, got {value!r}")


def _keys_of(record: type, data: Any, where: str) -> dict[str, Any]:
    defaults = {each.name: each.default for each in fields(record)}
    expected = list(defaults)
    if not isinstance(data, dict):
        raise CostModelError(f"{where}: must be an object with the keys {', '.join(expected)}")
    for key, default in defaults.items():
        if key not in data and default is MISSING:
            raise CostModelError(f"{where}: lacks the key {key}")
    for key in data:
        if key not in expected:
            raise CostModelError(f"{where}: unknown key {key}; known: {', '.join(expected)}")
    return {key: data.get(key, default) for key, default in defaults.items()}
