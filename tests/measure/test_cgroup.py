"""Limits of containers and jobs, on trees of control groups made by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from attnbench.errors import UsageError
from attnbench.measure import cgroup, machine
from attnbench.measure.machine import (
    available_cores,
    default_threads,
    refuse_binding,
    thread_warnings,
    throttling_warning,
    total_memory_bytes,
)

V2 = "30 23 0:26 {within} {top} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "{number} 31 0:29 {within} {top} rw,relatime - cgroup cgroup rw,{controllers}\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version_2(root: Path, files: dict[str, str], *, group: str = "/job/step", within: str = "/") -> Path:
    mounts = "22 1 8:1 / / rw - ext4 /dev/root rw\n" + V2.format(within=within, top="/sys/fs/cgroup")
    return tree(
        root,
        {
            "proc/self/cgroup": f"0::{group}\n",
            "proc/self/mountinfo": mounts,
            **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
        },
    )


def version_1(root: Path, files: dict[str, str], *, group: str = "/docker/abc", within: str = "/") -> Path:
    mounts = V1.format(number=32, within=within, top="/sys/fs/cgroup/cpu,cpuacct", controllers="cpu,cpuacct")
    mounts += V1.format(number=35, within=within, top="/sys/fs/cgroup/memory", controllers="memory")
    own = f"4:memory:{group}\n3:cpu,cpuacct:{group}\n1:name=systemd:/elsewhere\n0::/\n"
    return tree(root, {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **files})


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup.cores(tmp_path) is None
    assert cgroup.memory_bytes(tmp_path) is None
    assert cgroup.free_memory_bytes(tmp_path) is None
    assert cgroup.throttled_periods(tmp_path) == 0


def test_the_quota_of_the_own_group_counts_and_not_that_of_another(tmp_path: Path) -> None:
    root = version_2(tmp_path, {"job/step/cpu.max": "150000 100000\n", "other/cpu.max": "1000 100000\n"})
    assert cgroup.cores(root) == 1.5


@pytest.mark.parametrize("tight", ["job/step", "job", "."])
def test_every_group_on_the_way_up_counts(tmp_path: Path, tight: str) -> None:
    files = {f"{group}/cpu.max": "max 100000\n" for group in ("job/step", "job", ".")}
    files |= {f"{group}/memory.max": "max\n" for group in ("job/step", "job", ".")}
    files |= {f"{tight}/cpu.max": "50000 100000", f"{tight}/memory.max": "1048576"}
    root = version_2(tmp_path, files)
    assert (cgroup.cores(root), cgroup.memory_bytes(root)) == (0.5, 2**20)


def test_a_container_that_sees_only_its_own_group_finds_it_where_it_is_mounted(tmp_path: Path) -> None:
    root = version_2(tmp_path, {"cpu.max": "400000 100000"}, group="/docker/abc", within="/docker/abc")
    assert cgroup.cores(root) == 4
    elsewhere = version_2(tmp_path / "b", {"cpu.max": "300000 100000"}, group="/../..", within="/docker/abc")
    assert cgroup.cores(elsewhere) == 3


def test_version_1_has_a_tree_for_each_kind_of_limit(tmp_path: Path) -> None:
    root = version_1(
        tmp_path,
        {
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_time 7\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{2**30}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{2**29}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": f"cache 1\ninactive_file {2**28}\n",
        },
    )
    assert cgroup.cores(root) == 2
    assert cgroup.memory_bytes(root) == 2**30
    assert cgroup.free_memory_bytes(root) == 2**30 - 2**29 + 2**28
    assert cgroup.throttled_periods(root) == 4


def test_in_version_1_no_limit_is_none(tmp_path: Path) -> None:
    root = version_1(
        tmp_path,
        {
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert (cgroup.cores(root), cgroup.memory_bytes(root)) == (None, None)


def test_where_both_versions_are_there_both_count(tmp_path: Path) -> None:
    root = version_1(tmp_path, {"sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000"})
    tree(root, {"sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"})
    mounts = root / "proc/self/mountinfo"
    mounts.write_text(mounts.read_text() + V2.format(within="/", top="/sys/fs/cgroup/uni\\040fied"))
    tree(root, {"sys/fs/cgroup/uni fied/memory.max": "4096"})
    assert (cgroup.cores(root), cgroup.memory_bytes(root)) == (3, 4096)


@pytest.mark.parametrize("text", ["", "max", "0 0", "many cores", "100000 0", "\x00\xff"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, text: str) -> None:
    root = version_2(tmp_path, {"job/step/cpu.max": text, "job/step/memory.max": text})
    (root / "proc/self/mountinfo").write_text((root / "proc/self/mountinfo").read_text() + "\n - \n1 2\n - cgroup2\n")
    assert (cgroup.cores(root), cgroup.memory_bytes(root)) == (None, None)


@pytest.fixture
def _quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota of two and a half cores and a gibibyte, half of it in use, on a machine of sixteen cores."""
    files = {"cpu.max": "250000 100000", "memory.max": str(2**30), "memory.current": str(2**29)}
    root = version_2(tmp_path, {f"job/step/{name}": text for name, text in files.items()})
    for ask in (cgroup.cores, cgroup.memory_bytes, cgroup.free_memory_bytes):
        monkeypatch.setattr(machine.cgroup, ask.__name__, partial(ask, root))
    monkeypatch.setattr(machine, "CORES", frozenset(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.usefixtures("_quota")
def test_a_quota_counts_as_cores_and_a_limit_as_memory() -> None:
    assert available_cores() == default_threads() == 2
    assert total_memory_bytes() == 2**30
    assert machine.available_memory_bytes() == 2**29


@pytest.mark.usefixtures("_quota")
def test_what_limits_threads_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = "the control group allows 2.5 of 16 cores"
    assert thread_warnings(2) == [allowed]
    assert thread_warnings(4) == [allowed, "4 threads on 2 cores wait for each other; use --threads 2"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1,4")
    assert default_threads() == 1
    assert thread_warnings(1) == [allowed, "OMP_NUM_THREADS leaves 1 of 2 cores; --threads 2 uses all"]


def test_threads_that_a_variable_binds_to_fewer_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside each other they gave the reversed verdict, with other programs as its reason."""
    bound = {7: {0}, 8: {0}, 9: {1}}
    monkeypatch.setattr("os.sched_getaffinity", bound.get)
    refuse_binding(2, {"7", "8"})  # the process has a single core, which no variable changes
    monkeypatch.setenv("OMP_PLACES", "{0}")
    said = "OMP_PLACES binds 2 threads to 1 core, where they wait for each other; unset it, or give --threads 1"
    with pytest.raises(UsageError, match=f"^{said}$"):
        refuse_binding(2, {"7", "8"})
    refuse_binding(1, {"7", "8"})
    refuse_binding(2, {"7", "9"})
    refuse_binding(2, {"7"})
    refuse_binding(2, set())  # a system that tells no threads


def test_kills_for_lack_of_memory_are_counted_in_the_groups_and_on_the_machine(tmp_path: Path) -> None:
    root = version_2(tmp_path, {"job/step/memory.events": "oom 9\noom_kill 2\n", "job/memory.events": "oom_kill 3\n"})
    (root / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 4\n")
    assert cgroup.oom_kills(root) == 2 + 3 + 4
    assert cgroup.oom_kills(tmp_path / "nowhere") == 0


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "²"])
def test_a_number_of_threads_that_is_none_is_not_respected(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert default_threads() == available_cores()


def test_being_held_back_is_said() -> None:
    assert throttling_warning(0) is None
    assert throttling_warning(3) == "held back 3 times by the CPU quota of the control group; use fewer --threads"
