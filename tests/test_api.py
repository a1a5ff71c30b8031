"""attnbench from Python, as a user's script calls it: in a process of its own, fresh where imports are the subject."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import attnbench
from attnbench.api.functions import check_importable
from attnbench.suite.expand import expand
from attnbench.suite.shipped import shipped_suites
from tests.bare import in_bare_process

SUITE = """
name: small
sweeps: [{name: speed, matrix: {variant: [softmax, linear], seq_len: 64, heads: 2, head_dim: 8}}]
"""
OWN = '''
import torch
from attnbench import register
from attnbench.contract.variant import Traits

@register("own", family="reference", source="me", formula="V", cost="O(1)", traits=Traits(target="other"))
class Own(torch.nn.Module):
    """The values."""

    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        return v
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SUITE, encoding="utf-8")
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return tmp_path


def script(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=280,
        check=False,
    )


@pytest.mark.usefixtures("forks")
def test_a_run_takes_paths_as_text_selects_and_overrides_and_its_rows_can_be_read_again(folder: Path) -> None:
    done = script(
        """
        import attnbench
        rows = attnbench.run(
            "small.yaml", out="here", select="linear", overrides={"seq_len": [16, 32], "causal": True}, quick=True,
            device="cpu", memory_limit="2GiB",
        )
        assert list(rows["label"]) == ["linear"] * 2, rows
        assert list(rows["seq_len"]) == [16, 32]
        assert rows["causal"].all()
        assert (rows["status"] == "ok").all(), rows["reason"]
        assert attnbench.read_results("here").equals(rows)
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.usefixtures("forks")
def test_a_comparison_has_a_table_crossovers_and_words(folder: Path) -> None:
    done = script(
        """
        import attnbench
        found = attnbench.compare(
            "softmax", "own", lengths=[32, 16], heads=2, head_dim=8, min_time=0.01, plugins=["own.py"], device="cpu",
            padding=0.25, unchecked=True,
        )
        frame = found.to_frame()
        assert list(frame["seq_len"]) == [16, 32]
        assert set(frame["a"]) == {"softmax"} and set(frame["b"]) == {"own"}
        assert (frame["ratio"] > 0).all()
        assert (frame["padding"] == 0.25).all()
        assert list(found.crossovers) == [("softmax", "own")]
        lines = repr(found).splitlines()
        assert lines[0].split()[:3] == ["a", "b", "seq_len"], lines
        assert lines[3].startswith("softmax and own: ")
        assert lines[4:] == [f"warning: {text}" for text in found.comparison.warnings]
        assert "<table" in found._repr_html_()
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("forks")
def test_a_match_has_sentences_every_try_and_what_was_chosen_measured_or_from_a_run(folder: Path) -> None:
    reference = Path(attnbench.__file__).parents[1] / "results" / "reference" / "lra-cpu"
    done = script(
        f"""
        import attnbench
        found = attnbench.match("topk", memory="1MiB", n=16, heads=1, head_dim=8, draws=2, min_time=0.01, device="cpu")
        assert found.chosen == {{"topk": "topk:keys=16"}}
        frame = found.to_frame()
        assert list(frame["value"]) == [8, 16]
        assert list(frame["chosen"]) == [False, True]
        assert repr(found).startswith("topk:keys=16 fits into memory 1.00 MiB: ")
        assert found._repr_html_().startswith("<p>topk:keys=16 fits")
        old = attnbench.match("performer", "softmax", error=0.9, results={str(reference)!r})
        assert set(old.chosen) == {{"performer", "softmax"}}
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("forks")
def test_a_plot_gives_figures_and_writes_them_only_when_asked(folder: Path) -> None:
    reference = Path(attnbench.__file__).parents[1] / "results" / "reference" / "lra-cpu"
    done = script(
        f"""
        import pathlib
        import attnbench
        rows = attnbench.read_results({str(reference)!r})
        figures = attnbench.plot(rows, figures=["scaling", "tradeoff"], title="mine")
        assert list(figures) == ["scaling", "tradeoff"]
        assert figures["scaling"].get_axes()
        assert figures._repr_html_().count("<img") == 2
        before = sorted(pathlib.Path().iterdir())
        attnbench.plot({str(reference)!r}, figures=["scaling"])
        assert sorted(pathlib.Path().iterdir()) == before
        attnbench.plot({str(reference)!r}, figures=["scaling"], save="drawn", formats=["svg"])
        assert [file.name for file in sorted(pathlib.Path("drawn").iterdir())] == ["scaling.svg", "scaling.txt"]
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("call", ["compare('own', 'softmax', lengths=16)", "run('small.yaml')"])
@pytest.mark.usefixtures("forks")
def test_a_variant_of_this_session_is_refused_before_anything_is_measured(call: str, folder: Path) -> None:
    (folder / "small.yaml").write_text(SUITE.replace("linear", "own"), encoding="utf-8")
    done = script(f"{OWN}\nimport attnbench\nattnbench.{call}", folder)
    assert "variant 'own' exists in this session only" in done.stderr
    assert "pass plugins=['FILE.py']" in done.stderr
    assert not (folder / "results").exists()


@pytest.mark.parametrize("name", [name for name in shipped_suites() if name != "peers"])  # which needs a plug-in
def test_every_shipped_suite_has_only_variants_that_python_may_run(name: str) -> None:
    check_importable(cell.variant for cell in expand(attnbench.load_suite(name)))


@pytest.mark.parametrize(
    "before",
    [
        "import attnbench.harness.compare.compare",
        pytest.param("attnbench.compare", marks=pytest.mark.slow),
        pytest.param("from attnbench import api", marks=pytest.mark.slow),
    ],
)
def test_run_is_a_function_whatever_was_imported_before(before: str) -> None:
    done = in_bare_process(
        f"""
        import inspect
        import attnbench
        {before}
        assert callable(attnbench.run)
        assert "select" in inspect.signature(attnbench.run).parameters
        import attnbench.harness.plan as plan
        assert plan.make_plan
        """,
        strict=True,
    )
    assert done.returncode == 0, done.stderr


def test_everything_public_is_there_and_has_a_docstring() -> None:
    assert all((getattr(attnbench, name).__doc__ or "").strip() for name in attnbench.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attnbench.nothing  # noqa: B018  # asking is the test


def test_what_is_built_shows_its_options_and_can_be_copied() -> None:
    built = attnbench.build("performer:kernel=relu", attnbench.Shape(seq_len=8, heads=1, head_dim=4), features=3)
    for module in (built, copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert repr(module).startswith("Performer(")
        assert "features=3, gamma=1.0, kernel=relu" in repr(module)
    assert repr(attnbench.build("softmax", attnbench.Shape(seq_len=8))) == "Softmax()"
