from __future__ import annotations

import inspect
import os
import resource
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnbench.measure import memory
from attnbench.measure.memory import peak_resident_bytes, peak_tensor_bytes, state_bytes
from tests.bare import in_bare_process


@pytest.mark.parametrize("size", [1, 1000, 16 * 2**20 + 3])
def test_the_peak_of_one_allocation_is_exact_to_the_byte(size: int) -> None:
    assert peak_tensor_bytes(lambda: torch.empty(size, dtype=torch.uint8)) == size


def test_freed_tensors_do_not_add_up_and_the_largest_moment_counts() -> None:
    def call() -> torch.Tensor:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(3000, dtype=torch.uint8)
        del a, b
        return torch.empty(2000, dtype=torch.uint8)

    assert peak_tensor_bytes(call) == 4000


def test_what_existed_before_does_not_count_and_repeats_agree() -> None:
    q = torch.randn(2, 256, 64)
    peaks = {peak_tensor_bytes(lambda: (q @ q.transpose(1, 2)).softmax(-1)) for _ in range(3)}
    assert peaks == {2 * 2 * 256 * 256 * 4}


def test_the_profiler_writes_nothing_and_what_the_call_writes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)  # which measuring in this process has set
    measure = "peak_tensor_bytes(lambda: (os.write(2, b'mine'), torch.empty(1000, dtype=torch.uint8)))"
    code = f"import os, torch; from attnbench.measure.memory import peak_tensor_bytes; print({measure})"
    code += "; os.close(2); print(peak_tensor_bytes(lambda: torch.empty(1000, dtype=torch.uint8)))"
    done = in_bare_process(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1000\n1000\n", "mine")


@pytest.mark.parametrize(("wanted", "level"), [(None, "6"), ("0", "0")])
def test_the_profiler_is_silent_in_processes_to_come_as_well_unless_the_user_wants_to_hear_it(
    wanted: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", wanted or "")
    if wanted is None:
        monkeypatch.delenv("KINETO_LOG_LEVEL")
    peak_tensor_bytes(lambda: None)
    assert os.environ["KINETO_LOG_LEVEL"] == level


def in_a_new_process(code: str) -> list[int]:
    """The numbers that lines of Python print where no other test has left anything on the heap."""
    head = "import gc, torch\nfrom attnbench.measure.memory import peak_resident_bytes\n"
    done = in_bare_process(head + inspect.cleandoc(code))
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_resident_memory_of_a_large_tensor_is_right_within_one_per_cent() -> None:
    sizes = [mib * 2**20 for mib in (64, 128, 256)]
    found = in_a_new_process(
        f"""
        for size in {sizes}:
            call = lambda: torch.zeros(size, dtype=torch.uint8)
            call()
            print(peak_resident_bytes(call))
        """
    )
    assert found == pytest.approx(sizes, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_garbage_that_is_found_during_a_call_does_not_hide_what_the_call_takes() -> None:
    size = 64 * 2**20
    found = in_a_new_process(
        f"""
        def call():
            gc.collect()
            return torch.zeros({size}, dtype=torch.uint8)

        call()
        garbage = [torch.zeros({2 * size}, dtype=torch.uint8)]
        garbage.append(garbage)
        del garbage
        print(peak_resident_bytes(call))
        """
    )
    assert found == pytest.approx([size], rel=0.01)


def test_the_rise_of_resident_memory_is_from_what_is_there_to_the_highest_since(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, clear_refs = tmp_path / "status", tmp_path / "clear_refs"
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR_REFS", clear_refs)
    status.write_text("VmHWM:\t  700 kB\nVmRSSOfOthers:\t 1 kB\nVmRSS:\t  300 kB\n")
    assert peak_resident_bytes(lambda: status.write_text("VmPeak:\t 9000 kB\nVmHWM:\t  1000 kB\n")) == 700 * 1024
    assert clear_refs.read_text() == "5"
    assert peak_resident_bytes(lambda: None) is None  # there is no VmRSS any more


def test_where_nothing_tells_how_much_memory_is_used_there_is_no_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "no folder" / "clear_refs")
    assert peak_resident_bytes(lambda: None) is None
    assert peak_tensor_bytes(lambda: None, "mps") is None


def test_a_state_is_as_large_as_all_tensors_in_it() -> None:
    assert state_bytes(torch.zeros(4, dtype=torch.uint8)) == 4
    assert state_bytes((torch.zeros(3), [torch.zeros(2, dtype=torch.float64), (5, None)], 7, "text")) == 12 + 16
    assert state_bytes(7) == 0


@pytest.mark.cuda
def test_requested_bytes_on_cuda_are_exact() -> None:
    call = lambda: torch.empty(1_000_003, dtype=torch.uint8, device="cuda")  # noqa: E731  # as above
    assert peak_tensor_bytes(call, "cuda") == 1_000_003


@pytest.mark.parametrize(("backend", "kind"), [("native", "requested"), ("cudaMallocAsync", "allocated")])
def test_the_peak_on_cuda_is_what_the_call_adds_to_what_was_requested_before(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[object] = []
    stats = {"requested_bytes.all.current": 0, "requested_bytes.all.peak": 0}  # as cudaMallocAsync leaves them
    stats |= {f"{kind}_bytes.all.current": 100, f"{kind}_bytes.all.peak": 5000}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: log.append((name, *device)))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: log.append(("memory_stats", device)) or dict(stats))

    def call() -> None:
        log.append("call")
        stats.update({f"{kind}_bytes.all.current": 700, f"{kind}_bytes.all.peak": 900})

    monkeypatch.setattr(memory, "_multiply", lambda device: log.append(("a product", device)))
    assert peak_tensor_bytes(call, "cuda:1") == 800
    before = [("a product", "cuda:1"), ("synchronize", "cuda:1"), ("empty_cache",), ("memory_stats", "cuda:1")]
    after = [("synchronize", "cuda:1"), ("memory_stats", "cuda:1")]
    assert log == [*before, ("reset_peak_memory_stats", "cuda:1"), "call", *after]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_little_room_below_a_limit_is_told_from_much_and_from_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    room = {"limit": 0}

    def limits(what: int) -> tuple[int, int]:
        assert what == resource.RLIMIT_AS
        return room["limit"], resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", limits)
    for limit, near in ((used + 2**25, True), (used + 2**28, False), (resource.RLIM_INFINITY, False)):
        room["limit"] = limit
        assert memory._near_the_limit() is near
    room["limit"] = used + 2**25
    monkeypatch.setattr(memory, "sys", SimpleNamespace(platform="darwin"))
    assert memory._near_the_limit() is False


def test_what_a_call_leaves_is_told_apart_from_what_it_holds_at_most() -> None:
    kept: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        kept.append(torch.ones(1000))
        return torch.ones(2000) + torch.ones(2000)

    peak, left = memory.tensor_bytes(call) or (0, 0)
    assert left == 4 * (1000 + 2000)
    assert peak >= 4 * (1000 + 3 * 2000)


def raises(error: type[Exception]) -> None:
    raise error


def test_an_error_of_the_call_is_no_lack_of_an_answer() -> None:
    for error in (KeyError, FileNotFoundError):
        with pytest.raises(error):
            peak_resident_bytes(partial(raises, error))
