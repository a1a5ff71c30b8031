"""A run measures only what keeps its laws, says so in its rows, and asks each setting once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.cli.screen.console import laws_note
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.harness.outside.isolation import CellFailed
from attnbench.harness.outside.visit import Gate, HoldSetting, Verdict
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute
from attnbench.laws import LAWS, check_variant, gating_laws
from attnbench.laws.influence import PADDED, PADDED_REMEDY
from attnbench.measure.status import Status
from attnbench.results.frame.words import where
from attnbench.results.read import read_results
from attnbench.results.record import HELD, NOT_TRIED, UNCHECKED, Record
from attnbench.suite.cell import Cell
from tests.harness.conftest import Told
from tests.instant import Instant

PLUGIN = """
import importlib.util, os, time
from dataclasses import replace

import torch

from attnbench import Traits, register
from attnbench.catalogue.attention.exact.softmax import Softmax
from attnbench.contract.variant import VARIANTS

traits = VARIANTS.get("softmax").traits
of_mine = lambda name: register(name, family="exact", source="-", formula="-", cost="-", traits=traits)


spec = importlib.util.spec_from_file_location("planted", WRONG_VARIANTS)
planted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted)
local = VARIANTS.get("local").traits
register("strided-local", family="fixed pattern", source="-", formula="-", cost="-", traits=local)(planted.StridedLocal)


@of_mine("true-softmax")
class TrueSoftmax(Softmax):
    pass


@of_mine("reads-the-future")
class ReadsTheFuture(Softmax):
    def __init__(self, shape):
        super().__init__(replace(shape, causal=False))


@of_mine("first-64")
class First64(Softmax):
    def forward(self, q, k, v, *, key_mask=None):
        if k.shape[-2] > 64:
            return super().forward(q, k[..., :64, :], v[..., :64, :])
        return super().forward(q, k, v, key_mask=key_mask)


@of_mine("waits")
class Waits(Softmax):
    def forward(self, q, k, v, *, key_mask=None):
        time.sleep(3600)


@of_mine("ends")
class Ends(Softmax):
    def forward(self, q, k, v, *, key_mask=None):
        os._exit(3)


