"""What a plan says of a trained model whose weights nobody reads is what a call of the model turns out to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.harness.forecast import estimate
from attnbench.harness.inside.call import prepare
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.models.pretrained.pretrained_cell import Swapped, operators_of
from attnbench.suite.cell import UNTOUCHED, Cell, Pretrained

N = 32


def cell(variant: str, name: str, shape: Shape, pass_: Any) -> Cell:
    spec = Spec(UNTOUCHED) if variant == UNTOUCHED else parse_spec(variant)
    given = {"level": "pretrained", "measure": ("time", "memory", "loss"), "pretrained": Pretrained(name, "", 6)}
    return Cell("s", "s", spec, shape, pass_=pass_, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("pass_", ["forward", "training"])
@pytest.mark.parametrize("variant", [UNTOUCHED, "softmax", "local:window=4", "linear"])
def test_the_shipped_model_is_foreseen_as_it_runs(variant: str, pass_: str) -> None:
    asked = cell(variant, "listops", Shape(batch=3, heads=2, seq_len=N, head_dim=32), pass_)
    ((_, found),) = estimate([asked], 1)
    real = prepare(asked)
    assert found.reason == ("without what flash_cpu holds inside" if variant == UNTOUCHED else "")
    assert found.matmul_flops == count(real.run).matmul_flops
    assert found.peak_bytes == pytest.approx(peak_tensor_bytes(real.run), rel=0.05)


def test_a_variant_that_cannot_take_the_models_place_is_refused_before_anything_is_run() -> None:
    asked = cell("linformer:rank=256", "listops", Shape(batch=3, heads=2, seq_len=N, head_dim=32), "forward")
    ((_, found),) = estimate([asked], 1)
    assert found.reason.startswith("unsupported: rank 256 is above the 32 keys")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "BERT", "ModernBERT"])
def test_a_model_of_the_library_is_foreseen_from_its_configuration(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")
    from attnbench.models.pretrained.language_model import LanguageModel
    from attnbench.models.pretrained.pretrained_cell import described
    from tests.models.pretrained import families

    model = families.make(families.FAMILIES[family])
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    subject = LanguageModel(family, model, N)
    layer = next(one for one in subject.layers if not one.kept)
    shape = Shape(2, layer.shape.H, N, layer.shape.D, kv_heads=layer.shape.H // layer.sharing, causal=subject.causal)
    asked = cell("softmax", str(tmp_path), shape, "forward")
    with FakeTensorMode():
        unread, predicts = described(asked).make(shape)
    assert predicts is subject.predicts
    assert [(one.shape, one.sharing, bool(one.kept)) for one in unread.layers] == [
        (one.shape, one.sharing, bool(one.kept)) for one in subject.layers
    ]
    monkeypatch.setattr("attnbench.models.pretrained.pretrained_cell.open_model", None)
    ((_, found),) = estimate([asked], 1)
    swapped = Swapped(subject, operators_of(asked, subject))
    with torch.inference_mode():
        counted = count(lambda: swapped(torch.ones(2, N, dtype=torch.int64)))
    keeps_its_own = any(one.kept for one in subject.layers)  # some layers still call torch's fused attention
    assert found.reason == ("without what flash_cpu holds inside" if keeps_its_own else "")
    assert found.matmul_flops == counted.matmul_flops
    ((_, own),) = estimate([cell(UNTOUCHED, str(tmp_path), shape, "forward")], 1)
    assert own.reason.startswith("about: ") is subject.causal
