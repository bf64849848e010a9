"""Ray Serve with @serve.batch and generate, the do-it-yourself way: batches of up to 16 requests,
each padded to its longest prompt and run to its longest answer.

    python -m loadtest.peers.apps.serve_batch_app MODEL_DIR PORT DTYPE NUM_THREADS

Speaks as much of OpenAI's completions as the load client needs. Answers come whole, as one event.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of its routes as classes.

import json
import sys
import time
from typing import Any

MAX_BATCH = 16
BATCH_WAIT_S = 0.05


class Generator:
    """The model, and batches for it.

    Args:
        model_dir: of safetensors and a tokenizer.
        dtype: of its weights.
        num_threads: that it computes with.
    """

    def __init__(self, model_dir: str, dtype: str, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(num_threads)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        self._model = model.eval()

    def generate(self, bodies: list[dict[str, Any]]) -> list[tuple[int, str]]:
        """Numbers of tokens and texts of the answers, all of full length."""
        import torch

        prompts = [self._ids(body["prompt"]) for body in bodies]
        longest = max(map(len, prompts))
        pad = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (longest - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
        num_new = max(int(body["max_tokens"]) for body in bodies)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=num_new,
                max_new_tokens=num_new,
                pad_token_id=pad,
            )
        answers = []
        for row, body in zip(out, bodies, strict=True):
            kept = row[longest : longest + int(body["max_tokens"])]
            answers.append((len(kept), self._tokenizer.decode(kept)))
        return answers

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer(prompt)["input_ids"]
            return ids
        return list(prompt)


def build(model_dir: str, dtype: str, num_threads: int) -> Any:
    """The Serve application."""
    from fastapi import FastAPI, Request
    from fastapi.responses import Response
    from ray import serve

    api = FastAPI()

    @serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    @serve.ingress(api)
    class Batched:
        def __init__(self) -> None:
            self._generator = Generator(model_dir, dtype, num_threads)

        @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=BATCH_WAIT_S)
        async def _answer(self, bodies: list[dict[str, Any]]) -> list[tuple[int, str]]:
            return self._generator.generate(bodies)

        @api.get("/v1/models")
        async def models(self) -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "m"}]}

        @api.post("/v1/completions")
        async def completions(self, request: Request) -> Response:
            num_tokens, text = await self._answer(await request.json())
            return Response(events(num_tokens, text), media_type="text/event-stream")

    # The decorator makes a deployment of the class, which its types do not tell.
    deployment: Any = Batched
    return deployment.bind()


def events(num_tokens: int, text: str) -> str:
    """A whole answer as one event, then its usage and the end."""
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    usage = {"choices": [], "usage": {"completion_tokens": num_tokens}}
    return (
        f"data: {json.dumps({'choices': [choice]})}\n\n"
        f"data: {json.dumps(usage)}\n\n"
        "data: [DONE]\n\n"
    )


def main() -> None:
    """Serve until ended."""
    import ray
    from ray import serve

    model_dir, port, dtype, num_threads = sys.argv[1:5]
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(build(model_dir, dtype, int(num_threads)), blocking=False)
    print(f"serving on {port}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
