"""The part of the configuration that bounds what callers may ask for."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from deployments.config_base import Section

MOST_PROMPTS = 1024
MOST_ANSWERS_EACH = 128
"""Of `n`, as with OpenAI."""
MOST_CHOICES = 1024
MOST_STOP_STRINGS = 64
MOST_STOP_LENGTH = 1000
MOST_STOP_TOKEN_IDS = 128
MOST_LOGIT_BIASES = 1024
"""These hold whatever is configured: more costs before anybody can ask what it costs."""


class AdmissionConfig(Section):
    """What is refused before it costs anything: sizes, rates, strangers. See docs/admission.md."""

    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Of one request; 32 bytes a token of a context of 128k: room for any script escaped as \\uXXXX
    and for a list of token ids.
    """
    max_prompts: int = Field(default=128, ge=1, le=MOST_PROMPTS)
    """Prompts in one request."""
    max_n: int = Field(default=16, ge=1, le=MOST_ANSWERS_EACH)
    """Answers to one prompt."""
    max_choices: int = Field(default=256, ge=1, le=MOST_CHOICES)
    """Prompts times n of one request."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Of one prompt; by default what the model's context takes."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one answer; by default what the model's context takes."""
    max_stop_strings: int = Field(default=4, ge=0, le=MOST_STOP_STRINGS)
    """As with OpenAI."""
    max_stop_length: int = Field(default=256, ge=1, le=MOST_STOP_LENGTH)
    """Characters of one stop string."""
    max_stop_token_ids: int = Field(default=128, ge=0, le=MOST_STOP_TOKEN_IDS)
    max_logit_bias: int = Field(default=1024, ge=0, le=MOST_LOGIT_BIASES)
    """Entries of logit_bias."""
    requests_per_s: float | None = Field(default=1000.0, gt=0.0)
    """Of the whole service, over all ingress replicas; null is no bound."""
    burst: int | None = Field(default=None, ge=1)
    """Requests that may come at once after a pause; by default those of one second."""
    tokens_per_min: int | None = Field(default=None, ge=1)
    """Prompt tokens and asked-for answer tokens, of the whole service; null is no bound."""
    max_queued_prefill_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens, per pool and over all ingress replicas, whose first token is still to come;
    null leaves it to max_num_waiting of the scheduler.
    """
    keys_file: Path | None = None
    """API keys as YAML or JSON, reread when it changes; $CHUNKSERVE_API_KEYS may hold more."""
    open_metrics: bool = False
    """/metrics answers without a key, as /health and /ready always do."""
    cache_isolation: bool = True
    """Callers of different tenants share no cached prefix; without keys there is one tenant."""

    @property
    def request_burst(self) -> float:
        """Requests that may come at once; at least one."""
        return float(self.burst or max(1.0, self.requests_per_s or 1.0))
