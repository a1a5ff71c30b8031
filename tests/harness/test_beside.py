"""Two environments that take turns: in ``compare``, where each has a process, and in ``run --beside``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import attnbench
from attnbench.answers.gate.decide import GateQuestion, decide
from attnbench.answers.gate.decision_table import to_text
from attnbench.cli.app import main
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import Exit, UsageError
from attnbench.harness import runner
from attnbench.harness.compare import compare
from attnbench.harness.compare.compare import Contest
from attnbench.harness.compare.length import lead, measure_length
from attnbench.harness.outside import interpreter
from attnbench.harness.outside.interpreter import NEEDED, Interpreter
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker, WorkerFailed
from attnbench.harness.outside.visit import HoldSetting, Verdict
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute_beside, more_rounds
from attnbench.harness.wire import protocol
from attnbench.harness.wire.protocol import TakeTurns
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.measurements import load
from attnbench.results.record import HELD
from attnbench.suite.cell import Cell
from tests.instant import Instant, timed

SHORT = TimingRules(min_time=0.003, max_time=0.3, min_samples=3, max_samples=6, warmup_time=0.003)
ROOT = Path(attnbench.__file__).parents[1]
MODULES = {"pyyaml": "yaml", "pillow": "PIL"}
OWN, LENT = (Interpreter(sys.executable, name, own=own) for name, own in (("own", True), ("lent", False)))


def cell(variant: str = "softmax") -> Cell:
    return Cell("s", "w", Spec(variant), Shape(heads=1, seq_len=8, head_dim=4), measure=("time",))


# The interpreter


def fake(tmp_path: Path, prints: str) -> Path:
    """A virtual environment whose Python prints this, whatever it is asked."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nprintf '%s' '{prints}'\n")
    python.chmod(0o755)
    return python.parents[1]


