"""Where the tokenizer of a load comes from, and what a wrong name is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from loadtest.tokenizer_source import TokenizerError, load_tokenizer
from tests.unit.made_tokenizers import made_tokenizer


def saved_tokenizer(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    made_tokenizer("gpt2").save(str(folder / "tokenizer.json"))
    return folder


def test_a_file_and_a_folder_are_read(tmp_path: Path) -> None:
    """A model's folder is looked for on the hub."""
    folder = saved_tokenizer(tmp_path)
    wanted = made_tokenizer("gpt2").encode("We the People").ids
    for source in (folder, folder / "tokenizer.json"):
        assert load_tokenizer(str(source)).encode("We the People").ids == wanted


def test_of_a_hubs_model_only_the_tokenizer_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes of weights are fetched to count tokens, or a dead network ends in a traceback."""
    asked = []

    def refuse(source: str) -> Tokenizer:
        asked.append(source)
        raise OSError("no route\nto the hub")

    monkeypatch.setattr("loadtest.tokenizer_source.Tokenizer.from_pretrained", refuse)
    with pytest.raises(TokenizerError, match="some/model .*no route to the hub.*give") as told:
        load_tokenizer("some/model")
    assert asked == ["some/model"]
    assert "\n" not in str(told.value)


def test_what_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    """A broken file, or a folder without one, ends in a traceback."""
    (tmp_path / "tokenizer.json").write_text("{}")
    for source in (str(tmp_path / "tokenizer.json"), str(tmp_path)):
        with pytest.raises(TokenizerError, match="cannot be read"):
            load_tokenizer(source)
    with pytest.raises(TokenizerError, match="No such file"):
        load_tokenizer(str(tmp_path / "missing" / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="not installed"):
        load_tokenizer("package:no_such_package/model.gguf")