@register("user-sdpa", family="exact", source="-", formula="-", cost="-", traits=Traits(exact=True, causal=False))
class UserSdpa(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        mask = None if key_mask is None else key_mask[:, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
"""


def suite(tmp_path: Path, variants: str, **axes: str) -> Path:
    more = "".join(f", {axis}: {value}" for axis, value in axes.items())
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: s\nsweeps:\n  - name: w\n    measure: [time]\n"
        f"    matrix: {{variant: [{variants}], seq_len: [32, 64], heads: 2, head_dim: 8{more}}}\n"
    )
    return path


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "mine.py"
    planted = Path(__file__).parents[1] / "laws" / "wrong_variants.py"
    path.write_text(PLUGIN.replace("WRONG_VARIANTS", repr(str(planted))))
    return str(path)


Measure = Callable[..., dict[tuple[str, int], Record]]


@pytest.fixture
def measure(tmp_path: Path, mine: str) -> Measure:
    def measured(variants: str, *, axes: dict[str, str] | None = None, **options: Any) -> dict[tuple[str, int], Record]:
        from attnbench.contract.plugins.discovery import load

        load(mine)
        base = {"device": "cpu", "out": tmp_path / "out", "threads": 1, "rounds": 1, "quick": True}
        plan = make_plan(suite(tmp_path, variants, **axes or {}), Options(**{**base, "plugins": (mine,), **options}))
        return {(one.label, one.seq_len): one for one in execute(plan)[1]}

    return measured


@pytest.mark.usefixtures("forks")
def test_what_breaks_a_law_has_a_row_that_names_it_and_no_time_and_what_keeps_them_is_held(measure: Measure) -> None:
    rows = measure("true-softmax, reads-the-future, softmax, 'strided-local:block=5'", axes={"causal": "true"})
    assert (rows["strided-local:block=5", 64].laws, rows["strided-local:block=5", 64].time_median_s) == (
        "formula",
        None,
    )
    for n in (32, 64):
        false = rows["reads-the-future", n]
        assert (false.status, false.laws, false.time_median_s) == (Status.ERROR, "formula", None)
        assert re.match(r"it breaks the law 'formula' \(\d[\d.e-]*, at most 1e-09\): output ", false.reason), (
            false.reason
        )
        assert false.reason.endswith("; --unchecked measures it all the same")
        for name in ("true-softmax", "softmax"):
            assert (rows[name, n].status, rows[name, n].laws) == (Status.OK, HELD), rows[name, n].reason


@pytest.mark.usefixtures("forks")
def test_what_lets_nan_in_padding_through_is_measured_and_a_note_says_so(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    row = measure("user-sdpa")["user-sdpa", 64]
    assert (row.status, row.laws) == (Status.OK, PADDED), row.reason
    assert row.time_median_s
    laws_note([row, replace(row, variant="sdpa", laws=HELD)])
    assert "user-sdpa would let NaN in padded tokens through" in capsys.readouterr().err
    gate = Gate(1.0)
    gate.learn([row, replace(row, status=Status.OOM, reason="no memory")])  # which says nothing of other cells
    assert gate.verdict(None, Cell("s", "w", parse_spec("user-sdpa"), Shape(seq_len=8))) == Verdict(PADDED)  # type: ignore[arg-type]
    faults = [one.fault for one in check_variant("user-sdpa", laws=[PADDED]).faults]
    assert any(one.endswith(PADDED_REMEDY) for one in faults), faults


@pytest.mark.usefixtures("forks")
def test_what_shows_only_beyond_a_block_is_found_at_the_longer_length(measure: Measure) -> None:
    row = measure("first-64")["first-64", 32]
    assert (row.status, row.laws) == (Status.ERROR, "formula"), row.reason
    assert "of 257 differs from the formula" in row.reason


@pytest.mark.usefixtures("forks")
def test_unchecked_times_it_all_the_same_and_rows_and_captions_say_so(measure: Measure, tmp_path: Path) -> None:
    rows = measure("reads-the-future, softmax", axes={"causal": "true"}, unchecked=True)
    assert {(one.status, one.laws) for one in rows.values()} == {(Status.OK, UNCHECKED)}
    table = read_results(tmp_path / "out")
    assert "not held to their laws: all" in where(table)[1]
    one = table.assign(laws=table["laws"].where(table["variant"] == "softmax", HELD))
    assert "not held to its laws: softmax" in where(one)[1]
    assert "laws" not in where(table.assign(laws=""))[1]


@pytest.mark.usefixtures("forks")
def test_a_law_that_hangs_or_ends_the_process_is_a_row_and_the_run_goes_on(measure: Measure) -> None:
    rows = measure("waits, ends, true-softmax", cell_timeout=2.0)
    hung, ended = rows["waits", 32], rows["ends", 32]
    assert (hung.status, hung.laws) == (Status.TIMEOUT, "formula")
    assert hung.reason.startswith("the law 'formula' could not be asked: no answer")
    assert (ended.status, ended.laws) == (Status.CRASH, "formula")
    assert "exited with code 3" in ended.reason
    assert rows["true-softmax", 64].laws == HELD


def test_each_setting_is_asked_once_in_a_run_and_not_again_when_it_is_resumed(
    tmp_path: Path, instant: type[Told]
) -> None:
    path = suite(tmp_path, "softmax, linear", causal="[false, true]")
    options = Options("cpu", out=tmp_path / "out", threads=1, rounds=1)
    stopped = instant(lambda cell, round_: _stop() if cell.shape.N == 64 else None)
    with pytest.raises(KeyboardInterrupt):
        execute(make_plan(path, options), worker=stopped)  # type: ignore[arg-type]
    resumed = instant()
    _, records = execute(make_plan(path, options), worker=resumed)  # type: ignore[arg-type]
    assert len(stopped.visits) + len(resumed.visits) == 8 + 1  # that which was stopped
    assert {one.laws for one in records} == {HELD}
    again = instant()
    execute(make_plan(path, replace(options, retry_failed=True)), worker=again)  # type: ignore[arg-type]
    assert again.held_to == []
    assert 4 <= len(stopped.held_to) + len(resumed.held_to) <= 5  # the one that was stopped may have no row yet


def _stop() -> None:
    raise KeyboardInterrupt


def test_a_run_learns_from_its_rows_what_was_broken() -> None:
    cell = Cell("s", "w", parse_spec("softmax"), Shape(seq_len=8))
    row = Record.of(cell, Status.ERROR, "it breaks the law 'formula'", laws="formula")
    gate = Gate(1.0)
    gate.learn([row, Record.of(replace(cell, shape=Shape(seq_len=8, causal=True)), Status.OK, laws=HELD)])
    assert gate.verdict(None, cell) == Verdict("formula", Status.ERROR, row.reason)  # type: ignore[arg-type]
    causal = replace(cell, shape=Shape(seq_len=4, causal=True))
    assert gate.verdict(None, causal) == Verdict(HELD)  # type: ignore[arg-type]
    assert Gate(1.0, unchecked=True).verdict(None, cell) == Verdict(UNCHECKED)  # type: ignore[arg-type]


def test_a_process_that_was_killed_from_outside_breaks_no_law_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(*_: object, **__: object) -> Verdict:
        asked.append(1)
        if len(asked) == 1:
            raise CellFailed(Status.CRASH, "killed by SIGKILL", killed=True)
        return Verdict(HELD)

    monkeypatch.setattr(HoldSetting, "ask", ask)
    cell = Cell("s", "w", parse_spec("softmax"), Shape(seq_len=8))
    assert Gate(1.0).verdict(Instant(), cell) == Verdict(HELD)  # type: ignore[arg-type]
    assert len(asked) == 2


def test_a_law_that_waited_for_a_core_until_its_limit_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    late = iter([CellFailed(Status.TIMEOUT, "no answer within 9 s", waited=0.5), None])

    def ask(*_: object, **__: object) -> Verdict:
        if failed := next(late):
            raise failed
        return Verdict(HELD)

    monkeypatch.setattr(HoldSetting, "ask", ask)
    gate, cell = Gate(1.0), Cell("s", "w", parse_spec("softmax"), Shape(seq_len=8))
    first = gate.verdict(Instant(), cell)  # type: ignore[arg-type]
    assert (first.status, first.laws) == (Status.DISTURBED, gating_laws()[0])
    assert gate.verdict(Instant(), cell) == Verdict(HELD)  # type: ignore[arg-type]


def test_what_compiles_itself_for_each_shape_is_not_tried() -> None:
    cell = Cell("s", "w", parse_spec("flex"), Shape(seq_len=128))
    assert HoldSetting(cell).found(lambda *_: None) == {"tried": 0, "fault": None}
    assert HoldSetting(cell).answered({"found": {"tried": 0, "fault": None}}) == Verdict(NOT_TRIED)


def test_what_computes_on_no_cpu_is_not_tried_for_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnbench.catalogue.attention.exact.softmax import Softmax

    def forward(*_: object, **__: object) -> None:
        raise RuntimeError("needs a GPU")

    monkeypatch.setattr(Softmax, "forward", forward)
    cell = Cell("s", "w", parse_spec("softmax"), Shape(seq_len=8))
    assert HoldSetting(replace(cell, device="cuda")).found(lambda *_: None) == {"tried": 0, "fault": None}
    assert HoldSetting(cell).found(lambda *_: None)["fault"]["law"] == "shape and type"  # the formula cannot be asked


def test_all_laws_are_tried_before_a_run_but_the_slow_ones_and_those_that_ask_for_many_tokens() -> None:
    assert set(LAWS) - set(gating_laws()) == {
        *("tracing", "memory", "time", "unbiased", "rate", "gradients reach", "cache", "both directions"),
        "documents",
    }
    assert {"formula", "causality", "decoding", "choice"} <= set(gating_laws())
    assert gating_laws()[-1] == PADDED, "nothing stays untried behind it"