@pytest.mark.parametrize(
    ("prints", "message"),
    [
        ("Segmentation fault", r"it does not run as Python \(Segmentation fault\); name another environment$"),
        ("", r"it does not run as Python \(exit status 0\); name another environment$"),
        ('{"python": [3, 9]}', "Python 3.9 is too old, measuring needs 3.11; name another environment$"),
        ('{"python": [3, 12], "has": ["numpy"]}', "install it: .*bin/python -m pip install torch pydantic "),
    ],
)
def test_an_environment_that_cannot_measure_is_one_line_with_the_remedy(
    tmp_path: Path, prints: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        Interpreter.of(str(fake(tmp_path, prints)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "no-such-folder", "."])
def test_a_place_without_python_is_named(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^{re.escape(text or '@')}: no Python there; name the folder"):
        Interpreter.of(text)


def test_a_path_of_this_folder_is_not_looked_for_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has = json.dumps({"python": [3, 12], "has": [*NEEDED]})
    here, elsewhere = (fake(tmp_path / name, has) / "bin" for name in ("here", "elsewhere"))
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", str(elsewhere))
    assert Interpreter.of("./python").path == str(here / "python")
    assert Interpreter.of("python").path == str(elsewhere / "python")


def test_an_environment_is_a_folder_or_its_python_and_a_link_stays_one(tmp_path: Path) -> None:
    has = json.dumps({"python": [3, 12], "has": [*NEEDED, "attnbench"]})
    folder = fake(tmp_path, has)
    (tmp_path / "link").symlink_to(folder / "bin/python")
    for text in (folder, folder / "bin/python", tmp_path / "link"):
        found = Interpreter.of(str(text))
        assert (found.name, found.own) == (str(text), True)
        assert Path(found.path).parent == (tmp_path if text.name == "link" else folder / "bin")


def test_all_that_the_measuring_process_imports_is_asked_for() -> None:
    names = re.findall(r'^    "([\w-]+)>=', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    others = [MODULES.get(name, name) for name in names[: names.index("pillow") + 1] if name not in NEEDED]
    assert {"scipy", "yaml", "pandas"} <= set(others)
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({others}))\n"  # so that nobody can import them
        "from attnbench.harness.inside import worker; worker._import()\n"
        "from attnbench.laws import gating_laws; gating_laws()\n"
        "import attnbench.harness.wire.protocol, attnbench.harness.inside.pairs, attnbench.harness.outside.visit"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
    assert Interpreter.of(sys.executable).path == str(Path(sys.executable).absolute())


def test_lent_code_brings_nothing_else_of_this_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(interpreter, "WORKER", "x")
    command = LENT.command()
    assert command[1:3] == ["-E", "-P"]
    assert Path(command[-1]).name == "__init__.py"


def test_the_digest_of_the_messages_changes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = protocol.digest()
    assert before == protocol.digest()
    monkeypatch.setattr(protocol, "METHOD_VERSION", -1)
    assert protocol.digest() != before


@pytest.mark.parametrize("understood", [True, False])
def test_an_attnbench_that_speaks_another_language_is_replaced_by_this_one(
    monkeypatch: pytest.MonkeyPatch, understood: bool
) -> None:
    of_its_own = {"attnbench": "7", "protocol": protocol.digest() if understood else "another"}
    told: list[dict[str, Any]] = [of_its_own, {"failed": "lent"}]
    worker = Worker(Settings(), OWN)
    monkeypatch.setattr(worker, "begin", lambda: None)
    monkeypatch.setattr(worker, "_exchange", lambda *_: told.pop(0))
    if understood:
        assert worker.start()["attnbench"] == "7"
    else:
        with pytest.raises(WorkerFailed, match="of own did not start: lent"):
            worker.start()
    assert worker.python == replace(OWN, own=understood)


# Turns


def test_two_processes_take_turns_of_which_one_runs_lent_code() -> None:
    settings = Settings(rates=False)
    with Worker(settings) as here, Worker(settings, LENT) as there:
        assert there.start()["environment"] == here.start()["environment"]
        assert there.start()["attnbench"] == f"{here.start()['attnbench']} (lent)"
        rules = replace(SHORT, min_samples=4, max_time=3.0)  # a busy machine too has time for as many
        found = measure_length([here, there], [cell()] * 2, rules, timeout=60.0, known={})
    assert [record.status for record in found.records.values()] == [Status.OK] * 2
    assert [(sorted(one), len(one[0]) == len(one[1]) >= 4) for one in found.times] == [([0, 1], True)]


class Side:
    """Stands for a process; its samples take ``seconds``, and it ends when it is asked for the last one."""

    served, compiled, traces, stops = 1, 0.0, "", 0
    log: ClassVar[list[str]] = []

    def __init__(self, name: str, seconds: float, samples: float = 1e9) -> None:
        self.name, self.seconds, self.samples = name, seconds, samples

    def seconds_used(self) -> float:
        return 0.0

    def stop(self) -> None:
        self.served, self.stops = 0, self.stops + 1

    def garbage(self) -> CellFailed:
        self.stop()
        return CellFailed(Status.CRASH, "garbage")

    def ask(self, message: dict[str, Any], timeout: float, further: bool = False) -> dict[str, Any]:
        assert timeout > 0
        assert further == ("do" not in message)
        if message.get("do", "").endswith("VisitCell"):
            return timed(Cell.from_json(message["cell"]), 0, [self.seconds])
        if message.get("do", "").endswith("TakeTurns") and not message["led"]:
            return self.answer([[self.seconds]] * 3)
        if "do" in message:
            return {"ready": len(message["cells"])}
        if "take" in message:
            Side.log.append(self.name)
            self.samples -= 1
            if self.samples < 0:
                self.stop()
                raise CellFailed(Status.CRASH, "was killed by SIGSEGV")
            return {"seconds": self.seconds, "calls": 1}
        return self.answer(message["blocks"])

    def answer(self, blocks: list[list[float]]) -> dict[str, Any]:
        told = {"disturbed": 0, "taken": 3, "stopped": 0, "others": None}
        return {"ran": list(range(len(blocks[0]))), "blocks": blocks, "left_out": [], **told}


@pytest.fixture(autouse=True)
def _nothing_logged() -> None:
    Side.log.clear()


class Started(Side):
    """A side of a comparison; that of another environment takes a tenth longer."""

    def __init__(self, settings: Settings, python: Interpreter | None) -> None:
        super().__init__(str(python), 1.1 if python else 1.0)
        machine = {"torch": "2.9" if python else "2.13", "python": "3.12"}
        of_all = {"float32_products": "oneDNN", "window_products": "default", "process": "tuned"}
        self.settings = settings
        self.state = {"environment": machine, "attnbench": "7", "noise_floor": 0.0, "process_notes": [], **of_all}

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> dict[str, Any]:
        assert self.name == "@lent" or self.settings.products == ("oneDNN", "default")
        return self.state


def test_each_side_of_a_comparison_says_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "Worker", Started)
    contest = Contest([cell()] * 2, [8], Settings(), SHORT, unchecked=True, pythons=[LENT, None])
    found = contest.answer()
    (row,) = found.rows["softmax@lent", "softmax"]
    assert row.verdict == "slower" or row.busy
    flat = found.to_rows()[0]
    assert [flat[f"a_{name}"] for name in ("torch", "python", "attnbench")] == ["2.9", "3.12", "7"]
    assert (flat["a"], flat["b"], flat["b_torch"]) == ("softmax@lent", "softmax", "2.13")
    assert (row.a.record.label, row.b.record.label) == ("softmax@lent", "softmax")


def test_sides_take_turns_sample_by_sample_in_both_orders() -> None:
    a, b = Side("a", 1.0), Side("b", 3.0)
    request = TakeTurns([cell("softmax"), cell("linear"), cell("sdpa")], replace(SHORT, max_samples=2), 2)
    found = lead([a, b, a], request, 60.0)  # type: ignore[list-item]  # all of a worker that is used
    assert sorted(found.ran) == [0, 1, 2]
    by_cell = [[row[found.ran.index(i)] for row in found.blocks] for i in range(3)]
    assert by_cell == [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0]]
    assert Side.log[:3] == Side.log[5:2:-1]


