"""How long the tool itself takes, beside what it is about, on a machine with nothing else to do. See `make selfcheck`.

Each figure is the least of several, taken in turn with what it is compared with. SELFCHECK_TURNS=2 is a quick look.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.run_identity import identity, run_key
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.results.table import csv_text
from attnbench.suite.cell import Cell
from attnbench.suite.expand import MAX_CELLS
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

TURNS = int(os.environ.get("SELFCHECK_TURNS", "10"))
ACCOUNTING = str(Path(__file__).with_name("accounting.py"))
TOOL = (sys.executable, "-m", "attnbench")
COMPLETION = {"_ATTNBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "attnbench compare perf", "COMP_CWORD": "2"}


def seconds(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    # With compiled modules on the disk, as users have them.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**own, **(environment or {})})
    return time.perf_counter() - start


def accounts(out: Path, *arguments: str) -> tuple[float, float, list[list[float]]]:
    """A run of quick: when it began, how long it took, and the lines of accounting.py."""
    file = out / "accounts.jsonl"
    out.mkdir()
    start = time.time()
    command = [*TOOL, "run", "quick", "--device", "cpu", "--out", str(out / "results"), "--plugin", ACCOUNTING]
    took = seconds([*command, *arguments], {"ACCOUNTING": str(file)})
    return start, took, [json.loads(line) for line in file.read_text().splitlines()]


def test_help_and_completion_take_at_most_120_milliseconds() -> None:
    commands = {
        "bare python": [sys.executable, "-c", "pass"],
        "import typer": [sys.executable, "-c", "import typer"],
        "--help": [*TOOL, "--help"],
        "plot --help": [*TOOL, "plot", "--help"],
        "completion": list(TOOL),
    }
    least = dict.fromkeys(commands, float("inf"))
    for _ in range(2 * TURNS):
        for name, command in commands.items():
            least[name] = min(least[name], seconds(command, COMPLETION if name == "completion" else None))
    python, typer, *ours = least.values()
    for name, took in least.items():
        print(
            f"\n{name}: {took * 1e3:.0f} ms, {took / python:.1f} × bare python, {took / typer:.1f} × import typer",
            end="",
        )
    assert max(ours) <= 0.12


def test_a_run_measures_within_a_fifth_of_a_second_of_importing_torch(tmp_path: Path) -> None:
    torch, measuring, cell = [], [], []
    for turn in range(max(2, TURNS // 2)):
        torch.append(seconds([sys.executable, "-c", "import torch"]))
        start, _, lines = accounts(tmp_path / str(turn), "-k", "operators/identity", "--quick")
        measuring.append(lines[0][0] - start)
        begun = [at for at, _, machine, *_ in lines if machine == lines[-1][2]]  # after the machine
        cell.append(begun[1] - start)
    print(
        f"\nimport torch {min(torch):.2f} s; the first measurement of the machine after {min(measuring):.2f} s, "
        f"of a cell after {min(cell):.2f} s"
    )
    assert min(measuring) <= min(torch) + 0.2


def test_a_quick_run_takes_half_a_minute_and_three_quarters_of_it_are_work_or_imports_of_torch(tmp_path: Path) -> None:
    """Each round needs a process of its own, and each process torch."""
    plain = seconds([*TOOL, "run", "quick", "--device", "cpu", "--out", str(tmp_path / "plain")])
    torch = min(seconds([sys.executable, "-c", "import torch"]) for _ in range(3))
    _, took, lines = accounts(tmp_path / "run")
    last = {process: work for _, *work, process in lines}
    cells, machine, laws = map(sum, zip(*last.values(), strict=True))
    print(
        f"\nquick: {plain:.1f} s; {took:.1f} s with an account, {cells / took:.0%} in calls of cells, "
        f"{machine / took:.0%} in measuring the machine, {laws / took:.0%} in laws, "
        f"{len(last) * torch / took:.0%} in {len(last)} imports of torch"
    )
    assert plain <= 30
    assert cells + machine + laws + len(last) * torch >= 0.75 * took


def planned(heads: int) -> tuple[int, float]:
    """Cells of a suite with a thousand lengths and so many numbers of heads, and the seconds until it has a plan."""
    matrix = {"variant": ["softmax", "sdpa"], "seq_len": "1..1000+1", "heads": f"1..{heads}+1"}
    suite = Suite.of({"name": "many", "sweeps": [{"name": "all", "matrix": matrix}]}, Origin())
    start = time.perf_counter()
    plan = make_plan(suite, Options(device="cpu"))
    run_key(identity(plan, "machine"))
    took = time.perf_counter() - start
    print(f"\n{len(plan.cells)} cells: {took:.2f} s")
    return len(plan.cells), took


def test_the_largest_suite_is_expanded_and_planned_in_two_seconds() -> None:
    cells, took = planned(10)
    assert cells == MAX_CELLS
    assert took < 2


def drawn(folder: Path, settings: int) -> float:
    """Seconds in which the figures of so many settings, squared, of 400 rows each are drawn."""
    folder.mkdir(exist_ok=True)
    many(folder / "results.csv", settings)
    took = seconds([*TOOL, "plot", str(folder)])
    figures = sorted(path.name for path in (folder / "plots").iterdir())
    print(f"\n{400 * settings**2} rows: {took:.2f} s for {', '.join(figures)}")
    assert "tradeoff.svg" in figures
    return took


def test_ten_thousand_rows_are_drawn_in_ten_times_the_time_of_four_hundred(tmp_path: Path) -> None:
    """Both on this machine, in turn: seconds alone would tell its speed. There are 25 times as many rows."""
    pairs = [(drawn(tmp_path / "few", 1), drawn(tmp_path / "many", 5)) for _ in range(max(2, TURNS // 2))]
    few, most = (min(side) for side in zip(*pairs, strict=True))
    print(f"\n10000 rows: {most / few:.1f} times as long as 400")
    assert most < 10 * few


def many(path: Path, settings: int) -> None:
    """A table of twenty variants at twenty lengths, with so many numbers of heads and as many seeds."""
    names = ("softmax", "chunked", "sdpa", "identity", "mean-value", "local", "sparse", "longformer", "etc", "bigbird")
    names += (
        "reformer",
        "routing",
        "sinkhorn",
        "topk",
        "linformer",
        "nystrom",
        "linear",
        "efficient",
        "performer",
        "rfa",
    )
    records = []
    for heads, seed in ((heads, seed) for heads in range(4, 4 + settings) for seed in range(settings)):
        for at, name in enumerate(names):
            for n in range(256, 256 * 21, 256):
                cell = Cell("many", "all", Spec(name), Shape(heads=heads, seq_len=n), seed=seed)
                second = n * (1 + at) * 1e-6
                record = Record.of(
                    cell,
                    Status.OK,
                    time_median_s=second,
                    time_ci_low_s=0.98 * second,
                    time_ci_high_s=1.02 * second,
                    examples_per_s=1 / second,
                    tokens_per_s=n / second,
                    peak_bytes=1000 * n,
                    matmul_flops=1000 * n,
                    error_kind="approximation",
                    rel_error=0.01 * (1 + at),
                    trivial_error=0.8,
                    process="tuned",
                    threads=1,
                )
                records.append(record)
    path.write_text(csv_text(records), encoding="utf-8")
