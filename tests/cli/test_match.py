"""``attnbench match`` as a user meets it, in a process of its own."""

from __future__ import annotations

import csv
import inspect
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from attnbench.answers.match.budget import MeasuredSetting
from attnbench.answers.match.match import ReadyMatch
from attnbench.cli.app import main
from attnbench.cli.match import match as match_command
from attnbench.cli.score import score
from attnbench.cli.screen.console import in_parts
from attnbench.errors import Exit, UsageError
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.score.score_question import ScoreQuestion
from tests.typed import attnbench

ROOT = Path(__file__).parents[2]
SMALL = ["--n", "64", "--heads", "2", "--head-dim", "8", "--min-time", "0.01", "--device", "cpu", "--threads", "1"]
QUICK = [*SMALL, "--unchecked"]


match = partial(attnbench, "match")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Three variants at one error: two that reach it and one that takes part as it stands."""
    folder = tmp_path_factory.mktemp("match")
    files = ["--csv", str(folder / "match.csv"), "--plot", str(folder / "frontier.svg")]
    return match("topk", "local:dilation=1", "softmax", "--error", "0.3", *QUICK, *files), folder


def test_settings_at_one_error_are_found_and_timed_in_turns(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = measured
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "n = 64, operator forward, B=1 H=2 D=8, float32, gaussian, on cpu"
    said = " ".join(done.stdout.split())
    assert "reaches error 0.3:" in said
    assert "softmax takes part as it stands (it has no knob):" in said
    assert said.count("of the time of") + said.count(": no verdict on times: ") == 3
    assert "least memory within error 0.3:" in said
    assert "fastest within error 0.3:" in said


def test_every_try_is_in_the_file_and_says_what_was_measured(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, folder = measured
    with (folder / "match.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    topk = [row for row in rows if row["variant"] == "topk"]
    assert len(topk) == int(topk[0]["tries"]) <= 6
    assert [row["label"] for row in topk] == [f"topk:keys={row['value']}" for row in topk]
    assert sum(row["chosen"] == "True" for row in rows) == 3
    for row in topk:
        assert row["reached"] == str(float(row["error_high"]) <= 0.3)
        assert float(row["time_median_s"]) > 0
        assert int(row["peak_bytes"]) > 0
        assert (row["seq_len"], row["heads"], row["inputs"]) == ("64", "2", "gaussian:logit_std=1.0")
    assert (folder / "frontier.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_smallest_larger_setting_did_not_reach_it(measured: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = measured
    with (folder / "match.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == "topk"]
    (chosen,) = [int(row["value"]) for row in rows if row["chosen"] == "True"]
    assert chosen == 8 or any(int(row["value"]) == chosen - 8 and row["reached"] == "False" for row in rows)


def test_one_variant_alone_answers_how_large_its_knob_must_be() -> None:
    done = match("topk", "--memory", "1MiB", "--json", *QUICK, "--inputs", "gaussian:logit_std=2")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["budget"] == {"target": "memory", "limit": 2**20}
    assert data["comparison"] == []
    assert len(data["answers"]) == 1
    assert data["answers"][0].startswith("topk:keys=64 fits into memory 1.00 MiB: ")
    assert data["answers"][0].endswith("no more expensive keys is tried")
    assert {row["inputs"] for row in data["rows"]} == {"gaussian:logit_std=2.0"}


def test_what_is_not_reached_is_an_answer_and_the_code_is_0() -> None:
    done = match("performer", "--error", "1e-9", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "performer does not reach error 1e-09: best" in " ".join(done.stdout.split())
    assert "not met" in done.stdout


def test_where_nothing_can_be_measured_the_code_is_1() -> None:
    done = match("nystrom", "--memory", "1MiB", "--causal", *QUICK)
    assert done.returncode == Exit.FAILED
    assert "sees the future" in " ".join(done.stdout.split())
    assert done.stderr.splitlines()[-1] == "error: nothing could be measured; the reasons stand above"


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(
        self: ReadyMatch, on_search: Callable[[str], None], on_try: Callable[[str, MeasuredSetting], None]
    ) -> None:
        on_search("topk")
        on_try("topk", MeasuredSetting("topk:keys=8", 8, error=0.5, error_low=0.4, error_high=0.6))
        raise KeyboardInterrupt

    monkeypatch.setattr(ReadyMatch, "answer", answer)
    file = tmp_path / "match.csv"
    assert main(["match", "topk", "--error", "0.1", "--csv", str(file), "--device", "cpu"]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == f"stopped; {file} has what was measured\n"
    (row,) = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    assert (row["label"], row["knob"], row["error"], row["chosen"]) == ("topk:keys=8", "keys", "0.5", "False")
    assert main(["match", "topk", "--error", "0.1", "--device", "cpu"]) == Exit.INTERRUPTED
    title, head, line = capsys.readouterr().out.splitlines()
    assert (title, head.split(), line.split()) == (
        "measured before the stop",
        ["setting", "error"],
        ["topk:keys=8", "ok", "0.5"],
    )


def test_a_finished_run_is_read_and_nothing_is_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ROOT / "results/reference/lra-cpu", run)
    done = match("--from", str(run), "--error", "0.9", "--csv", str(tmp_path / "match.csv"))
    assert done.returncode == 0, done.stderr
    assert f"from {run}; nothing was measured anew" in done.stdout
    assert "warning: no times of operator forward at n = 2000; it has --level model --pass training" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80 + len(str(run))
    assert "not timed in turns" in done.stdout or "of the time of" not in done.stdout
    assert len((tmp_path / "match.csv").read_text(encoding="utf-8").splitlines()) > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("performer", "match needs a budget; give --error 0.1, --memory 64MiB, --time 10ms or --score 0.9"),
        ("performer --error 0.1 --time 1ms", "match takes one budget, not error and time; give --error 0.1,"),
        ("--error 0.1", "match needs a variant; for example: attnbench match performer local --error 0.1"),
        ("performer --error 0", "--error: 0.0 is not a relative error above 0 such as 0.1"),
        ("performer --error x", "--error must be a number; attnbench match --help lists the options"),
        ("performer --memory 64parsec", "--memory: '64parsec' is not a size such as 8GiB or 500MiB"),
        ("performer --time 10", "--time: '10' is not a time such as 10ms, 250us or 1.5s"),
        ("softmax --error 0.1", "there is no knob to turn (softmax: it has no knob); name a variant that has one:"),
        ("linformer --error 0.1", "linformer: its error means nothing before it is fitted; give --memory or --time"),
        ("performer performer --error 0.1", "performer is given twice; name each variant once"),
        ("perfrmer --error 0.1", "unknown variant 'perfrmer'; did you mean 'performer'?"),
        ("performer --error 0.1 --n 1k..4k", "--n 1k..4k: match takes one length; write --n 1024"),
        ("performer --error 0.1 --n 0", "--n 0: a length is at least 1; write --n 1024"),
        ("performer --error 0.1 --level layer", "errors are measured for attention alone; leave --level layer out"),
        ("performer --error 0.1 --n 1M", "'1M' is not a number"),
        ("performer --error 0.1 --n 512k", "--n 524288: exact attention in float64 takes too long;"),
        ("performer --error 0.1 --inputs gausian", "unknown input 'gausian'; did you mean 'gaussian'?"),
        ("performer --error 0.1 --plot x.gif", "--plot x.gif: the name must end in .svg, .png or .pdf"),
        ("performer --error 0.1 --from nowhere", "nowhere: no such file or folder;"),
        ("--error 0.1 --from nowhere --heads 4", "--heads says how to measure, and --from measures nothing;"),
        ("gmlp --memory 1MiB --most 1", "gmlp: ffn must be at least 2, and at most 1 is tried; raise --most"),
        ("performer --score 1", "--score: 1.0 is not a score between 0 and 1 such as 0.9"),
        ("performer --score 0.9 --error 0.1", "match takes one budget, not error and score; give --error 0.1,"),
        ("performer --error 0.1 --steps 4", "--steps says how models are trained; give --score as well, or leave it"),
        ("performer --score 0.9 --inputs gaussian", "--inputs says nothing of models that are trained; leave it out"),
        ("performer --score 0.9 --seed 1", "--seed says nothing of models that are trained; leave it out"),
        ("performer --score 0.9 --task recal", "--task: unknown task 'recal'; did you mean 'recall'?"),
        ("performer --score 0.9 --rates fast", "--rates must be above 0 and at most 1, got 'fast'; write 0.002, say"),
        ("performer --score 0.9 --n 64..128", "--n 64..128: match takes one length; write --n 64"),
        ("performer --score 0.9 --n 128k", "98304 trainings are within reach, at most 20000; give a smaller --most"),
        ("performer --score 0.9 --pass decode", "--pass decode: the encoder that is trained reads whole sequences;"),
        ("softmax --score 0.9", "there is no knob to turn (softmax: it has no knob); name a variant that has one:"),
        ("--score 0.9 --from nowhere --steps 4", "--steps says how to measure, and --from measures nothing;"),
    ],
)
def test_a_question_that_makes_no_sense_is_one_line_with_a_remedy(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["match", *arguments.split()]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1


def test_for_a_score_sizes_are_those_of_the_command_score_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[ReadyMatch] = []

    def answer(self: ReadyMatch, *_: object) -> None:
        asked.append(self)
        raise UsageError("enough")

    monkeypatch.setattr(ReadyMatch, "answer", answer)
    main(["match", "performer", "--score", "0.9", "--device", "cpu"])
    larger = ["--n", "128", "--heads", "4", "--task", "copy", "--pass", "forward"]
    main(["match", "performer", "--score", "0.9", "--device", "cpu", *larger])
    usual = ScoreQuestion()
    for one, wanted, pass_ in zip(
        asked, (usual, replace(usual, n=128, heads=4, task="copy")), ("training", "forward"), strict=True
    ):
        cell, trainings = one.cell, one.trainings
        assert trainings is not None
        plan = make_plan(wanted.suite("match", [cell.variant.label for cell in trainings.plan.cells]), Options("cpu"))
        assert (set(trainings.plan.cells), cell.pass_) == (set(plan.cells), pass_)


def test_score_and_match_have_the_same_defaults() -> None:
    defaults = asdict(ScoreQuestion())
    of_score = {name: one.default for name, one in inspect.signature(score).parameters.items()}
    of_match = {name: one.default for name, one in inspect.signature(match_command).parameters.items()}
    assert {name: of_score[name] for name in defaults} == defaults
    for name in ("steps", "seeds", "rates", "layers", "ffn", "causal", "pretrain", "out"):
        assert of_match[name] == of_score[name], name


def test_help_has_an_example_and_show_names_the_knob(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["match", "--help"]) == 0
    assert "Example: attnbench match topk --error 0.1" in " ".join(capsys.readouterr().out.split())
    assert main(["show", "performer"]) == 0
    assert "features: a larger value costs more, in steps of 8" in capsys.readouterr().out
    assert main(["show", "memory-compressed", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["knob"] == {"option": "compression", "step": 1, "falling": True}


def test_a_long_label_is_broken_between_its_options_and_never_within_a_word() -> None:
    label = "performer:kernel=trig,projection=iid"
    assert in_parts(label, 24).split("\n") == ["performer:kernel=trig,", "projection=iid"]
    assert in_parts("performer", 24) == "performer"


HALF = """
from torch import nn, softmax
from attnbench.contract.variant import Traits, register

@register("own-half", source="test", family="exact", cost="O(n²·d)", time_exponent=2.0, memory_exponent=2.0,
          formula="softmax(q k) v", traits=Traits())
class Half(nn.Module):
    def __init__(self, shape):
        super().__init__()

    def dense(self, q, k, v, *, key_mask=None):
        return softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

    def forward(self, q, k, v, *, key_mask=None):
        return 0.5 * v
"""


def test_what_breaks_a_law_takes_no_turn_and_the_answer_says_why_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(HALF)
    asked = ["own-half", "local", "--memory", "1GiB", "--draws", "1", "--plugin", str(tmp_path / "half.py"), *SMALL]
    refused, unchecked = (" ".join(match(*asked, *more).stdout.split()) for more in ([], ["--unchecked"]))
    assert "not timed in turns: own-half error: it breaks the law 'formula'" in refused
    assert "--unchecked measures it all the same" in refused
    assert "breaks the law" not in unchecked  # whether or not a busy machine can tell which one is faster
