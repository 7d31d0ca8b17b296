"""A quantised model becomes a plain one of the same values: weights, tokenizer and template come along."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from quantised_files import published_gpt_oss, write_gguf
from shoal.errors import ModelError
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.model.quantised import is_whole
from shoal.model.renderer_loading import load_renderer, local_directory
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.types import Message, Role


def test_a_gguf_file_becomes_a_directory_with_the_same_weights_and_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = untrained(Shape(width=32, feed_forward=64), seed=3)
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    write_gguf(model, file)
    directory = local_directory(str(file))
    said = capfd.readouterr().err
    assert all(line.startswith("reading tiny.gguf (once): ") for line in said.splitlines()), "no library's bar"
    assert (directory / "config.json").is_file()
    assert local_directory(str(file.parent)) == directory, "a directory with one GGUF file stands for it"
    row_T = torch.tensor([5, 6, 7, 40, 41])
    found_T = packed_logprobs(load_model(directory), row_T, [5])
    save(model, tmp_path / "plain")
    wanted_T = packed_logprobs(load_model(tmp_path / "plain"), row_T, [5])
    torch.testing.assert_close(found_T, wanted_T)
    renderer = load_renderer(directory)
    assert (
        renderer.prompt_ids([Message(Role.USER, "x")])
        == AutoTokenizer.from_pretrained(directory)("<x>=", add_special_tokens=False).input_ids
    )
    assert renderer.stop_token_ids == (model.config.vocab_size - 1,)


def test_a_file_that_is_no_gguf_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"no such thing")
    with pytest.raises(ModelError, match=r"model\.gguf: expected a whole GGUF file, got one that is cut or damaged"):
        local_directory(str(tmp_path / "model.gguf"))
    assert list((tmp_path / "cache" / "shoal").iterdir()) == []
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a \.gguf file"):
        local_directory(str(tmp_path / "model.bin"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file of a tiny model."""
    file = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    write_gguf(untrained(Shape(width=32, feed_forward=64), seed=3), file)
    return file.read_bytes()


@given(share=st.floats(0, 1, exclude_max=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_gguf_file_that_is_cut_anywhere_is_not_whole(share: float, whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    assert not is_whole(tmp_path / "cut.gguf")
    (tmp_path / "whole.gguf").write_bytes(whole)
    assert is_whole(tmp_path / "whole.gguf")


@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_of_a_gguf_file_that_have_changed_raise_nothing_of_their_own(
    at: float, byte: int, whole: bytes, tmp_path: Path
) -> None:
    place = int(at * at * len(whole))  # mostly in the header
    (tmp_path / "changed.gguf").write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    assert is_whole(tmp_path / "changed.gguf") in (True, False)


def test_a_gguf_file_of_an_unknown_architecture_is_refused_in_a_sentence_after_its_progress(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "odd.gguf").write_bytes(whole.replace(b"qwen2", b"qwenX"))
    with pytest.raises(ModelError, match=r"odd\.gguf: cannot be read as a model: [^\n]+$"):
        local_directory(str(tmp_path / "odd.gguf"))
    said = capfd.readouterr().err
    assert said.startswith("reading odd.gguf (once): starting, 0 s\n")
    assert "Traceback" not in said


def test_a_directory_with_several_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match="several GGUF files"):
        local_directory(str(tmp_path))


def test_published_weights_of_gpt_oss_become_a_directory_of_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    published = tmp_path / "published"
    model = published_gpt_oss(published)
    directory = local_directory(str(published))
    assert directory != published
    assert local_directory(str(published)) == directory, "it is made once"
    found = load_file(directory / "model.safetensors")
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (torch.bfloat16, one.shape) for name, one in model.state_dict().items()
    }
    assert all(torch.equal(one, found[name]) for name, one in model.state_dict().items())
    assert load_model(directory).config.model_type == "gpt_oss"
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    question = [Message(Role.USER, "x")]
    assert load_renderer(directory).prompt_ids(question) == load_renderer(published).prompt_ids(question)
