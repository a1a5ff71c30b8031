"""What NVML tells of a card, by a faked one: facts, throttled samples, energy, others on the card, and its silence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.measure import card
from attnbench.measure.card import NOT_TOLD, Board, Card, Clocked, after, facts, in_words
from attnbench.measure.time import EVERY, Sample, TimingRules, measure_time, summarise, why_throttled
from tests.measure.test_time import FakeClock, nothing

POWER_CAP, HEAT, IDLE, CHOSEN_CLOCKS = 0x4, 0x20, 0x1, 0x2


class Nvml(ModuleType):
    """One card at full speed. What it does not tell raises, as NVML does."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.clock, self.throttled, self.millijoules = 1980, IDLE, 0
        self.used, self.busy = 600 << 20, 0
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.nvmlMemory_v2 = 2

    def told(self, name: str, value: Any) -> Any:
        self.asked.append(name)
        if name in self.silent:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self) -> None:
        self.told("init", None)

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self.told("driver", "580.95.05")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return str(self.told("handle", uuid))

    def nvmlDeviceGetEnforcedPowerLimit(self, board: str) -> Any:
        return self.told("limit", 700_000)

    def nvmlDeviceGetMaxClockInfo(self, board: str, clock: int) -> Any:
        return self.told("highest", {1: 1980, 2: 3201}[clock])

    def nvmlDeviceGetClockInfo(self, board: str, clock: int) -> Any:
        return self.told("clock", {1: self.clock, 2: 3201}[clock])

    def nvmlDeviceGetTemperature(self, board: str, sensor: int) -> Any:
        return self.told("temperature", 41)

    def nvmlDeviceGetPowerUsage(self, board: str) -> Any:
        return self.told("power", 120_400)

    def nvmlDeviceGetCurrentClocksEventReasons(self, board: str) -> Any:
        return self.told("reasons", self.throttled)

    def nvmlDeviceGetTotalEnergyConsumption(self, board: str) -> Any:
        return self.told("energy", self.millijoules)

    def nvmlDeviceGetMemoryInfo(self, board: str, version: int | None = None) -> Any:
        return self.told("memory", SimpleNamespace(used=self.used if version else self.used + (1 << 30)))

    def nvmlDeviceGetUtilizationRates(self, board: str) -> Any:
        return self.told("rates", SimpleNamespace(gpu=self.busy))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="board"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_card_tells_what_it_is_and_how_it_runs(nvml: Nvml) -> None:
    told = facts("cuda:0")
    assert told == {
        "driver": "580.95.05",
        "power_limit_w": 700.0,
        "highest_sm_clock_mhz": 1980,
        "highest_memory_clock_mhz": 3201,
        "before": {
            "sm_clock_mhz": 1980,
            "memory_clock_mhz": 3201,
            "temperature_c": 41,
            "power_w": 120.4,
            "throttled": "",
        },
    }


@pytest.mark.parametrize("silent", ["driver", "limit", "highest", "clock", "temperature", "power", "reasons"])
def test_a_field_that_a_card_does_not_have_is_absent_and_the_others_are_there(nvml: Nvml, silent: str) -> None:
    whole = facts("cuda")
    nvml.silent = {silent}
    less = facts("cuda")
    assert len(less) + len(less["before"]) < len(whole) + len(whole["before"]) or silent == "reasons"
    assert less["before"]["throttled"] == ""


