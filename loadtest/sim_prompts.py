"""From requests of a trace, which have lengths and block ids, to prompts of token ids.

Owns the correspondence: equal hash ids give equal tokens at equal places, so that prefixes are
shared exactly where the trace says so. The tokens mean nothing; one stands for its whole block.
"""

from __future__ import annotations

from deployments.engine.block_hash import extend_block_hashes
from deployments.execution.sim_executor import SAMPLED_TOKEN_ID
from deployments.protocol import GenerateRequest, SamplingParams
from loadtest.trace import TraceRequest

VOCAB_SIZE = 1 << 62


class PromptMaker:
    """Makes the requests of one run; not two of them have the same id.

    Args:
        hash_block_tokens: tokens that a hash id of the trace stands for.
        route_block_tokens: tokens of the blocks by which a router knows prefixes; None: it does not
            look.
    """

    def __init__(self, hash_block_tokens: int, route_block_tokens: int | None) -> None:
        self._hash_block_tokens = hash_block_tokens
        self._route_block_tokens = route_block_tokens
        self._num_made = 0
        self._params: dict[int, SamplingParams] = {}

    def make(self, traced: TraceRequest) -> GenerateRequest:
        """The request as an ingress would send it; its answer is as long as the trace says."""
        number = self._num_made
        self._num_made += 1
        prompt = self._prompt(traced, number)
        return GenerateRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=self._params_for(traced.output_length),
            priority=traced.priority,
            block_hashes=self._route_hashes(prompt),
        )

    def _prompt(self, traced: TraceRequest, number: int) -> tuple[int, ...]:
        size, length = self._hash_block_tokens, traced.input_length
        tokens: list[int] = []
        for hash_id in traced.hash_ids[: -(-length // size)]:
            tokens += [SAMPLED_TOKEN_ID + 1 + 2 * hash_id] * size
        del tokens[length:]
        # What no hash id covers is this request's own.
        tokens += [SAMPLED_TOKEN_ID + 2 + 2 * number] * (length - len(tokens))
        return tuple(tokens)

    def _params_for(self, num_tokens: int) -> SamplingParams:
        params = self._params.get(num_tokens)
        if params is None:
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)
            self._params[num_tokens] = params
        return params

    def _route_hashes(self, prompt: tuple[int, ...]) -> tuple[bytes, ...]:
        if self._route_block_tokens is None:
            return ()
        size = self._route_block_tokens
        hashes: list[bytes] = []
        # The last token is always computed, so a block that ends with it is never reused whole.
        extend_block_hashes(hashes, prompt, (len(prompt) - 1) // size, size, "")
        return tuple(hashes)
