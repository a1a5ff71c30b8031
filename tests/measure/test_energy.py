"""Energy by counters: a faked folder of the kernel's, and a faked NVML."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attnbench.measure import energy
from attnbench.measure.energy import Counter, Meter, energy_counters

Zone = Callable[..., Path]


@pytest.fixture
def zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zone:
    """Writes a zone of the kernel's, in microjoules."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)

    def write(number: str, name: str, value: int, full: int = 10**9) -> Path:
        folder = tmp_path / number
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{full}\n")
        (folder / "energy_uj").write_text(f"{value}\n")
        return folder / "energy_uj"

    return write


def test_two_packages_add_up_and_nothing_counts_twice(zone: Zone) -> None:
    first, second = zone("intel-rapl:0", "package-0", 5_000_000), zone("intel-rapl:1", "package-1", 7_000_000)
    others = [
        zone("intel-rapl:0:0", "core", 0),
        zone("intel-rapl-mmio:0", "package-0", 0),
        zone("intel-rapl:2", "psys", 0),
        zone("dtpm", "package-0", 0),
    ]
    meter = Meter(energy_counters("cpu"))
    assert meter.joules() == 0
    first.write_text("6500000")
    second.write_text("7250000")
    for other in others:
        other.write_text("900000000")
    assert meter.joules() == pytest.approx(1.75)
    first.write_text("6600000")
    assert meter.joules() == pytest.approx(1.85)


def test_a_counter_that_was_full_goes_on_counting(zone: Zone) -> None:
    file = zone("intel-rapl:0", "package-0", 999_000_000)
    meter = Meter(energy_counters("cpu"))
    file.write_text("2000000")
    assert meter.joules() == pytest.approx(3)


def test_where_a_counter_could_have_been_full_twice_the_energy_is_unknown_for_good(
    zone: Zone, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(energy.time, "monotonic", lambda: clock[0])
    file = zone("intel-rapl:0", "package-0", 0, full=60_000_000_000)
    meter = Meter(energy_counters("cpu"))
    clock[0] += 60  # at 1000 W it would be full now for the first time
    file.write_text("1000000")
    assert meter.joules() == 1
    clock[0] += 61
    assert meter.joules() is None
    clock[0] += 1
    assert meter.joules() is None


@pytest.mark.parametrize("harm", ["no folder", "no package", "one cannot be read", "no number"])
def test_without_a_counter_of_every_package_there_is_no_energy(
    harm: str, zone: Zone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone("intel-rapl:0", "package-0", 0)
    assert len(energy_counters("cpu")) == 1
    if harm == "no folder":
        monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    elif harm == "no package":
        zone("intel-rapl:0", "psys", 0)
    elif harm == "one cannot be read":  # a folder: no mode keeps root from reading
        zone("intel-rapl:1", "package-1", 0).unlink()
        (tmp_path / "intel-rapl:1" / "energy_uj").mkdir()
    else:
        zone("intel-rapl:0", "package-0", 0).write_text("many")
    assert energy_counters("cpu") == ()


def test_a_counter_that_goes_away_leaves_no_energy(zone: Zone) -> None:
    file = zone("intel-rapl:0", "package-0", 0)
    meter = Meter(energy_counters("cpu"))
    file.unlink()
    assert meter.joules() is None
    file.write_text("1000000")
    assert meter.joules() is None


def test_what_is_skipped_does_not_count_and_what_was_before_does() -> None:
    taken = [0.0]
    meter = Meter([Counter(lambda: taken[0])], 10.0)
    taken[0] += 1
    assert meter.joules() == 11
    taken[0] += 100
    meter.skip()
    taken[0] += 2
    assert meter.joules() == 13


def test_no_counter_is_never_read_for_what_cannot_be_told_any_more() -> None:
    reads: list[int] = []

    def read() -> float:
        reads.append(1)
        return 1.0

    meter = Meter([Counter(read)], None)
    meter.skip()
    assert meter.joules() is None
    assert reads == []
    assert Meter(()).joules() is None


class Nvml(ModuleType):
    """One board, which took so many millijoules since its driver was loaded."""

    class NVMLError(Exception):
        pass

    def __init__(self, uuid: str, millijoules: int = 5000) -> None:
        super().__init__("pynvml")
        self.uuid, self.millijoules, self.supported = uuid, millijoules, True

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, board: str) -> int:
        if not self.supported:
            raise self.NVMLError("Not Supported")
        assert board == self.uuid
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"board-{device.index or 0}")
    )
    module = Nvml("GPU-board-1")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_gpu_is_found_by_its_uuid_and_counts_in_millijoules(nvml: Nvml) -> None:
    meter = Meter(energy_counters("cuda:1"))
    nvml.millijoules += 2500
    assert meter.joules() == 2.5


def test_a_counter_of_a_gpu_that_began_anew_leaves_no_energy(nvml: Nvml) -> None:
    meter = Meter(energy_counters("cuda:1"))
    nvml.millijoules = 10
    assert meter.joules() is None


def test_a_gpu_without_such_a_counter_has_no_energy(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert energy_counters("cuda:0") == ()  # another board than the one that NVML knows
    (counter,) = energy_counters("cuda:1")
    nvml.supported = False
    with pytest.raises(OSError, match=r"^the card does not tell its energy$"):
        counter.read()
    assert energy_counters("cuda:1") == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # cannot be imported
    assert energy_counters("cuda:1") == ()


def test_other_devices_have_no_counter_whatever_board_there_is(nvml: Nvml) -> None:
    nvml.uuid = "GPU-board-0"
    assert len(energy_counters("cuda")) == 1
    assert energy_counters("mps") == ()
