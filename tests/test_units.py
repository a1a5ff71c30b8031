from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.units import format_bytes, format_count, format_number, format_seconds, parse_bytes, parse_seconds

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
KIB, MIB, GIB = 1024, 1024**2, 1024**3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (1, "1.00 s"),
        (59.96, "60.0 s"),
        (3600, "3600 s"),
        (1e-3, "1.00 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.996e-3, "10.0 ms"),
        (99.96e-6, "100 µs"),
        (4.2e-7, "420 ns"),
        (3.2e-10, "3.2e-10 s"),
        (-0.5, "-500 ms"),
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_seconds_take_the_unit_that_leaves_three_digits(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1000 * KIB, "1000 KiB"),
        (MIB - 1, "1.00 MiB"),
        (13_328_448, "12.7 MiB"),
        (9.999 * MIB, "10.0 MiB"),
        (24 * GIB, "24.0 GiB"),
        (1024**6, "1024 PiB"),
        (-2 * KIB, "-2.00 KiB"),
        (0.5, "0.500 B"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_bytes_are_binary(count: float | None, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1.00k"),
        (999_400, "999k"),
        (999_600, "1.00M"),
        (7.0e13, "70.0T"),
        (1e15, "1.00P"),
        (1e21, "1000E"),
        (0.25, "0.250"),
        (None, "-"),
        (-math.inf, "-"),
    ],
)
def test_counts_are_decimal_and_small_ones_whole(count: float | None, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (4012.3, "4012"),
        (999.6, "1000"),
        (999.4, "999"),
        (0.86, "0.86"),
        (-2016.4, "-2016"),
        (6.4e-5, "6.4e-05"),
        (0, "0"),
    ],
)
def test_a_number_without_a_unit_has_no_exponent_above_1(number: float, text: str) -> None:
    assert format_number(number) == text


@few
@given(st.floats(1e-9, 1e4))
def test_a_formatted_time_is_within_half_a_percent_of_the_time(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    scale = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=5.1e-3)
    assert float(number) < 1000 or unit == "s"
    assert len(number.replace(".", "")) <= 3 or unit == "s"


@few
@given(st.integers(1, 2**60))
def test_a_formatted_size_reads_back_as_nearly_the_size(size: int) -> None:
    if size >= 1023 * 1024**4:  # sizes are parsed up to TiB
        size >>= 20
    # Half a unit of the last of three digits, and less than a byte of 1024 that is cut off.
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=5e-3 + 1 / 1024)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB),
        ("8G", 8 * GIB),
        ("8gb", 8 * GIB),
        (" 1.5 MiB ", 3 * MIB // 2),
        ("1000000", 1_000_000),
        ("512B", 512),
        ("2t", 2 * 1024**4),
        ("0.5K", 512),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "0", "0.4", "-1G", "8X", "8i", "8iB", "1e9", "8 G i B", "٣G", "1..5G", "8GG", "9" * 400, "nan", "inf"],
)
def test_what_is_no_positive_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10ms", 0.01), ("1.5 s", 1.5), ("250us", 250e-6), ("250 µs", 250e-6), ("250\u03bcs", 250e-6), (" 3NS ", 3e-9)],
)
def test_times_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "ms", "0s", "-1s", "1e3s", "10 min", "1s2", "1\u017f"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time such as 10ms"):
        parse_seconds(text)