def test_the_share_of_a_prompt_is_that_of_each_side() -> None:
    class Generating(Side):
        def answer(self, blocks: list[list[float]]) -> dict[str, Any]:
            return {**super().answer(blocks), "prompts": [[0, self.seconds / 10]]}

    sides = [Generating("a", 1.0), Generating("b", 3.0)]
    found = lead(sides, TakeTurns([cell(), cell("linear")], SHORT, 2), 60.0)  # type: ignore[arg-type]  # as above
    assert sorted(found.prompts) == [(0, 0.1), (1, 0.3)]


@pytest.mark.parametrize("answer", [{}, {"seconds": "1", "calls": 1}, {"seconds": 0.0, "calls": 1}])
def test_a_senseless_sample_ends_its_process(answer: dict[str, Any]) -> None:
    class Garbled(Side):
        def ask(self, message: dict[str, Any], timeout: float, further: bool = False) -> dict[str, Any]:
            return answer if "take" in message else super().ask(message, timeout, further)

    sides = [Garbled("a", 1.0), Side("b", 1.0)]
    with pytest.raises(CellFailed, match="garbage"):
        lead(sides, TakeTurns([cell(), cell()], SHORT, 2), 60.0)  # type: ignore[arg-type]  # as above
    assert [side.served for side in sides] == [0, 1]


def test_a_side_that_dies_in_turn_is_a_row_and_the_other_goes_on() -> None:
    sides = [Side("a", 0.001), Side("b", 0.001, samples=2)]
    found = measure_length(sides, [cell()] * 2, SHORT, timeout=60.0, known={})  # type: ignore[arg-type]  # as above
    assert found.records[0].status is Status.OK
    assert (found.records[1].status, found.records[1].reason) == (Status.CRASH, "was killed by SIGSEGV")
    assert [sorted(one) for one in found.times] == [[0]]
    assert sides[0].stops  # it waited for its turn in vain


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (["softmax@", "softmax"], "@: no Python there"),
        (["softmax@no-such-folder", "softmax"], "no-such-folder: no Python there"),
        (["softmax", f"softmax@{sys.executable}", "softmax"], "softmax and softmax are the same variant"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    variants: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *variants]) == Exit.USAGE
    said = capsys.readouterr().err
    assert message in " ".join(said.split())


# Runs


