"""Where a variant's time goes on a GPU: one call eager, its kernels' own time, and the same call as a CUDA graph.

    python tests/benchmarks/on_gpu.py ROWS.jsonl --minutes 4

Apart from building the call, nothing of how the tool measures is used, so that the numbers check it. A case that takes
longer than --each ends with its process; its row says so, and the next one goes on. Each row is written at once.

Kernels of others are compiled for many configurations when they are first called, for up to a minute each. So all cases
are first called in several processes at a time (--warm), whose results nobody reads: what they compile stays on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

Row = dict[str, Any]

OPERATORS = """
    sdpa sdpa:backend=cudnn sdpa:backend=flash linear peer.linear.fla performer hedgehog rfa cosformer
    efficient favor-plus-plus taylor kernel:sim=rebased retnet:rotation=false peer.retnet.fla
    local flex:window=128 streaming sparse longformer bigbird etc sta radial graph
    moba xattention flexprefill minference sparge nsa:branch=selected nsa peer.nsa.fla reformer linformer nystrom
"""
LAYERS = """
    sdpa gla peer.gla.fla delta peer.delta.fla gated-delta peer.gated-delta.fla kda peer.kda.fla gated-delta-2 comba
    rwkv7 gsa abc ssd mamba2 log-linear mesa fox path parallax deltaformer
"""
VARIANTS = [*((name, "operator") for name in OPERATORS.split()), *((name, "layer") for name in LAYERS.split())]


def cases(lengths: list[int], only: set[str]) -> Iterator[Row]:
    """The default form first, at each length, then training, then the same in PyTorch's operations."""
    chosen = [(name, level) for name, level in VARIANTS if not only or name.partition(":")[0] in only]
    for form in ("auto", "torch"):
        for pass_, n in [*(("forward", n) for n in lengths), ("training", lengths[0])]:
            for name, level in chosen:
                yield {"variant": name, "level": level, "form": form, "pass": pass_, "n": n}


class Worker:
    """A process that measures case after case; one that is late is ended with all that it started."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.process: subprocess.Popen[str] | None = None

    def ask(self, case: Row, seconds: float) -> Row:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--work", *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        start = time.monotonic()
        try:
            print(json.dumps(case), file=self.process.stdin, flush=True)
            ready, _, _ = select.select([self.process.stdout], [], [], seconds)
            answer = self.process.stdout.readline() if ready else ""
        except BrokenPipeError:
            ready, answer = [True], ""
        if answer:
            row = {**case, **json.loads(answer)}
            if row["status"] == "error":  # the device may be lost to the process, and with it all later cases
                self.end()
            return row
        self.end()
        status = "crash" if ready else "timeout"
        return {**case, "status": status, "reason": f"after {time.monotonic() - start:.0f} s"}

    def end(self) -> None:
        if self.process is not None:
            with suppress(BrokenPipeError), self.process:  # the process may have ended before it read its request
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None


def warm(todo: list[Row], arguments: list[str], processes: int, until: float) -> None:
    """Call each case once, in several processes, until then at most."""

    def some(mine: list[Row]) -> None:
        worker = Worker(arguments)
        for case in mine:
            if time.monotonic() < until:
                worker.ask({**case, "warm": True}, max(1, until - time.monotonic()))
        worker.end()

    threads = [threading.Thread(target=some, args=(todo[i::processes],)) for i in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="a file for rows, to which they are added")
    parser.add_argument("--minutes", type=float, default=4.0, help="for everything")
    parser.add_argument("--each", type=float, default=60.0, help="seconds for a case")
    parser.add_argument(
        "--warm", type=int, default=0, help="processes that compile first, in at most a third of the time"
    )
    parser.add_argument("--only", default="", help="names of variants, with commas")
    parser.add_argument("--n", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given)
    arguments = [f"--{key.replace('_', '-')}={getattr(given, key)}" for key in ("heads", "head_dim", "dtype", "device")]
    todo = list(cases(given.n, set(filter(None, given.only.split(",")))))
    end = time.monotonic() + 60 * given.minutes
    if given.warm:
        # Tuned anew afterwards: a kernel that ran beside seven others was not timed well.
        os.environ["FLA_CACHE_RESULTS"] = "0"
        default = [case for case in todo if case["form"] == "auto" and case["n"] == given.n[0]]
        default.sort(key=lambda case: (case["pass"] != "forward", case["level"] != "layer"))  # these compile for long
        warm(default, arguments, given.warm, time.monotonic() + 20 * given.minutes)
        del os.environ["FLA_CACHE_RESULTS"]
    worker = Worker(arguments)
    try:
        with given.out.open("a") as file:
            for case in todo:
                left = end - time.monotonic()
                if left < 1:
                    break
                row = worker.ask(case, min(left, given.each))
                if row["status"] != "same":
                    print(json.dumps(row), file=file, flush=True)
                    print(line(row), flush=True)
    finally:
        worker.end()


def line(row: Row) -> str:
    what = f"{row['variant']:28} {row['level']:8} {row['pass']:8} {row['n']:6} {row['form']:5}"
    if row["status"] != "ok":
        return f"{what} {row['status']}: {row['reason']}"
    times = " ".join(f"{row[key]:9.3f}" if row[key] is not None else "        -" for key in TIMES)
    note = "; ".join(filter(None, [row["graph_note"], *row["passed_over"]]))
    return f"{what} {times} {row['kernels'] or 0:5} first {row['first_s']:5.1f} s  {row['kernel']}  {note}"


TIMES = ("eager_ms", "busy_ms", "graph_ms")


def work(given: argparse.Namespace) -> None:
    """Measure what standard input asks for, one line each; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from attnbench.contract.plugins.discovery import load
    from attnbench.errors import AttnbenchError

    try:
        load("attnbench_peers")
    except AttnbenchError as error:
        print(f"without the peers: {error}", file=sys.stderr)
    for asked in sys.stdin:
        case = json.loads(asked)
        try:
            row = measure(case, given)
        except AttnbenchError as error:
            row = {"status": "unsupported", "reason": str(error)}
        except Exception as error:
            row = {"status": "error", "reason": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(row), file=answers, flush=True)


