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

MAX_REASON = 200
"""Characters of what a library says went wrong; some say pages."""


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
    path = Path(source).expanduser()
    is_local = path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1
    try:
        if path.suffix == ".gguf" or source.startswith(PACKAGE_PREFIX):
            path = resolve_model_dir(ModelConfig(source=source))
        elif not is_local:
            return _from_hub(source)
        if path.is_dir():
            return _tokenizer_of(read_tokenizer_files(path)["tokenizer.json"])
        return _tokenizer_of(path.read_bytes())
    except (ModelSourceError, OSError, TokenizerError) as error:
        raise _no_tokenizer(source, error) from error


def _tokenizer_of(content: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises no class of its own
        raise TokenizerError(f"its tokenizer.json cannot be read: {error}") from error


def _from_hub(source: str) -> Tokenizer:
    try:
        return Tokenizer.from_pretrained(source)
    except Exception as error:  # those of the hub's client, of the network, and bare ones
        raise TokenizerError(f"no path, and the hub did not give it: {error}") from error


def _no_tokenizer(source: str, error: Exception) -> TokenizerError:
    reason = " ".join(str(error).split())[:MAX_REASON]
    return TokenizerError(
        f"no tokenizer from {source} ({reason}); "
        "give --tokenizer a model's folder, a tokenizer.json, a package:NAME/FILE or a hub id"
    )