class Turning(Instant):
    """A process on a machine that becomes slower by a tenth from visit to visit; the new environment takes a fifth
    longer."""

    log: ClassVar[list[tuple[str, str, int]]] = []
    failing: ClassVar[set[tuple[str, str]]] = set()
    pressed = 0
    """The visit at which Ctrl-C is pressed."""

    def start(self) -> dict[str, Any]:
        products = {"float32_products": "default", "window_products": "default"}
        machine = {"torch": "2.9" if self.python else "2.13", "python": "3.11.7", "device": "cpu"}
        return {**super().start(), **products, "environment": machine, "attnbench": "7"}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        of, round_ = Cell.from_json(request["cell"]), request["round"]
        side = "there" if self.python else "here"
        if len(Turning.log) + 1 == Turning.pressed:
            raise KeyboardInterrupt
        Turning.log.append((side, f"{of.label} {of.shape.N}", round_))
        if (side, of.label) in Turning.failing:
            raise CellFailed(Status.CRASH, "was killed by SIGSEGV")
        drift = 1.1 ** ((len(Turning.log) - 1) // 2) * (1 + 0.001 * (len(Turning.log) % 3))
        return timed(of, round_, [drift * (1.0 if self.python else 1.2)])


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    Turning.log.clear()
    monkeypatch.setattr(Turning, "failing", set())
    monkeypatch.setattr(runner, "Worker", Turning)
    monkeypatch.setattr(runner, "load_warning", lambda: None)
    monkeypatch.setattr(HoldSetting, "ask", lambda *_, **__: Verdict(HELD))
    return Options("cpu", threads=1, rounds=6, out=tmp_path / "results", beside=LENT)


SUITE = "name: s\nsweeps: [{name: w, measure: [time], matrix: {variant: [softmax, linear], seq_len: [2, 4]}}]\n"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(SUITE)
    return path


def test_cells_alternate_between_the_environments_and_the_gate_decides_by_their_pairs(
    suite: Path, beside: Options
) -> None:
    (here, rows), (there, _) = execute_beside(make_plan(suite, beside))
    visits = list(zip(Turning.log[::2], Turning.log[1::2], strict=True))
    assert len(visits) == 4 * 6
    assert all(a[0] != b[0] and a[1:] == b[1:] for a, b in visits)
    assert {a[0] for a, _ in visits} == {"here", "there"}
    assert {row.torch_version for row in rows} == {"2.13"}
    new, old = load(here.path), load(there.path)
    assert here.path.name > there.path.name  # the newest run is that of here
    found = decide(new, [old], GateQuestion(("time",)))
    assert dict(found.counts()) == {"slower": 4}  # though the machine became 80 times as slow meanwhile
    assert all(one.ratio == pytest.approx(1.2, rel=0.01) for one in found.findings)
    said = to_text(found)
    assert "other versions now and before: torch: 2.13 and 2.9\n" in said
    assert "each round is one ratio, since the two runs took turns" in said
    with pytest.raises(UsageError, match="measure both again with more --rounds"):
        more_rounds(here.path, [rows[0].cell_id], 2)


def test_a_side_that_fails_is_a_row_and_the_same_command_resumes_both(suite: Path, beside: Options) -> None:
    Turning.failing.add(("there", "linear"))
    before = execute_beside(make_plan(suite, beside))
    assert [row.status for row in before[0][1]] == [Status.OK] * 4
    assert [row.status for row in before[1][1]] == [Status.OK, Status.CRASH] * 2 or len(before[1][1]) == 4
    Turning.log.clear()
    after = execute_beside(make_plan(suite, beside))
    assert [folder.path for folder, _ in after] == [folder.path for folder, _ in before]
    assert Turning.log == []


@pytest.mark.parametrize("pressed", [1, 2, 9, 20])
def test_after_ctrl_c_the_same_command_goes_on_in_turn(
    suite: Path, beside: Options, pressed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turning, "pressed", pressed)
    with pytest.raises(KeyboardInterrupt):
        execute_beside(make_plan(suite, beside))
    monkeypatch.setattr(Turning, "pressed", 0)
    runs = execute_beside(make_plan(suite, beside))
    assert len(list(runs[0][0].path.parent.iterdir())) == 2
    assert len(Turning.log) == len(set(Turning.log)) == 48
    here, there = (load(folder.path) for folder, _ in runs)
    assert dict(decide(here, [there], GateQuestion(("time",))).counts()) == {"slower": 4}


def test_a_run_whose_partner_is_gone_is_not_continued_alone(suite: Path, beside: Options) -> None:
    (here, _), (there, _) = execute_beside(make_plan(suite, beside))
    there.path.rename(there.path.parents[2] / "elsewhere")
    with pytest.raises(UsageError, match="the run beside it is gone, or of another environment; add --fresh"):
        execute_beside(make_plan(suite, beside))
    (new, _), (other, _) = execute_beside(make_plan(suite, replace(beside, fresh=True)))
    assert new.path != here.path
    assert decide(load(new.path), [load(other.path)], GateQuestion(("time",))).known == 4
    with pytest.raises(UsageError, match="differ in torch"):
        decide(load(here.path), [load(other.path)], GateQuestion(("time",)))


def test_trainings_and_other_machines_do_not_take_turns(
    beside: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="leave trainings out with -k"):
        make_plan("headline", beside)
    for there in (str(tmp_path), ""):
        assert main(["run", "quick", "--beside", there, "--out", str(tmp_path)]) == Exit.USAGE
        assert "no Python there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