@pytest.mark.parametrize("missing", ["package", "library", "card", "of another maker", "cpu"])
def test_without_nvml_facts_are_absent_and_nothing_is_raised(
    missing: str, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cpu" if missing == "cpu" else "cuda:0"
    said: str | None = None
    if missing == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
        said = NOT_TOLD
    elif missing == "of another maker":
        monkeypatch.setitem(sys.modules, "pynvml", None)
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        nvml.silent = {"init" if missing == "library" else "handle"}
    assert (facts(device), Card.of(device), card.warning(device)) == ({}, None, said)
    assert NOT_TOLD.count("\n") == 0
    assert "attnbench[gpu]" in NOT_TOLD


def test_an_old_package_has_another_name_for_why_a_card_throttles(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Nvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(
        Nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda self, board: HEAT | IDLE, raising=False
    )
    assert facts("cuda")["before"]["throttled"] == "heat"


def test_idle_cards_and_chosen_clocks_do_not_throttle_but_the_power_cap_does() -> None:
    assert why_throttled(IDLE | CHOSEN_CLOCKS | 0x10 | 0x100) == ""
    assert why_throttled(POWER_CAP | 0x8 | HEAT | 0x40 | 0x80) == "power cap, slowdown by hardware, heat, power brake"


def test_the_extremes_of_all_looks_and_the_last_one_are_kept() -> None:
    told = {"driver": "1", "before": {"sm_clock_mhz": 345}}
    told = after(told, {"sm_clock_mhz": 1980, "temperature_c": 50, "throttled": ""})
    told = after(told, {"sm_clock_mhz": 1500, "temperature_c": 70, "throttled": "power cap"})
    told = after(told, {"sm_clock_mhz": 1800, "throttled": "heat, power cap"})
    assert told["before"] == {"sm_clock_mhz": 345}
    assert told["during"] == {"sm_clock_mhz": [1500, 1980], "temperature_c": [50, 70], "throttled": "power cap, heat"}
    assert in_words("card", told) == [
        ("card", "driver 1"),
        ("card before", "sm clock 345 MHz"),
        ("card during", "sm clock 1500 to 1980 MHz, temperature 50 to 70 °C, throttled power cap, heat"),
        ("card after", "sm clock 1800 MHz, throttled heat, power cap"),
    ]


@pytest.mark.parametrize(("used", "busy", "is_shared"), [(600 << 20, 0, False), (3 << 30, 0, True), (0, 87, True)])
def test_what_others_hold_and_do_on_the_card_is_a_warning(nvml: Nvml, used: int, busy: int, is_shared: bool) -> None:
    nvml.used, nvml.busy = used, busy
    said = card.warning("cuda:0")
    assert (said is not None) == is_shared
    if said:
        assert f"keep it busy {busy} % of the time" in said
        assert used != 3 << 30 or "hold 3.00 GiB of its memory" in said
    nvml.silent = {"memory", "rates"}
    assert card.warning("cuda:0") is None


# Samples


def at(sm_mhz: int | None = 1980, throttled: int = 0, seconds: float = 1.0) -> Sample:
    return Sample(seconds, 1, waited=0.0, sm_mhz=sm_mhz, throttled=throttled)


def test_throttled_samples_and_those_at_a_lower_clock_are_left_out_with_the_reason() -> None:
    good, hot, slow = [at()] * 16, [at(throttled=HEAT, seconds=9.0)] * 2, [at(1919, seconds=9.0)] * 2
    found = summarise([[*good, *hot], slow])
    assert (found.median, found.used) == (1.0, 16)
    assert found.warnings == ("the card throttled: heat (4 of 20 samples, left out)",)
    found = summarise([[*good, *slow]])
    assert found.used == 16
    assert found.warnings == ("the clock of the card fell to 1919 of 1980 MHz (2 of 18 samples, left out)",)
    assert summarise([[at(1921, seconds=2.0), *good]]).used == 17  # 3 % below is not more than 3 %


def test_a_few_left_out_are_counted_without_a_warning() -> None:
    found = summarise([[*[at()] * 19, at(throttled=POWER_CAP, seconds=9.0)]])
    assert (found.median, found.used, found.warnings) == (1.0, 19, ())


@pytest.mark.parametrize("throttled", [11, 20])
def test_a_card_that_throttles_in_most_samples_is_as_fast_as_that(throttled: int) -> None:
    samples = [*[at(1500, POWER_CAP, seconds=1.1)] * throttled, *[at(seconds=1.0)] * (20 - throttled)]
    found = summarise([samples])
    assert (found.median, found.used) == (1.1, 20)
    said = f"the card throttled: power cap ({throttled} of 20 samples, which count: so fast is it under this load)"
    assert found.warnings == (said,)
    half = summarise([[*[at(throttled=POWER_CAP, seconds=9.0)] * 10, *[at()] * 10]])
    assert (half.median, half.used) == (1.0, 10)


def test_samples_without_a_card_are_as_before() -> None:
    plain = Sample(1.0, 1, waited=0.0)
    assert plain.to_json() == {"seconds": 1.0, "calls": 1, "switches": 0, "waited": 0.0}
    throttled = at(throttled=POWER_CAP)
    assert Sample(**throttled.to_json()) == throttled


class Scripted(Card):
    """A card that tells a clock and bits for each reading."""

    def __init__(self, *readings: tuple[int, int], apart: float = EVERY) -> None:
        self.readings, self.apart, self.since = list(readings), apart, list[float]()

    def begin(self, call: Callable[[], object], calls: int) -> None:
        pass

    def read(self, since: float) -> Clocked:
        self.since.append(since)
        return Clocked(*(self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]))


def test_samples_get_the_worse_of_two_readings_and_readings_are_as_far_apart_as_they_must() -> None:
    pace = Scripted((1980, 0), (1980, POWER_CAP), (1900, 0), (1950, 0), apart=0.02)
    rules = TimingRules(min_time=0.06, min_samples=6, max_samples=6)
    taken = measure_time(nothing, rules, stopwatch=FakeClock(seconds=0.01), pace=pace).samples
    assert [(one.sm_mhz, one.throttled) for one in taken] == [
        *[(1980, POWER_CAP)] * 2,
        *[(1900, POWER_CAP)] * 2,
        *[(1900, 0)] * 2,
    ]
    assert pace.since == pytest.approx([0.0, 0.02, 0.02, 0.02])


@pytest.fixture
def _never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "attnbench.measure.time.Standstill", lambda: SimpleNamespace(between=lambda *_: False, waited=0.0)
    )


