"""A tiny random model with a tokenizer of its own, and grammars to hold it by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jsonschema
from tiny_models import load, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deployments.config import CacheConfig, ExecutionConfig, ServiceConfig
from deployments.execution.model_executor import ModelExecutor
from deployments.protocol import Grammar

_CHARS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "ĉ"]
_WORDS = ["true", "null", '":', '{"', '"}', 'Ġ"', ',"', "Ġa", "12", "id", "tags", "],", "yes", "no"]
EOS, OTHER_EOS, MAX_LEN = "<eos>", "<end>", 1024


@cache
def tokenizer() -> Tokenizer:
    """Printable ASCII byte by byte, some longer tokens, and two that end a text; fewer than the
    model's vocabulary has.
    """
    vocab = {text: index for index, text in enumerate([*_CHARS, *_WORDS])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([EOS, OTHER_EOS])
    return made


def eos_token_ids() -> tuple[int, ...]:
    return tuple(tokenizer().token_to_id(text) for text in (EOS, OTHER_EOS))


def tokenizer_files() -> dict[str, bytes]:
    return {"tokenizer.json": tokenizer().to_str().encode()}


def make_executor(num_blocks: int = 128) -> ModelExecutor:
    """Of blocks of eight tokens."""
    model = make_model("llama", max_position_embeddings=MAX_LEN)
    loaded = replace(
        load(model, eos_token_ids()), max_model_len=MAX_LEN, tokenizer_files=tokenizer_files()
    )
    config = ServiceConfig(
        cache=CacheConfig(num_blocks=num_blocks, block_size=8),
        execution=ExecutionConfig(device="cpu"),
    )
    return ModelExecutor(loaded, config)


def text_of(token_ids: list[int]) -> str:
    """The text of an output, without the token that ended it."""
    assert token_ids[-1] in eos_token_ids()
    return tokenizer().decode(token_ids[:-1], skip_special_tokens=False)


SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 1, "maxItems": 3},
        "more": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
    "required": ["id", "name", "tags", "more"],
    "additionalProperties": False,
}
REGEX = r"(\w{2,5}-){3,6}[0-9]{4} (true|no)!?"
CHOICES = ["yes", "yes, but", "no", 'say "no"\n']

JSON_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
GRAMMARS = {
    "json_schema": JSON_SCHEMA,
    "regex": Grammar("regex", REGEX),
    "choice": Grammar("choice", json.dumps(CHOICES)),
}


def _follows_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FOLLOWS: dict[str, Callable[[str], bool]] = {
    "json_schema": _follows_schema,
    "regex": lambda text: re.fullmatch(REGEX, text) is not None,
    "choice": lambda text: text in CHOICES,
}
