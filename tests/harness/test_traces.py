"""One cell does not reach the next: what it changes in its process or leaves there is told, and ends the process."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from attnbench.harness.inside import switches, traces
from attnbench.harness.inside.traces import KEPT, OPEN, Snapshot, threads_of_torch
from attnbench.harness.wire import process
from attnbench.measure import limits
from attnbench.measure.allocator import return_freed_memory
from tests.forked import forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity, limits and /proc")

SPARSE: Any = torch.sparse.check_sparse_tensor_invariants


class Mode(TorchFunctionMode):
    """Sees every call of torch, and does nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODE: Any = Mode()
CASES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "the number of threads": (lambda: torch.set_num_threads(3), lambda: torch.set_num_threads(1)),
    "the default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "the default device": (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
    "deterministic mode": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "checks of sparse tensors": (lambda: SPARSE.enable(), lambda: SPARSE.disable()),
    "how gradients are computed": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda: torch.autograd.set_multithreading_enabled(True),
    ),
    "what stands between a call and torch": (lambda: MODE.__enter__(), lambda: MODE.__exit__(None, None, None)),
    "the hooks of all modules": (
        lambda: kept.append(register_module_forward_hook(lambda *_: None)),
        lambda: kept.pop().remove(),
    ),
    "the kernels of torch's operations": (lambda: replace_kernel(), lambda: kept.pop()._destroy()),
    "torch's profiler": (lambda: profile(), lambda: kept.pop().__exit__(None, None, None)),
    "gradient mode": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "the precision of float32 products": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "the kernels that may be used": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),  # type: ignore[no-untyped-call]  # torch has no types here
        lambda: torch.backends.cuda.enable_flash_sdp(True),  # type: ignore[no-untyped-call]  # as above
    ),
    "the precision of float32 convolutions and recurrences": (
        lambda: put(torch.backends.mkldnn.conv, "fp32_precision", "bf16", "none"),  # type: ignore[attr-defined]  # untyped
        lambda: put_back(),
    ),
    "the precision of sums in half precision": (
        lambda: put(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False, True),
        lambda: put_back(),
    ),
    "how numbers are rounded": (
        lambda: torch.set_flush_denormal(True),
        lambda: torch.set_flush_denormal(False),
    ),
    "KMP_BLOCKTIME in the environment": (
        lambda: os.environ.update(KMP_BLOCKTIME="1"),
        lambda: os.environ.pop("KMP_BLOCKTIME"),
    ),
    "the cores it may use": (
        lambda: os.sched_setaffinity(0, [min(CORES)]),
        lambda: os.sched_setaffinity(0, CORES),
    ),
    "its rank among programs": (
        lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
        lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
    ),
    "the timers that interrupt it": (
        lambda: signal.setitimer(signal.ITIMER_PROF, 1000.0, 1000.0),
        lambda: signal.setitimer(signal.ITIMER_PROF, 0.0),
    ),
    "how garbage is collected": (lambda: gc.callbacks.append(print), lambda: gc.callbacks.remove(print)),
    "how its threads take turns": (lambda: sys.setswitchinterval(0.1), lambda: sys.setswitchinterval(SWITCHED)),
    "the rights of new files": (lambda: kept.append(os.umask(0o7)), lambda: os.umask(kept.pop())),
    "warnings that are errors": (
        lambda: warnings.filterwarnings("error", "a message of nobody"),
        lambda: warnings.filters.pop(0),  # type: ignore[attr-defined]  # a list, as long as it is not reset
    ),
    "NEW_VARIABLE in the environment": (
        lambda: os.environ.update(NEW_VARIABLE="1"),
        lambda: os.environ.pop("NEW_VARIABLE"),
    ),
    "the working directory": (lambda: os.chdir("/"), lambda: os.chdir(FOLDER)),
    "torch.matmul": (lambda: put(torch, "matmul", None), lambda: put_back()),
    "torch.nn.functional.softmax": (lambda: put(torch.nn.functional, "softmax", print), lambda: put_back()),
    "Tensor.sum": (lambda: put(torch.Tensor, "sum", print), lambda: put_back()),
    "torch.softmax": (lambda: put(torch, "softmax", torch.log_softmax), lambda: put_back()),
    "torch.nn.Linear.forward": (lambda: put(torch.nn.Linear, "forward", print), lambda: put_back()),
    "torch.nn.Linear.__call__": (lambda: put(torch.nn.Linear, "__call__", print), lambda: put_back()),
    "torch.nn.Module.__call__": (lambda: put(torch.nn.Module, "__call__", print), lambda: put_back()),
    "torch.nn.functional.gelu": (
        lambda: put(torch.nn.functional, "gelu", torch.nn.functional.tanh),
        lambda: put_back(),
    ),
}
CORES, FOLDER, SWITCHED = os.sched_getaffinity(0), Path.cwd(), sys.getswitchinterval()
replaced: list[tuple[Any, str, Any]] = []
kept: list[Any] = []


