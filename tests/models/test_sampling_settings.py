"""How a model asks to be sampled: folders and GGUF files, in Python and on the command line."""

from __future__ import annotations

import json

import gguf
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.models import demo, load_sampling
from tests.cli.commands import error

ASKED = {"do_sample": True, "temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.1}


@pytest.fixture
def folder(tmp_path):
    """Makes the bundled model's folder with other settings."""

    def make(**settings):
        for file in demo.directory().iterdir():
            if file.is_file():
                (tmp_path / file.name).symlink_to(file)
        path = tmp_path / "generation_config.json"
        path.unlink(missing_ok=True)
        path.write_text(json.dumps(settings))
        return tmp_path

    return make


def test_a_folder(folder, tmp_path):
    assert load_sampling(folder(**ASKED)) == kvjax.Sampling(1.5, 50, 0.8, None, 1.1)
    (tmp_path / "generation_config.json").unlink()
    assert load_sampling(tmp_path) == kvjax.Sampling()


def test_what_kvjax_lacks_is_named(folder):
    with pytest.raises(ValueError, match="no_repeat_ngram_size = 3"):
        load_sampling(folder(no_repeat_ngram_size=3))


def test_a_gguf_file(tmp_path):
    def written(**settings):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        for name, value in settings.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_int32
            add(f"general.sampling.{name}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "model.gguf"

    assert load_sampling(written()) == kvjax.Sampling()
    assert load_sampling(written(temp=0.5, top_k=40)) == kvjax.Sampling(0.5, top_k=40)
    assert load_sampling(written(temp=0.5, penalty_repeat=1.25)).repetition_penalty == 1.25
    with pytest.raises(ValueError, match="mirostat"):
        load_sampling(written(mirostat=2))


GENERATE = ("generate", "--prompt", "The", "--max-new", "24", "--method", "full")


def test_the_command_line_says_what_a_model_asks_for(folder, capsys):
    path = folder(**ASKED, no_repeat_ngram_size=3)
    assert main([*GENERATE, "--model", str(path)]) == 0
    greedy, said = capsys.readouterr()
    line = next(line for line in said.splitlines() if "asks for" in line)
    assert line == (
        "the model asks for temperature 1.5, top_k 50, top_p 0.8, repetition_penalty 1.1: "
        "--model-sampling takes it; kvjax does not have no_repeat_ngram_size 3"
    )
    assert main([*GENERATE, "--model", str(path), "--model-sampling", "--seed", "3"]) == 0
    drawn, said = capsys.readouterr()
    assert "kvjax does not have no_repeat_ngram_size 3" in said and drawn != greedy
    # Options win over the model's settings, and who gives one is not told of them.
    assert main([*GENERATE, "--model", str(path), "--temperature", "0"]) == 0
    again, said = capsys.readouterr()
    assert again == greedy and "asks for" not in said


def test_a_penalty_of_the_command_line(folder, capsys):
    args = [*GENERATE, "--model", str(folder())]
    main(args)
    plain = capsys.readouterr().out
    main([*args, "--repetition-penalty", "1.5"])
    assert capsys.readouterr().out != plain
    assert "--repetition-penalty must be" in error(capsys, *args, "--repetition-penalty", "0")