@pytest.mark.usefixtures("_never_waits")
def test_for_samples_that_the_card_slowed_others_are_taken() -> None:
    rules = TimingRules(min_time=0.2, min_samples=20, max_samples=1000)
    slow = [(1980, 0), *[(1980, POWER_CAP)] * 5, (1980, 0)]
    taken = measure_time(nothing, rules, stopwatch=FakeClock(), pace=Scripted(*slow)).samples
    assert sum(bool(one.throttled) for one in taken) == 6
    assert len(taken) == 26
    always = measure_time(nothing, rules, stopwatch=FakeClock(), pace=Scripted((1980, POWER_CAP))).samples
    assert len(always) == 20  # its speed under this load, so none is waited for


# Energy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the clock shows."""
    now = [0.0]
    monkeypatch.setattr(card, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("seconds", [3e-5, 2e-3, 0.03, 0.7, 6.0])
@pytest.mark.parametrize("tick", [0.02, 0.1])
def test_the_energy_of_a_call_is_known_to_a_tenth_however_long_it_is(
    seconds: float, tick: float, nvml: Nvml, clock: list[float]
) -> None:
    found = Card.of("cuda:0", energy=True)
    assert found is not None
    nvml.millijoules = round(500e3 * 0.01)

    def call() -> None:
        clock[0] += seconds
        nvml.millijoules = round(500e3 * (0.01 + clock[0] // tick * tick))

    found.begin(call, max(1, round(1e-3 / seconds)))
    assert found.joules == pytest.approx(500 * seconds, rel=0.1)
    assert clock[0] < max(0.5, 4 * seconds + 1.2)


@pytest.mark.parametrize("why", ["not asked for", "no counter", "it stands still", "it goes away"])
def test_without_a_counter_that_moves_a_call_has_no_energy(why: str, nvml: Nvml, clock: list[float]) -> None:
    made, found = [0], Card.of("cuda:0", energy=why != "not asked for")
    assert found is not None
    if why == "no counter":
        nvml.silent = {"energy"}

    def call() -> None:
        made[0] += 1
        clock[0] += 0.01
        if why != "it stands still":
            nvml.millijoules += 5
        if why == "it goes away" and clock[0] > 0.1:
            nvml.silent = {"energy"}

    found.begin(call, 1)
    assert found.joules is None
    assert (made[0] > 0) == (why in ("it stands still", "it goes away"))
    assert clock[0] < 2.1


def test_calls_for_the_energy_come_before_the_samples(nvml: Nvml, clock: list[float]) -> None:
    class Counts(Scripted):
        def begin(self, call: Callable[[], object], calls: int) -> None:
            assert calls == 1
            seen.append(len(watch.asked))

    seen, watch = list[int](), FakeClock()
    rules = TimingRules(min_time=0.05, min_samples=5, max_samples=5, warmup_time=0, warmup_calls=0)
    measure_time(nothing, rules, stopwatch=watch, pace=Counts((1980, 0)))
    assert (seen, watch.asked) == ([1], [1] * 6)


def test_a_slow_nvml_is_read_seldom(nvml: Nvml, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Card.of("cuda:0")

    def slow(self: Nvml, board: str) -> int:
        clock[0] += 0.004
        return 0

    monkeypatch.setattr(Nvml, "nvmlDeviceGetCurrentClocksEventReasons", slow)
    late = Card.of("cuda:0")
    assert quick is not None
    assert late is not None
    assert (quick.apart, late.apart) == (EVERY, pytest.approx(0.04))


@pytest.mark.cuda
def test_a_card_at_work_tells_its_clock_and_its_power() -> None:
    if Board.of("cuda") is None:
        pytest.skip("needs nvidia-ml-py")
    found = facts("cuda")
    assert found["driver"]
    assert 0 < found["before"]["sm_clock_mhz"] <= found["highest_sm_clock_mhz"]
    watching = Card.of("cuda", energy=True)
    assert watching is not None
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    from attnbench.measure.cuda_events import CudaEvents

    rules = TimingRules(min_time=1.0, max_time=2.0)
    timing = measure_time(lambda: x @ x, rules, stopwatch=CudaEvents("cuda"), pace=watching)
    assert all(sample.sm_mhz for sample in timing.samples)
    assert watching.joules is not None
    watts = watching.joules / summarise([timing.samples]).median
    assert 0.2 < watts / found["power_limit_w"] < 1.3
