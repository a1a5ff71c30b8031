from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.contract.spec import comma_separated, parse_specs
from attnbench.errors import UsageError
from attnbench.harness.score.score_question import _several
from attnbench.harness.swap.swap_question import parse_layers, parse_steps
from attnbench.suite.expand import apply_overrides
from attnbench.suite.load import load_suite
from attnbench.suite.ranges import parse_range


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (7, [7]),
        ("7", [7]),
        ("512,1024", [512, 1024]),
        (" 512 , 1024 ", [512, 1024]),
        ("1024..16384", [1024, 2048, 4096, 8192, 16384]),
        ("1000..5000", [1000, 2000, 4000]),
        ("3..3", [3]),
        ("1..1", [1]),
        ("1024..4096+1024", [1024, 2048, 3072, 4096]),
        ("10..25+10", [10, 20]),
        ("0..3+1", [0, 1, 2, 3]),
        ("1k", [1024]),
        ("512, 2k,64k", [512, 2048, 65536]),
        ("2k..16k", [2048, 4096, 8192, 16384]),
        ("512..2k", [512, 1024, 2048]),
        ("1k..3k+1k", [1024, 2048, 3072]),
        ("5,8..16,1..3+1", [5, 8, 16, 1, 2, 3]),
        ([512, "1024..2048", "4096,8192"], [512, 1024, 2048, 4096, 8192]),
    ],
)
def test_a_range_stands_for_these_numbers(text: str | int | list[str | int], numbers: list[int]) -> None:
    assert parse_range(text) == numbers


@pytest.mark.parametrize(
    ("text", "whole", "several"),
    [
        ("1,024", 1024, "1, 024"),
        ("512,1,024", None, None),
        ("1,024..16,384", 1024, "1, 024"),
        ("512..16,384", 16384, "16, 384"),
        ("8,192", 8192, "8, 192"),
        ("1,500", 1500, "1, 500"),
        ("131,072", 131072, "131, 072"),
        ("1,048,576", 1048576, "1, 048, 576"),
    ],
)
def test_what_may_be_one_number_with_a_comma_is_refused_in_every_list(
    text: str, whole: int | None, several: str | None
) -> None:
    readers = [parse_range, parse_steps, parse_layers, _several]
    readers.append(lambda text: parse_specs(f"performer:features=[{text}]"))
    readers.append(lambda text: apply_overrides(load_suite("quick"), {"seq_len": text}))
    for read in readers:
        with pytest.raises(UsageError) as refused:
            read(text)
        if whole is not None:
            assert f"may be one number; write {whole}, or {several!r} if it is several" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["64,128", "64,128,256", "32,512", "16,128", "100,200", "512,1024", "1, 500", "0,100", "2,4,8,128", "1,8,128,512"],
)
def test_a_list_is_a_list(text: str) -> None:
    assert comma_separated(text) == text.replace(" ", "").split(",")


FORMS = "write 1024 or 1k or 512,1024 or 1024..16384 (doubling) or 1024..4096+1024 (steps)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16384..1024", "'16384..1024' runs downwards; write 1024..16384"),
        ("9..1+2", "'9..1+2' runs downwards; write 1..9+2"),
        ("0..8", "'0..8' doubles from 0; write 1..8 or steps such as 0..8+1"),
        ("1..8+0", "'1..8+0' has a step of 0; write a step of at least 1"),
        ("0..10000+1", "10001 values on one axis, at most 10000; use a larger step"),
        ("0..999999999999999999+1", "1000000000000000000 values on one axis, at most 10000; use a larger step"),
        ("lots", f"'lots' is not a number or a range; {FORMS}"),
        ("1,,2", f"'1,,2' is not a number or a range; {FORMS}"),
        ("", f"'' is not a number or a range; {FORMS}"),
        ("16k..1k", "'16k..1k' runs downwards; write 1k..16k"),
        ("k", f"'k' is not a number or a range; {FORMS}"),
        ("1 k", f"'1 k' is not a number or a range; {FORMS}"),
        ("1kk", f"'1kk' is not a number or a range; {FORMS}"),
        ("1.5k", f"'1.5k' is not a number or a range; {FORMS}"),
        ("1M", f"'1M' is not a number or a range; {FORMS}"),
        ("2**14", f"'2**14' is not a number or a range; {FORMS}"),
        ("-5", f"'-5' is not a number or a range; {FORMS}"),
        ("1...4", f"'1...4' is not a number or a range; {FORMS}"),
        ("٣", f"'٣' is not a number or a range; {FORMS}"),
        (-5, f"-5 is below 0; {FORMS}"),
        (True, f"True is not a whole number; {FORMS}"),
        ([1.5], f"1.5 is not a whole number; {FORMS}"),
        ([], f"no numbers; {FORMS}"),
        ([1] * 10_001, "10001 values on one axis, at most 10000; use a larger step"),
    ],
)
def test_what_is_no_range_is_refused_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_range(text)
    assert str(refused.value) == message


@given(st.integers(1, 2**38), st.integers(0, 20), st.integers(0, 2**20))
def test_doubling_holds_every_double_up_to_the_end_and_nothing_beyond(start: int, doublings: int, rest: int) -> None:
    end = start * 2**doublings + rest % (start * 2**doublings)
    numbers = parse_range(f"{start}..{end}")
    assert numbers == [start * 2**power for power in range(doublings + 1)]


@given(st.text(st.sampled_from("0123456789.,+-k ")) | st.text())
def test_any_text_is_a_list_of_numbers_or_refused(text: str) -> None:
    try:
        assert 0 < len(parse_range(text)) <= 10_000
    except UsageError as error:
        refused = str(error)
    else:
        refused = ""
    assert "\n" not in refused
