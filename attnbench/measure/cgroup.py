"""The limits that control groups put on this process: cores, memory, and how often it was held back.

Linux puts every process into a group, and groups are nested. A container is such a group, and so is a job on a
cluster. Each group may have limits, and the tightest one on the way up counts.

- **Version 2** has one tree of groups. ``cpu.max`` says "150000 100000": 150 ms of work in each 100 ms, which is one
  core and a half; "max" is no limit. ``memory.max`` is a number of bytes, or "max".
- **Version 1** has a tree for each kind of limit. The quota is in ``cpu.cfs_quota_us``, where -1 is no limit, and
  ``cpu.cfs_period_us``. The memory limit is in ``memory.limit_in_bytes``, where a number beyond all machines is none.

Both versions may be there at once. ``/proc/self/cgroup`` says which group of each tree the process is in.
``/proc/self/mountinfo`` says where the trees are and which group each begins with: a container may see only its own.
In ``cpu.stat``, ``nr_throttled`` counts the periods in which the group had used up its share and waited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_NO_LIMIT = 2**60
"""A version 1 limit of this many bytes or more is no limit."""


def cores(root: Path = _ROOT) -> float | None:
    """Cores that the groups' processor time amounts to; None without a limit."""
    shares = [share for folder, version in _groups("cpu", root) if (share := _share(folder, version)) is not None]
    return min(shares, default=None)


def memory_bytes(root: Path = _ROOT) -> int | None:
    """The smallest memory limit of the groups; None without one."""
    return min((limit for limit, _ in _memory(root)), default=None)


def free_memory_bytes(root: Path = _ROOT) -> int | None:
    """Bytes that the tightest group has left; None without a limit. Cached files count as free."""
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def throttled_periods(root: Path = _ROOT) -> int:
    """Number of periods in which the groups have waited for processor time."""
    return sum(_field(folder / "cpu.stat", "nr_throttled") for folder, _ in _groups("cpu", root))


def oom_kills(root: Path = _ROOT) -> int:
    """A count that rises with each process killed for lack of memory, also without a limit; 0 if the kernel does not
    say."""
    counts = [(root / "proc/vmstat")]
    for folder, version in _groups("memory", root):
        counts.append(folder / ("memory.events" if version == 2 else "memory.oom_control"))
    return sum(_field(path, "oom_kill") for path in counts)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Folder and version of each group, from the innermost outwards."""
    for version, top, within, controllers in _trees(root):
        if version == 1 and controller not in controllers:
            continue
        own = _own_group(version, controller, root)
        if own is None:
            continue
        below = own.relative_to(within) if own.is_relative_to(within) else PurePosixPath()
        for part in (below, *below.parents):
            yield top / part, version


def _trees(root: Path) -> Iterator[tuple[int, Path, PurePosixPath, list[str]]]:
    """Version, folder, the group that the folder stands for, and the controllers of each tree."""
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, *rest) = left.split(), right.split() or [""]
        if kind in ("cgroup", "cgroup2") and len(fields) > 4:
            within, top = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), one) for one in fields[3:5])
            controllers = rest[-1].split(",") if rest else []
            yield 2 if kind == "cgroup2" else 1, root / top.lstrip("/"), PurePosixPath(within), controllers


def _own_group(version: int, controller: str, root: Path) -> PurePosixPath | None:
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number == "0" and not controllers) if version == 2 else controller in controllers.split(","):
            return PurePosixPath(path)
    return None


def _share(folder: Path, version: int) -> float | None:
    with suppress(ValueError):
        if version == 2:
            quota, period = map(float, text_of(folder / "cpu.max").split())
        else:
            quota, period = (float(text_of(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota > 0 and period > 0:
            return quota / period
    return None


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    for folder, version in _groups("memory", root):
        limit, used = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        allowed, taken = (text_of(folder / f"memory.{name}").strip() for name in (limit, used))
        if allowed.isdigit() and int(allowed) < _NO_LIMIT:
            cached = _field(folder / "memory.stat", "inactive_file")
            yield int(allowed), int(taken) - cached if taken.isdigit() else 0


def _field(path: Path, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", text_of(path), re.MULTILINE)
    return int(found[1]) if found else 0


def text_of(path: Path) -> str:
    """The text of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
