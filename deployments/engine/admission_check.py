"""What can never be served, decided before a request joins the queue: one function, no state.

A request that passes here fits the model and, alone, the KV pool; so the scheduler never meets one
that cannot run.
"""

from __future__ import annotations

from deployments.engine.outputs import ModelLimits
from deployments.protocol import ErrorInfo, ErrorKind, GenerateRequest, RequestRefused


def _too_long(message: str) -> RequestRefused:
    return RequestRefused(ErrorInfo(ErrorKind.CONTEXT_LENGTH, message, "prompt"))


def _check_prompt(request: GenerateRequest, limits: ModelLimits) -> None:
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestRefused.invalid("prompt", "prompt is empty: send at least one token")
    are_integers = set(map(type, prompt)) == {int}
    if not are_integers or min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise RequestRefused.invalid(
            "prompt",
            "prompt holds a token id outside the vocabulary: ids must be integers, at least 0 and "
            f"less than {limits.vocab_size}",
        )
    if len(prompt) >= limits.max_model_len:
        raise _too_long(
            f"prompt has {len(prompt)} tokens, but the model's context is "
            f"{limits.max_model_len} tokens, output included: shorten the prompt to at most "
            f"{limits.max_model_len - 1} tokens"
        )
    if len(prompt) >= limits.num_pool_tokens:
        raise _too_long(
            f"prompt has {len(prompt)} tokens, but this server's KV cache holds "
            f"{limits.num_pool_tokens}: shorten the prompt, or have the operator raise "
            "cache.num_blocks"
        )


def _check_token_ids(request: GenerateRequest, limits: ModelLimits) -> None:
    params = request.sampling_params
    named = [("logit_bias", token_id) for token_id, _ in params.logit_bias]
    named += [("stop_token_ids", token_id) for token_id in params.stop_token_ids]
    for param, token_id in named:
        if not 0 <= token_id < limits.vocab_size:
            raise RequestRefused.invalid(
                param,
                f"{param} holds token id {token_id}; ids must be less than {limits.vocab_size}",
            )


def check_request(request: GenerateRequest, limits: ModelLimits) -> None:
    """Refuse what these limits can never serve. Prompt and max_tokens together may exceed the
    context: the output then ends with finish_reason "length" where the context does.

    Raises:
        RequestRefused: says which field to change, and to what.
    """
    _check_prompt(request, limits)
    _check_token_ids(request, limits)
    params = request.sampling_params
    if params.max_tokens > limits.max_model_len:
        raise RequestRefused.invalid(
            "max_tokens",
            f"max_tokens is {params.max_tokens}, but the model's context is "
            f"{limits.max_model_len} tokens",
        )
    if type(request.priority) is not int or request.priority < 0:
        raise RequestRefused.invalid("priority", "priority must be 0 (most urgent) or greater")
    size = request.chunk_size
    if size is not None and (type(size) is not int or size < 1):
        raise RequestRefused.invalid("chunk_size", "chunk_size must be at least 1")
