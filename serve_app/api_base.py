"""What all request models share: strict types, and the fields that are refused.

The models keep the limits that hold whatever is configured (`admission_config`), so that a page of
the API tells them; `limits` keeps the configured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from deployments.protocol import RequestRefused

MAX_TOOLS = 128
MAX_SALT_LENGTH = 1024
"""In characters."""

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What fits the integers of the engine's tensors."""
Priority = Annotated[int, Field(ge=0, lt=2**31)]


class ApiModel(BaseModel):
    """A part of a request: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""field -> (values that change nothing, why others are refused)."""

SUFFIX_REFUSAL = ((None, ""), "is not served: text is only continued at its end; leave it out")
_LEAVE_OUT = "is not served; leave it out"

REFUSED: Refusals = {
    "functions": ((None, []), "are not served; send tools"),
    "function_call": ((None,), "is not served; send tool_choice"),
    "modalities": ((None, ["text"]), "other than text are not served; leave them out"),
    "audio": ((None,), "is not served; leave it out"),
    "chat_template": ((None,), "of a client is not served; the model's own is used; leave it out"),
    "documents": ((None, []), "are not served; put them into a message"),
    "use_beam_search": ((None, False), _LEAVE_OUT),
    "return_token_ids": ((None, False), _LEAVE_OUT),
    "return_tokens_as_token_ids": ((None, False), _LEAVE_OUT),
    "truncation_side": ((None, "left"), "other than left is not served; leave it out"),
    "vllm_xargs": ((None, {}), _LEAVE_OUT),
    "mm_processor_kwargs": ((None, {}), _LEAVE_OUT),
    **{
        name: ((None, []), _LEAVE_OUT)
        for name in ("allowed_token_ids", "bad_words", "logits_processors", "logprob_token_ids")
    },
    **{
        name: ((None,), _LEAVE_OUT)
        for name in (
            "guided_grammar",
            "kv_transfer_params",
            "prompt_embeds",
            "prompt_logprobs",
            "repetition_detection",
            "thinking_token_budget",
            "web_search_options",
        )
    },
}
"""Fields that would change the answer and are not served, on every generating route."""


def refuse(data: Any, refusals: Refusals) -> None:
    """Refuse a body that asks for what is not served.

    Raises:
        RequestRefused: names the first such field.
    """
    if not isinstance(data, dict):
        return
    for name, (harmless, why) in refusals.items():
        if not any(is_same(data.get(name), value) for value in harmless):
            raise RequestRefused.invalid(name, f"{name} {why}")


def is_same(sent: Any, value: Any) -> bool:
    """Whether two JSON values are equal and of one type: true is no 1, and neither is 1.0."""
    return type(sent) is type(value) and bool(sent == value)
