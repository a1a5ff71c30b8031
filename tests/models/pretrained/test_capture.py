from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import Unsupported, UsageError
from attnbench.laws.exact_error import measure_error
from attnbench.models.pretrained import capture as capturing
from attnbench.models.pretrained.capture import Wish, capture
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.subject import Exact
from attnbench.suite.cell import Cell
from tests.models.pretrained.models import tiny

ALL = Wish((0, 1, 2), 2, None, "float32")


def test_the_file_holds_what_attention_sees_and_softmax_of_it_is_what_the_layer_answers(tmp_path: Path) -> None:
    subject, file = tiny(), tmp_path / "qkv.safetensors"
    found = capture(subject, Trees(24), ALL, file, "cpu")
    stored = load_file(file)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == dict.fromkeys("qkv", (2, 3, 2, 24, 8))
    assert (found.shape, found.bytes) == ((2, 3, 2, 24, 8), file.stat().st_size)
    answers: list[Tensor] = []

    def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        answers.append(exact())
        return answers[-1]

    with torch.no_grad():
        subject.read(Trees(24).held_out(2).tokens, look)
    weights = (stored["q"] @ stored["k"].mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(weights @ stored["v"], torch.stack(answers, 1), rtol=0, atol=1e-5)


def test_the_file_says_where_it_comes_from_and_how_sharp_each_head_is(tmp_path: Path) -> None:
    subject, file = tiny(), tmp_path / "qkv.safetensors"
    capture(subject, Trees(24), ALL, file, "cpu")
    with safe_open(file, framework="pt") as stored:
        about = json.loads(stored.metadata()["attnbench"])
        q, k = (stored.get_tensor(name) for name in "qk")
    assert (about["model"], about["model_digest"]) == ("listops", subject.digest)
    assert (about["layers"], about["causal"], about["scale"]) == ([0, 1, 2], False, "folded")
    logits = q[:, 1] @ k[:, 1].mT * 8**-0.5
    for head in range(2):
        std = torch.stack([one.std() for one in logits[:, head]]).mean()
        assert about["logit_std"][1][head] == pytest.approx(float(std), abs=1e-3)
        entropy = torch.special.entr(logits[:, head].softmax(-1)).sum(-1).mean()
        assert about["attention_perplexity"][1][head] == pytest.approx(math.exp(entropy), abs=0.02)
    assert about["logit_std"][1][0] != about["logit_std"][1][1]


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        capture(tiny(), Trees(24), ALL, file, "cpu")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_layers_heads_and_dtype_are_those_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    found = capture(tiny(), Trees(24), Wish((2, 0), 1, 1, "float16"), file, "cpu")
    assert found.about["layers"] == [2, 0]
    stored = load_file(file)
    assert stored["q"].shape == (1, 2, 1, 24, 8)
    assert stored["q"].dtype is torch.float16
    capture(tiny(), Trees(24), Wish((2,), 1, 1, "float16"), file, "cpu")
    assert torch.equal(stored["q"][:, :1], load_file(file)["q"])
    whole = capture(tiny(), Trees(24), Wish((), 1, None, "float16"), file, "cpu")
    assert whole.about["layers"] == [0, 1, 2]


def test_an_error_is_measured_on_it(tmp_path: Path) -> None:
    file = tmp_path / "qkv.safetensors"
    capture(tiny(), Trees(24), ALL, file, "cpu")
    inputs = Spec.of("file", {"path": str(file), "layer": 1})
    cell = Cell("s", "w", Spec("softmax"), Shape(1, 2, 24, 8), inputs=inputs, error_draws=1)
    trivial = measure_error(replace(cell, variant=Spec("mean-value"))).rel_error
    assert trivial is not None
    assert trivial > 0.05
    exact = measure_error(cell).rel_error
    assert exact is not None
    assert exact < 1e-5


def test_layers_that_have_no_place_in_the_file_are_named(tmp_path: Path) -> None:
    subject = tiny()
    window = replace(subject.layers[1], kept="it sees a window of 4")
    wide = replace(subject.layers[2], shape=Shape(1, 4, 24, 8))
    subject.layers = (subject.layers[0], window, wide)
    found = capture(subject, Trees(24), ALL, tmp_path / "x.safetensors", "cpu")
    assert found.left_out == ("layer 1: it sees a window of 4", "layer 2: its heads are not those of layer 0")
    assert found.shape[1] == 1
    with pytest.raises(Unsupported, match="layer 1: it sees a window of 4"):
        capture(subject, Trees(24), replace(ALL, layers=(1,)), tmp_path / "x.safetensors", "cpu")


def test_what_cannot_be_captured_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="the model has 3 layers, counted from 0"):
        capture(tiny(), Trees(24), replace(ALL, layers=(3,)), tmp_path / "x.safetensors", "cpu")
    monkeypatch.setattr(capturing, "MOST_BYTES", 1000)
    with pytest.raises(UsageError, match="take fewer --layers"):
        capture(tiny(), Trees(24), ALL, tmp_path / "x.safetensors", "cpu")
    assert not list(tmp_path.iterdir())