def measure(case: Row, given: argparse.Namespace) -> Row:
    """One case: causal if the variant can be."""
    import torch

    from attnbench.contract.compiled import books
    from attnbench.contract.problem.shape import Shape
    from attnbench.contract.spec import Spec, parse_spec
    from attnbench.contract.variant import VARIANTS
    from attnbench.errors import Unsupported
    from attnbench.harness.inside.call import prepare
    from attnbench.suite.cell import Cell

    spec = parse_spec(case["variant"])
    if case["form"] != "auto":
        options = () if spec.name.startswith("peer.") else VARIANTS.get(spec.name).options
        if "form" not in options or "form" in dict(spec.options):
            return {"status": "same"}  # it has no other form
        spec = Spec.of(spec.name, {**dict(spec.options), "form": case["form"]})
    shape = Shape(heads=given.heads, head_dim=given.head_dim, seq_len=case["n"], causal=True)
    cell = Cell("on_gpu", "", spec, shape, case["level"], case["pass"], given.dtype, given.device)
    start = time.perf_counter()
    try:
        call = prepare(cell).on(0)
    except Unsupported:
        cell = replace(cell, shape=replace(shape, causal=False))
        call = prepare(cell).on(0)
    settle(given.device)
    built, start = time.perf_counter() - start, time.perf_counter()
    call()
    settle(given.device)
    row: Row = {"status": "ok", "causal": cell.shape.causal, "built_s": built, "first_s": time.perf_counter() - start}
    if case.get("warm"):
        return row
    with books() as entries:
        call()
    row["kernel"] = "+".join(sorted({entry.kernel for entry in entries}))
    row["passed_over"] = passed_over()
    row["torch"], row["card"] = torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    row |= {"eager_ms": None, "busy_ms": None, "kernels": None, "graph_ms": None, "graph_note": ""}
    row["eager_ms"] = timed(call, given.device)
    if given.device == "cpu":
        return row
    row["busy_ms"], row["kernels"] = busy(call)
    try:
        row["graph_ms"] = timed(graph(call).replay, given.device)
    except Exception as error:
        while error.__context__ is not None:  # to end a capture that is broken raises once more
            error = error.__context__  # type: ignore[assignment]  # the first of them
        row["graph_note"] = f"no graph: {error}".partition("\n")[0]
    return row


def passed_over() -> list[str]:
    """Why faster forms were not taken."""
    with suppress(ImportError):
        from attnbench.catalogue.engines import forms

        return list(forms.passed_over())
    return []


def settle(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], device: str) -> float:
    """Median in milliseconds of at least 5 calls and 0.2 s; on a GPU by events, with a cache full of something else."""
    import torch

    samples: list[float] = []
    begun = time.perf_counter()
    other = torch.empty(2**28, dtype=torch.int8, device=device) if device != "cpu" else None
    while len(samples) < 5 or time.perf_counter() - begun < 0.2:
        if other is None:
            start = time.perf_counter()
            call()
            samples.append(1e3 * (time.perf_counter() - start))
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        other.zero_()
        first.record()
        call()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last))
    return statistics.median(samples)


def busy(call: Callable[[], Any], times: int = 3) -> tuple[float, float]:
    """Sum of the kernels' own times in milliseconds, and their number, by torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    on_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.self_device_time_total for event in on_device) / 1e3 / times, round(len(on_device) / times)


def graph(call: Callable[[], Any]) -> Any:
    """The call as a CUDA graph, after three on a stream of its own."""
    import torch

    outer, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    outer.wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            call()
    finally:
        torch.cuda.set_stream(outer)  # a capture that fails leaves its own
    captured.replay()
    torch.cuda.synchronize()
    return captured


if __name__ == "__main__":
    main()
