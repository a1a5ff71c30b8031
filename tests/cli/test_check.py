from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.contract.variant import VARIANTS
from attnbench.laws import LAWS
from attnbench.laws.bits import QUESTIONS

pytestmark = pytest.mark.usefixtures("forks")

PLUGIN = """
from attnbench import register
from attnbench.catalogue.attention.exact.softmax import Softmax
from attnbench.contract.variant import Traits

@register("mine", family="exact", source="me", formula="-", cost="O(n²·d)", time_exponent=2, memory_exponent=2,
          traits=Traits(exact=True, decode=True, permutable=True, bias=True))
class Mine(Softmax):
    \"\"\"Softmax attention that forgets its mask.\"\"\"

    def forward(self, q, k, v, *, key_mask=None):
        return super().forward(q, k, v)
"""


NEEDS_A_GPU = """
from attnbench import register
from attnbench.catalogue.attention.exact.softmax import Softmax
from attnbench.errors import Unsupported

@register("gpu", family="exact", source="me", formula="-", cost="")
class Gpu(Softmax):
    \"\"\"Nowhere here.\"\"\"

    def __init__(self, shape):
        raise Unsupported("it wants a GPU")
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    yield str(path)
    VARIANTS._entries.pop("mine", None)


def test_a_variant_that_is_what_it_says_ends_with_0_and_a_line_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--threads", "1", "linear", "--law", "formula", "--law", "causality"]) == 0
    out = capsys.readouterr().out
    assert "linear, in 4 settings" in out
    assert "linear is what it says it is: 2 laws hold" in out
    assert "BROKEN" not in out


def test_a_fault_is_named_and_ends_with_1(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    laws = ["--law", "hidden keys", "--law", "formula"]
    assert main(["check", "--threads", "1", "mine", "--plugin", plugin, *laws]) == 1
    out = capsys.readouterr().out
    assert "mine breaks 'hidden keys'" in out
    assert "other values at the padded positions moved the output by" in out
    assert "mine is not what it says it is: 1 of 2 laws is broken" in out


def test_several_variants_have_a_line_each(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    laws = ["--law", "hidden keys", "--law", "formula"]
    assert main(["check", "--threads", "1", "linear", "mine", "--plugin", plugin, *laws]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["linear", "2", "of", "2"] for line in lines)
    assert any(line.split()[:4] == ["mine", "1", "of", "2"] and "hidden keys" in line for line in lines)
    assert "1 of 2 variants are what they say they are" in lines


def test_json_holds_every_finding_with_number_and_bound(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--threads", "1", "mine", "--plugin", plugin, "--law", "hidden keys", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["variant"] == "mine"
    assert report["held"] is False
    assert {finding["law"] for finding in report["findings"]} == {"hidden keys"}
    broken = [finding for finding in report["findings"] if not finding["held"]]
    assert broken
    assert all(finding["number"] > finding["bound"] and finding["fault"] for finding in broken)


def test_all_passes_over_what_cannot_run_here_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "gpu.py"
    source.write_text(NEEDS_A_GPU)
    few = {name: VARIANTS.get(name) for name in ("linear", "efficient")}
    monkeypatch.setattr(VARIANTS, "_entries", few)  # of its own, so that the order of the others stays as it is
    arguments = ["--plugin", str(source), "--law", "causality"]
    assert main(["check", "--threads", "1", "all", *arguments]) == 0
    out = capsys.readouterr()
    assert "2 of 2 variants are what they say they are" in out.out
    assert "gpu is not checked: gpu: it wants a GPU" in out.err
    assert main(["check", "--threads", "1", "all", *arguments, "--json"]) == 0
    assert {"variant": "gpu", "unsupported": "gpu: it wants a GPU"} in json.loads(capsys.readouterr().out)
    assert main(["check", "--threads", "1", "gpu", *arguments]) == 2
    assert main(["check", "--threads", "1", "all", "linear:chunk=8", *arguments]) == 0
    assert "3 of 3 variants are what they say they are" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "check needs a variant, or 'all'; for example: attnbench check performer"),
        (["sofmax"], "did you mean 'softmax'?"),
        (["softmax", "--law", "causalty"], "did you mean 'causality'?"),
        (["local:window=0"], "option window=0 must be at least 1"),
        (["per-head:parts=9*local"], "heads"),
        (["linear", "--dtype", "bfloat16"], "--dtype belongs to --bits: attnbench check NAME --bits --dtype bfloat16"),
        (["linear", "--bits", "--law", "formula"], "--law does nothing with --bits"),
        (["linear", "--bits", "--as", "softmax"], "--as does nothing with --bits"),
        (["linear", "--bits", "--no-time"], "--no-time does nothing with --bits"),
        (["own.py:Mine", "--law", "formula"], "--law does nothing with FILE.py:Class; leave one of them out"),
        (["own.py:Mine", "--no-time"], "--no-time does nothing with FILE.py:Class; leave one of them out"),
        (["linear", "--bits", "--device", "cuda:9"], "no device 'cuda:9' on this machine"),
        (["flex", "--bits", "--dtype", "float64"], "flex: dtype: it takes"),
        (["--bits"], "check --bits needs a variant"),
        (["sofmax", "--bits"], "did you mean 'softmax'?"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--threads", "1", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_every_law_has_a_sentence_that_fits_the_table() -> None:
    for law in LAWS.values():
        assert law.sentence.endswith(".")
        assert len(law.sentence) <= 90


MODULE = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        return self.out(x) * (1 + 1e-6 * (len(x) > 3))
"""


def test_bits_have_an_answer_each_and_a_difference_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "own.py"
    source.write_text(MODULE)
    try:
        assert main(["check", f"{source}:Mine", "--bits", "--threads", "1", "--json"]) == 0
    finally:
        VARIANTS._entries.pop("Mine", None)
    (report,) = json.loads(capsys.readouterr().out)
    answers = {one["question"]: one for one in report["bits"]}
    assert list(answers) == list(QUESTIONS)
    assert answers["the same call twice"]["equal"] is True
    assert answers["first in a batch"]["equal"] is False
    assert answers["first in a batch"]["case"].startswith("the first of")
    assert "decode" in answers["token by token"]["why"]


def test_bits_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "linear", "--bits", "--threads", "1", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "linear, bfloat16 on cpu, causal" in out
    assert any(line.split()[-4:] == ["equal", "to", "the", "bit"] for line in out.splitlines())
    assert "not asked" in out


def test_one_variant_has_its_own_error_by_data_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attnbench.laws.laws_named", lambda names, *, time: ["formula"])
    assert main(["check", "linear", "--threads", "1", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    errors = report["own_error"]
    assert list(errors) == ["float32", "bfloat16", "float16"]
    assert errors["float32"]["output"] < 1e-6 < errors["float16"]["grad"] < errors["bfloat16"]["grad"] < 0.1
    assert errors["float32"]["distance"] > 0.1, "from softmax attention, which it is not"
    assert main(["check", "linear", "--threads", "1"]) == 0
    assert "relative error against its own formula in float64" in capsys.readouterr().out