def put(home: Any, name: str, value: object, before: object = None) -> None:
    replaced.append((home, name, before or vars(home).get(name)))
    setattr(home, name, value)


def put_back() -> None:
    home, name, value = replaced.pop()
    setattr(home, name, value) if value is not None else delattr(home, name)


def replace_kernel() -> None:
    kept.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is replaced is the point
        kept[-1].impl("erfinv", lambda x: x, "CPU")


def profile() -> None:
    kept.append(torch.autograd.profiler.profile())
    kept[-1].__enter__()


@pytest.mark.parametrize("words", CASES)
def test_what_a_cell_changes_in_its_process_is_told_by_name(words: str) -> None:
    if words == "the cores it may use" and len(CORES) == 1:
        pytest.skip("one core")
    if words == "the default device" and torch.__version__ < "2.10":
        pytest.skip("torch 2.9 cannot tell it any more once it was set back")
    if words == "how numbers are rounded" and not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    change, undo = CASES[words]
    before = Snapshot.take("cpu")
    change()
    try:
        left = Snapshot.take("cpu").left_since(before)
    finally:
        undo()
    assert left.startswith("changed ")
    assert words in left
    assert Snapshot.take("cpu").left_since(before) == ""


def test_an_audit_hook_of_a_cell_is_told_though_no_list_of_them_can_be_had() -> None:
    code = (
        "import sys; from attnbench.results import sources; from attnbench.harness.inside.traces import Snapshot\n"
        "sources.listen(); before = Snapshot.take('cpu'); sys.addaudithook(print)\n"
        "sys.exit(Snapshot.take('cpu').left_since(before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "changed the audit hooks\n"


def test_the_library_that_is_chosen_for_each_cell_is_no_trace_and_another_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "is_true_float32", lambda: True)
    with restored(monkeypatch):
        process.apply(
            "tuned", threads=torch.get_num_threads(), device="cpu", products=process.Products("oneDNN", "oneDNN")
        )
        process.choose_products(of_one_row=False)
        before = Snapshot.take("cpu")
        process.choose_products(of_one_row=True)
        assert Snapshot.take("cpu").left_since(before) == ""
        torch.set_float32_matmul_precision("high")
        assert Snapshot.take("cpu").left_since(before) == "changed the precision of float32 products"
        process.choose_products(of_one_row=False)
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]  # oneDNN without its name
        assert Snapshot.take("cpu").left_since(before) == "changed the precision of float32 products"


