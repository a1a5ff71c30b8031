"""What many machines cost: a suite of 100 cells over three local nodes, of which two are killed, and the driver alone.

    python -m tests.benchmarks.ray_nodes [OUT]

prints the figures of docs/many-machines.md. It needs Ray and ten minutes of a machine with nothing else to do. All
nodes are processes of one machine, so the times of its rows mean nothing; what is counted is rows, and what the driver
adds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnbench.harness.many.driver import execute_on
from attnbench.harness.plan import Options, make_plan
from attnbench.results.audit import audit
from attnbench.results.store import RECORDS, SAMPLES, RunFolder
from tests.harness.many.fakes import Cluster, Host
from tests.harness.many.nodes import Nodes, nodes

VARIANTS = ["softmax", "linear", "local", "identity", "mean-value", "performer", "linformer", "nystrom", "cosformer"]
VARIANTS += ["efficient"]
LENGTHS = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
SUITE = f"""\
name: nodes
sweeps: [{{name: w, measure: time, matrix: {{variant: {json.dumps(VARIANTS)}, seq_len: {LENGTHS}}}}}]
"""
OPTIONS = ["--device", "cpu", "--threads", "1", "--rounds", "2", "--min-time", "0.2"]
MACHINES, CELLS, ROUNDS = 100, 10_000, 5
"""The run that is worked out on paper."""


def run(out: Path, *more: str, during: Callable[[Path], None] = lambda out: None) -> tuple[float, str]:
    """Run the suite as a command; seconds, and what it said."""
    (out / "s.yaml").write_text(SUITE)
    words = [sys.executable, "-m", "attnbench", "run", str(out / "s.yaml"), *OPTIONS, "--out", str(out / "out"), *more]
    began = time.monotonic()
    with (out / "said.txt").open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, env=dict(os.environ), cwd=out)
        while process.poll() is None:
            during(out)
            time.sleep(0.05)
    return time.monotonic() - began, (out / "said.txt").read_text()


def stored(out: Path) -> list[dict[str, Any]]:
    """Every row stored so far, in order."""
    files = out.glob(f"out/nodes/*/{RECORDS}")
    return [
        json.loads(line) for file in files for line in file.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def killing(there: Nodes, moments: list[int]) -> Callable[[Path], None]:
    """Kill a node each time that so many rows are stored."""

    def during(out: Path) -> None:
        if moments and len(stored(out)) >= moments[0]:
            moments.pop(0)
            there.kill()

    return during


def folder_of(out: Path) -> Path:
    (path,) = (out / "out" / "nodes").iterdir()
    return path


def show(what: str, value: object) -> None:
    print(f"{what:<58} {value}", flush=True)


def with_kills(out: Path, count: int = 3) -> None:
    with nodes(count) as there:
        seconds, said = run(out, "--on", f"ray:{there.address}", during=killing(there, [70, 140]))
    rows = RunFolder(folder_of(out)).in_order()
    taken = [json.loads(line) for line in (folder_of(out) / SAMPLES).read_text().splitlines()]
    visits = Counter((one["cell_id"], one["round"]) for one in taken)
    show(f"{count} nodes, two killed: rows, and those that are ok", (len(rows), sum(r.status == "ok" for r in rows)))
    show("visits that were stored, and stored twice", (len(taken), sum(times > 1 for times in visits.values())))
    show("findings of attnbench verify", len(audit(folder_of(out)).findings))
    show("machines lost, as it said", said.count("was lost"))
    show("seconds in all", f"{seconds:.0f}")


def overhead(out: Path) -> float:
    """Seconds that the engine adds to a visit, on one node beside the run without it."""
    alone, engine = out / "alone", out / "engine"
    alone.mkdir()
    engine.mkdir()
    run(alone, "--rounds", "1")
    with nodes(1) as there:
        run(engine, "--rounds", "1", "--on", f"ray:{there.address}")
    spans = {name: span(stored(folder)) for name, folder in (("without", alone), ("with", engine))}
    for name, one in spans.items():
        show(f"seconds a visit {name} the engine, first row to last", f"{one:.3f}")
    return spans["with"] - spans["without"]


def span(rows: list[dict[str, Any]]) -> float:
    """Seconds between two rows, on average, by when their cells were first visited."""
    moments = sorted(time.mktime(time.strptime(row["started_at"][:19], "%Y-%m-%dT%H:%M:%S")) for row in rows)
    return (moments[-1] - moments[0]) / max(1, len({row["cell_id"] for row in rows}) - 1)


def driver_alone(out: Path, lengths: int = 200) -> float:
    """Seconds of the driver for one visit: its message, checks, row and two syncs to the disk; machines take none."""
    suite = SUITE.replace(str(LENGTHS), str([*range(1, lengths + 1)]))
    (out / "s.yaml").write_text(suite)
    plan = make_plan(out / "s.yaml", Options("cpu", on="fake", out=out / "driver", rounds=2))
    cluster = Cluster(*(Host(f"h{number}", number) for number in range(MACHINES)))
    began = time.process_time(), time.monotonic()
    execute_on(cluster, plan, None, cluster.clock)
    visits = len(cluster.visits())
    busy, wall = (time.process_time() - began[0]) / visits, (time.monotonic() - began[1]) / visits
    show(f"driver alone, {MACHINES} machines that take no time: visits", visits)
    show("milliseconds of a visit: processor, and in all", f"{1e3 * busy:.2f}, {1e3 * wall:.2f}")
    return wall


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    show("load and cores", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()}")
    for name in ("kills", "overhead", "driver"):
        (out / name).mkdir(parents=True)
    with_kills(out / "kills")
    added = overhead(out / "overhead")
    each = driver_alone(out / "driver")
    show("milliseconds that the engine adds to a visit", f"{1e3 * added:.0f}")
    show("visits a second at which the driver saturates", f"{1 / each:.0f}")
    for seconds in (1.0, 5.0):
        measuring = CELLS * ROUNDS * (seconds + max(0.0, added)) / MACHINES
        busy = CELLS * ROUNDS * each / measuring
        show(
            f"{CELLS} cells, {ROUNDS} rounds, visits of {seconds:g} s, {MACHINES} machines",
            f"{measuring / 60:.0f} min, driver busy {busy:.0%}",
        )


if __name__ == "__main__":
    main()
