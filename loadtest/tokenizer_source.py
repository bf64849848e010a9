"""The tokenizer of the model under test, from wherever its name says.

Reads tokenizers alone: of a model on a hub nothing else is fetched.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from deployments.config import ModelConfig
from deployments.execution.model_source import (
    PACKAGE_PREFIX,
    ModelSourceError,
    read_tokenizer_files,
    resolve_model_dir,
)


class TokenizerError(ValueError):
    """There is no such tokenizer; one line that says what to change."""


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        source: a tokenizer.json, a folder or .gguf file of a model, `package:NAME/FILE` as in a
            service's configuration, or the id of a model on the Hugging Face hub.

    Raises:
        TokenizerError: there is none, or it cannot be read.
    """
    path = Path(source)
    try:
        if path.is_file() and path.suffix == ".json":
            return _tokenizer_of(path.read_bytes())
        if path.exists() or source.startswith(PACKAGE_PREFIX):
            files = read_tokenizer_files(resolve_model_dir(ModelConfig(source=source)))
            return _tokenizer_of(files["tokenizer.json"])
    except (ModelSourceError, KeyError, OSError) as error:
        raise TokenizerError(f"no tokenizer in {source}: {_first_line(error)}") from error
    return _from_hub(source)


def _tokenizer_of(content: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises no class of its own
        raise TokenizerError(f"the tokenizer.json cannot be read: {_first_line(error)}") from error


def _from_hub(source: str) -> Tokenizer:
    try:
        return Tokenizer.from_pretrained(source)
    except Exception as error:  # those of the hub's client, of the network, and bare ones
        raise TokenizerError(
            f"no tokenizer {source}, as a path or on the hub ({_first_line(error)}): "
            "give a tokenizer.json, a model's folder, or its id on a hub that can be reached"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
