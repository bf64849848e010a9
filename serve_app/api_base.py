"""What all request models share: strict types, hard limits, and the fields that are refused.

Owns limits that hold whatever the configuration says, because more than that costs before anybody
can ask what it costs. Configured limits are lower and are checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from deployments.protocol import RequestRefused

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1000
"""In characters."""
MAX_CHOICES_EACH = 128
"""Of `n`, as with OpenAI."""
MAX_PROMPTS = 1024
"""In one request."""
MAX_CHOICES = 1024
"""Of one request: prompts times n."""
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOOLS = 128

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What fits the integers of the engine's tensors."""
Priority = Annotated[int, Field(ge=0, lt=2**31)]


class ApiModel(BaseModel):
    """A part of a request: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""field -> (values that change nothing, why others are refused)."""

REFUSED: Refusals = {
    "functions": ((None, []), "are not served; send tools"),
    "function_call": ((None,), "is not served; send tool_choice"),
    "modalities": ((None, ["text"]), "other than text are not served; leave them out"),
    "audio": ((None,), "is not served; leave it out"),
    "chat_template": ((None,), "of a client is not served; the model's own is used; leave it out"),
    "documents": ((None, []), "are not served; put them into a message"),
    "use_beam_search": ((None, False), "is not served; leave it out"),
    **{
        name: ((None,), "is not served; leave it out")
        for name in ("prompt_logprobs", "bad_words", "guided_grammar", "logits_processors")
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
        if not any(data.get(name) == value for value in harmless):
            raise RequestRefused.invalid(name, f"{name} {why}")
