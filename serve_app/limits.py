"""Limits on the size of one request, before any work is done for it.

Owns what is refused with 400 whatever the load. Rates and queues are `admission`'s; the size of the
body is `body_limit`'s; ranges of sampling fields are those of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.config import AdmissionConfig
from serve_app.errors import ApiError


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a request asks for, as far as it can be told before its prompts are tokenized.

    `max_tokens` is of one answer; None: the client set no bound. `max_tokens_param` is what the
    client calls it.
    """

    num_prompts: int = 1
    n: int = 1
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    stop_strings: Sequence[str] = ()
    num_stop_token_ids: int = 0
    num_logit_bias: int = 0


class RequestLimits:
    """The limits of one configuration."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config

    def check_shape(self, shape: RequestShape) -> None:
        """Refuse a request that asks for too much. Costs nothing; call it before tokenizing.

        Raises:
            ApiError: 400, names the field, the limit and what was asked.
        """
        config = self._config
        _at_most("prompt", shape.num_prompts, config.max_prompts, "prompts")
        _at_most("n", shape.n, config.max_n, "answers to a prompt")
        _at_most("n", shape.num_prompts * shape.n, config.max_choices, "prompts times n")
        _at_most("stop", len(shape.stop_strings), config.max_stop_strings, "strings")
        longest = max(map(len, shape.stop_strings), default=0)
        _at_most("stop", longest, config.max_stop_length, "characters in a string")
        _at_most("stop_token_ids", shape.num_stop_token_ids, config.max_stop_token_ids, "ids")
        _at_most("logit_bias", shape.num_logit_bias, config.max_logit_bias, "entries")
        if shape.max_tokens is not None and config.max_tokens is not None:
            _at_most(shape.max_tokens_param, shape.max_tokens, config.max_tokens, "tokens")

    def check_prompt(self, num_tokens: int, param: str) -> None:
        """Refuse a prompt that is too long; `param` is what the client calls it.

        Raises:
            ApiError: 400, context_length_exceeded.
        """
        limit = self._config.max_prompt_tokens
        if limit is not None and num_tokens > limit:
            message = (
                f"{param} has {num_tokens} tokens, but this service takes at most {limit} in a "
                "prompt; shorten it"
            )
            raise ApiError(400, message, param, "context_length_exceeded")

    def default_max_tokens(self, num_tokens: int) -> int:
        """The bound of an answer whose client set none: `num_tokens`, or less if the limit is."""
        limit = self._config.max_tokens
        return num_tokens if limit is None else min(num_tokens, limit)


def _at_most(param: str, asked: int, limit: int, what: str) -> None:
    if asked > limit:
        message = f"{param} asks for {asked} {what}, but at most {limit} are allowed; ask for fewer"
        raise ApiError(400, message, param)