@contextmanager
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the process uses, and torch's switches, as they were."""
    monkeypatch.setattr(process, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(process, "_products", process.Products())
    monkeypatch.setattr(switches, "chosen", set())
    before = switches.read_switches()
    try:
        yield
    finally:
        switches.set_back(before)


@pytest.mark.parametrize("precision", ["bf16", "ieee"])
@pytest.mark.parametrize("place", ["", ".mkldnn", ".mkldnn.matmul", ".mkldnn.conv", ".mkldnn.rnn"])
def test_each_switch_of_precision_is_a_trace_and_is_set_back(
    place: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with restored(monkeypatch):
        torch.set_float32_matmul_precision("medium" if precision == "ieee" else "highest")
        before, snapshot = switches.read_switches(), Snapshot.take("cpu")
        exec(f"torch.backends{place}.fp32_precision = {precision!r}", {"torch": torch})  # as in a plug-in
        left = Snapshot.take("cpu").left_since(snapshot)
        assert left.startswith("changed the precision of float32 "), left
        switches.set_back(before)
        assert switches.read_switches() == before
        assert Snapshot.take("cpu").left_since(snapshot) == ""
        assert not any("mix of the legacy" in str(value) for value in before.values())


def test_every_switch_is_one_that_this_torch_has() -> None:
    assert [name for name, value in switches.read_switches().items() if "Error(" in str(value)] == []


def test_a_precision_that_a_plug_in_sets_is_set_back_unless_the_process_is_as_shipped(tmp_path: Path) -> None:
    mixed = "import torch\ntorch.backends.mkldnn.matmul.fp32_precision = 'bf16'\n"
    (tmp_path / "own.py").write_text(mixed + "torch.backends.fp32_precision = 'bf16'\n")
    matrix = "{variant: [softmax, local], seq_len: 64, heads: 1, head_dim: 8}"
    options = ["--plugin", "own.py", "--fresh", "--quick"]
    for state in ("tuned", "as-shipped"):
        rows, said = run(tmp_path, f"{{name: w, matrix: {matrix}}}", *options, "--process", state, fork=False)
        told = (
            "a plug-in changed the precision of float32 products, the precision of float32 convolutions and recurrences"
            " (torch.backends.fp32_precision = bf16, torch.backends.mkldnn.fp32_precision = bf16)"
        )
        assert [row["status"] for row in rows] == ["ok"] * 2, said
        assert [told in row["warnings"] for row in rows] == [state == "as-shipped"] * 2
        assert (told in " ".join(said.split())) == (state == "as-shipped")
        assert "a plug-in changed" not in said or state == "as-shipped"


@pytest.fixture
def until() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_threads_that_go_on_are_counted_and_one_that_ends_is_not(until: threading.Event) -> None:
    before = Snapshot.take("cpu")
    ending = threading.Thread(target=time.sleep, args=(0.01,))
    ending.start()
    assert Snapshot.take("cpu").left_since(before) == ""
    for name in "abc":
        threading.Thread(target=until.wait, daemon=True, name=name).start()
    assert Snapshot.take("cpu").left_since(before) == "left 3 threads (a, b, c) behind"


def test_memory_that_stays_is_told_and_a_little_of_it_is_not() -> None:
    gc.collect()
    return_freed_memory()  # that of earlier tests would be used again
    before = Snapshot.take("cpu")
    little = torch.ones(KEPT // 8)
    assert Snapshot.take("cpu").left_since(before) == ""
    much = torch.ones(KEPT // 2)
    assert Snapshot.take("cpu").left_since(before).endswith("MiB of memory behind")
    del little, much


@pytest.mark.parametrize("known", [frozenset, threads_of_torch])
def test_what_computes_on_without_python_is_a_thread_as_well(
    monkeypatch: pytest.MonkeyPatch, known: Callable[[], frozenset[str]]
) -> None:
    monkeypatch.setattr(traces, "_threads", frozenset)  # as if this one did not run Python
    of_torch = known()
    before = Snapshot.take("cpu", of_torch)
    seen = threading.Event()

    def compute() -> None:
        while not seen.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**5)

    working = [threading.Thread(target=compute) for _ in range(3)]  # of one, other processes may take the core
    for thread in working:
        thread.start()
    told, deadline = set(), time.monotonic() + 60
    while "left 1 thread behind" not in told and time.monotonic() < deadline:  # on a busy machine it may get no core
        told.add(Snapshot.take("cpu", of_torch, since=before).left_since(before))
    seen.set()
    for thread in working:
        thread.join()
    assert "left 1 thread behind" in told


@pytest.mark.parametrize("schedstat", ["0 0 0\n", ""])
def test_what_computes_on_is_told_by_a_kernel_that_counts_for_no_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, schedstat: str
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/schedstat").write_text(schedstat)
    monkeypatch.setattr(traces, "_TASKS", tmp_path)
    for goes_on in (True, False):
        seconds = count(1, 1 if goes_on else 0)
        monkeypatch.setattr(traces, "process_time", lambda seconds=seconds: next(seconds))
        assert Snapshot.take("cpu", ["2"]).busy == goes_on
    assert not Snapshot.take("cpu", ["1"]).busy


def test_a_thread_that_rests_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps some that never compute, for which every visit to a cell waited 10 ms."""
    seen = threading.Event()
    resting = threading.Thread(target=seen.wait)
    resting.start()
    try:
        of_torch = threads_of_torch() - {str(resting.native_id)}
        before = Snapshot.take("cpu", of_torch)
        assert before.computed > 0
        monkeypatch.setattr(traces, "sleep", lambda _: pytest.fail("waits"))
        assert not Snapshot.take("cpu", of_torch, since=before).busy
    finally:
        seen.set()
        resting.join()


def test_torchs_own_threads_which_spin_behind_each_call_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They spin for 10 ms, in which every visit to a cell waited."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        of_torch = threads_of_torch()
        monkeypatch.setattr(traces, "sleep", lambda _: pytest.fail("waits"))
        torch.ones(2**20).exp_()
        assert not Snapshot.take("cpu", of_torch).busy
    finally:
        torch.set_num_threads(before)


def test_files_that_several_cells_left_open_are_told_together() -> None:
    first = Snapshot.take("cpu")
    with ExitStack() as files:
        for _ in range(2):
            before = Snapshot.take("cpu")
            for _ in range(OPEN // 2 + 1):
                files.enter_context(Path(os.devnull).open())
            assert Snapshot.take("cpu").left_since(before) == ""
        assert Snapshot.take("cpu").kept_by_all_since(first) == f"{OPEN + 2} open files"
    assert Snapshot.take("cpu").kept_by_all_since(first) == ""


def test_files_that_stay_open_are_told_and_a_few_are_not(tmp_path: Path) -> None:
    before = Snapshot.take("cpu")
    with ExitStack() as files:
        for _ in range(OPEN):
            files.enter_context(Path(os.devnull).open())
        assert Snapshot.take("cpu").left_since(before) == ""
        files.enter_context(Path(os.devnull).open())
        assert Snapshot.take("cpu").left_since(before) == f"left {OPEN + 1} open files behind"


def test_what_the_compiler_tells_its_kernels_in_the_environment_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "1")  # as inherited from who started the process
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "a")  # one that a user sets, and a cell must not
    before = Snapshot.take("cpu")
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "2")
    assert Snapshot.take("cpu").left_since(before) == ""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "b")
    assert Snapshot.take("cpu").left_since(before) == "changed TORCHINDUCTOR_CACHE_DIR in the environment"


def test_several_traces_are_one_sentence(until: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Snapshot.take("cpu")
    monkeypatch.setattr(torch, "softmax", torch.log_softmax)
    monkeypatch.setenv("NEW_VARIABLE", "1")
    threading.Thread(target=until.wait, daemon=True, name="waiting").start()
    said = "changed NEW_VARIABLE in the environment and torch.softmax and left 1 thread (waiting) behind"
    assert Snapshot.take("cpu").left_since(before) == said


PLUGIN = """
import os, threading, time, torch
from pathlib import Path
from torch import nn
from attnbench import register

class Own(nn.Module):
    def __init__(self, shape):
        super().__init__()
    def forward(self, q, k, v, *, key_mask=None):
        with Path(__file__).with_name("calls").open("a") as file:
            file.write(f"{type(self).__name__} {os.getpid()}\\n")
        self.leave()
        return v + 0
    def leave(self):
        pass

def own(name):
    return register(name, family="reference", source="-", formula="-", cost="-")

@own("own-clean")
class Clean(Own):
    "Leaves nothing, though it makes a progress bar, as torch's compiler does."
    def leave(self):
        torch.hub.tqdm(range(1), disable=True)

@own("own-softmax")
class Softmax(Own):
    "Gives whoever comes next another softmax."
    def leave(self):
        torch.softmax = torch.log_softmax

@own("own-thread")
class Thread(Own):
    "Works on in the background, and in another folder."
    def leave(self):
        if threading.active_count() == 1:
            os.chdir("/")
            wait = lambda: [time.sleep(0.001) for _ in range(10**9)]
            threading.Thread(target=wait, daemon=True, name="waiting").start()

@own("own-process")
class Process(Own):
    "Starts a process for each object, which nobody ends."
    def leave(self):
        if not hasattr(self, "pid"):
            self.pid = os.fork()
            if self.pid == 0:
                time.sleep(1000)
                os._exit(0)
"""


def run(tmp_path: Path, sweeps: str, *options: str, fork: bool = True) -> tuple[list[dict[str, Any]], str]:
    """Rows of a run, and what it said on stderr."""
    (tmp_path / "s.yaml").write_text(f"name: s\nsweeps: [{sweeps}]\n")
    command = [
        sys.executable,
        "-m",
        "attnbench",
        "run",
        "s.yaml",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--unchecked",
        *options,
    ]
    with forks(watched=True) if fork else nullcontext():
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    records = max((tmp_path / "results").glob("s/*/records.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for line in records.read_text().splitlines()], ended.stderr


def test_after_a_cell_that_leaves_traces_the_row_says_so_and_the_next_has_another_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    matrix = "{variant: [own-clean, own-softmax, own-thread, own-process], seq_len: 8, heads: 1, head_dim: 4}"
    rows, _ = run(
        tmp_path, f"{{name: w, matrix: {matrix}}}", "--plugin", "own.py", "--rounds", "2", "--min-time", ".02"
    )
    last = {row["variant"]: row for row in rows}
    assert {row["status"] for row in last.values()} == {"ok"}
    fresh = "so the next one starts in a fresh process"
    # In the last round as well, though its row was made anew.
    assert f"the cell changed torch.softmax, {fresh}" in last["own-softmax"]["warnings"]
    thread = "the cell changed the working directory and left 1 thread (waiting) behind"
    assert f"{thread}, {fresh}" in last["own-thread"]["warnings"]
    assert re.search(f"the cell left \\d process(es)? behind, {fresh}", last["own-process"]["warnings"])
    assert fresh not in last["own-clean"]["warnings"]
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    for i, (name, pid) in enumerate(calls):
        after = [other for other in calls[i:] if other[1] == pid]
        assert name == "Clean" or after == [other for other in after if other[0] == name]


def test_compare_warns_of_a_variant_that_reaches_the_others_of_its_turns(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    shape = ["--n", "8", "--heads", "1", "--head-dim", "4", "--threads", "1", "--device", "cpu", "--min-time", "0.02"]
    command = [sys.executable, "-m", "attnbench", "compare", "own-clean", "own-thread", "--plugin", "own.py", *shape]
    with forks(watched=True):
        ended = subprocess.run(
            [*command, "--json", "--no-error", "--unchecked"], cwd=tmp_path, capture_output=True, text=True
        )
    assert ended.returncode == 0, ended.stderr
    told = "n = 8: a variant changed the working directory and left 1 thread (waiting) behind while they took turns; "
    assert told + "do not trust the times" in json.loads(ended.stdout)["warnings"]


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_what_every_variant_leaves_is_no_trace(tmp_path: Path, share: int) -> None:
    """One in ``share`` of the variants."""
    from attnbench.contract.variant import VARIANTS

    ours = {
        entry.name for entry in VARIANTS if entry.make.__module__.startswith("attnbench.")
    }  # not what tests register
    names = ", ".join(sorted(name for name in ours if not name.startswith("flex"))[::share])
    shape = "seq_len: 64, heads: 2, head_dim: 16"
    rows, said = run(
        tmp_path,
        f"{{name: forward, measure: [memory, error], matrix: {{variant: [{names}], {shape}}}}},"
        f"{{name: training, measure: [memory], pass: training, matrix: {{variant: [{names}], {shape}}}}},"
        f"{{name: decode, pass: decode, matrix: {{variant: [softmax, linear, gla], {shape}}}}}",
        "--quick",
    )
    assert [row["warnings"] for row in rows if "fresh process" in row["warnings"]] == []
    assert {row["status"] for row in rows} <= {"ok", "unsupported"}, said


@pytest.mark.slow
def test_what_the_compiler_leaves_is_no_trace(tmp_path: Path) -> None:
    matrix = "{variant: [softmax, linear], compile: true, seq_len: 64, heads: 2, head_dim: 16}"
    # Forks of a process that has used the compiler would wait for threads of its that they do not have.
    rows, _ = run(tmp_path, f"{{name: w, matrix: {matrix}}}", "--quick", "--cell-timeout", "200", fork=False)
    assert [(row["status"], row["reason"], "fresh process" in row["warnings"]) for row in rows] == [
        ("ok", "", False)
    ] * 2


REACHES_ALL = """
import threading
import torch
torch.softmax = torch.log_softmax
torch.nn.Linear.forward = lambda self, x: x
threading.Thread(target=threading.Event().wait, name="waiting", daemon=True).start()
"""


def test_a_plug_in_that_replaces_a_function_when_it_is_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REACHES_ALL)
    matrix = "{variant: mean-value, seq_len: 64, heads: 1, head_dim: 8}"
    rows, said = run(tmp_path, f"{{name: w, matrix: {matrix}}}", "--plugin", "own.py", "--quick")
    said = " ".join(said.split())
    assert "a plug-in replaced torch.softmax, torch.nn.Linear.forward: numbers may silently be wrong" in said
    assert "a plug-in left 1 thread (waiting) behind when it was imported, which reaches all cells" in said
    (row,) = rows
    assert row["status"] == "ok"


KEPT_ON_PURPOSE = """
import torch
from attnbench.measure.reuse import Recent
from attnbench.harness.inside.traces import KEPT, Snapshot
before = Snapshot.take("cpu")
recent = Recent(lambda n: [torch.ones(n)], 1)
recent(KEPT // 2)
assert not Snapshot.take("cpu").kept_since(before, KEPT)
left = torch.ones(KEPT // 2)
assert "of memory" in Snapshot.take("cpu").kept_since(before, KEPT)
"""


def test_what_is_kept_for_the_next_cell_on_purpose_is_no_trace() -> None:
    """In a process of its own, in which no earlier test has left or freed memory."""
    subprocess.run([sys.executable, "-c", KEPT_ON_PURPOSE], check=True, timeout=120)
