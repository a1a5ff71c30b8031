from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.contract.spec import POSITIONAL, Scalar, Spec, format_scalar, parse_scalar, parse_spec, parse_specs
from attnbench.errors import UsageError

few = settings(max_examples=80, deadline=None, derandomize=True, database=None)

names = st.from_regex(r"[a-z][a-z0-9._-]{0,12}", fullmatch=True)
options = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
words = st.from_regex(r"[a-zA-Z/._-]{1,10}", fullmatch=True).map(parse_scalar)
scalars: st.SearchStrategy[Scalar] = st.one_of(
    st.booleans(),
    st.none(),
    st.integers(-(10**18), 10**18),
    st.floats(allow_nan=False, allow_infinity=False),
    words,
)
specs = st.builds(Spec.of, names, st.dictionaries(options, scalars, max_size=4))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("5.", 5.0),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("010", "010"),
        ("-010", "-010"),
        ("true", True),
        ("False", False),
        ("NULL", None),
        ("none", None),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("1e400", "1e400"),
        ("٣", "٣"),
        ("9" * 21, "9" * 21),
        ("", ""),
    ],
)
def test_a_bare_word_means_what_a_person_means(text: str, value: Scalar) -> None:
    parsed = parse_scalar(text)
    assert parsed == value
    assert type(parsed) is type(value)


@few
@given(scalars)
def test_a_scalar_reads_back_with_its_type(value: Scalar) -> None:
    again = parse_scalar(format_scalar(value))
    assert again == value
    assert type(again) is type(value)


@few
@given(st.text(max_size=12))
def test_writing_and_reading_a_parsed_word_again_changes_nothing(text: str) -> None:
    once = parse_scalar(text)
    assert parse_scalar(format_scalar(once)) == once


@few
@given(specs)
def test_a_label_reads_back_as_the_same_spec(spec: Spec) -> None:
    assert parse_spec(spec.label) == spec
    assert parse_spec({"name": spec.name, **dict(spec.options)}) == spec
    assert str(spec) == spec.label


@few
@given(names, st.dictionaries(options, st.lists(scalars, min_size=1, max_size=3), min_size=1, max_size=3))
def test_lists_expand_to_every_combination_in_both_ways_of_writing(name: str, lists: dict[str, list[Scalar]]) -> None:
    if "name" in lists:
        lists["name_"] = lists.pop("name")
    text = ",".join(f"{key}=[{','.join(map(format_scalar, values))}]" for key, values in lists.items())
    expanded = parse_specs({"name": name, **lists})
    assert parse_specs(f"{name}:{text}") == expanded
    count = 1
    for values in lists.values():
        count *= len(values)
    assert len(expanded) == count
    assert all(dict(spec.options)[key] in values for spec in expanded for key, values in lists.items())


def test_the_order_of_options_does_not_matter() -> None:
    assert parse_spec("performer:features=512,kernel=relu") == parse_spec("performer:kernel=relu,features=512")
    assert parse_spec("performer:kernel=relu,features=512").label == "performer:features=512,kernel=relu"


def test_a_value_without_a_name_stands_first_and_is_positional() -> None:
    spec = parse_spec("file:qkv.safetensors,layer=3")
    assert dict(spec.options) == {POSITIONAL: "qkv.safetensors", "layer": 3}
    assert spec.label == "file:qkv.safetensors,layer=3"


def test_spaces_around_options_are_not_part_of_them() -> None:
    assert parse_spec("  performer:features = 64 , kernel= relu ") == parse_spec("performer:features=64,kernel=relu")
    assert len(parse_specs("performer:features=[64, 128 ]")) == 2


def test_two_lists_in_one_text_give_the_product() -> None:
    labels = [spec.label for spec in parse_specs("performer:features=[64,256],kernel=[relu,exp]")]
    assert labels == [f"performer:features={f},kernel={k}" for f in (64, 256) for k in ("relu", "exp")]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("", "'' is not a name"),
        (":features=1", "'' is not a name"),
        ("per former", "'per former' is not a name"),
        ("../x", "is not a name"),
        ("x" * 65, "is not a name"),
        ({"features": 3}, "None is not a name"),
        ({"name": 3}, "3 is not a name"),
        ("performer:", "ends in ':'"),
        ("performer:features=1,features=2", "option 'features' is given twice"),
        ("performer:a=1,2", "'2' is not an option"),
        ("performer:a=[1,2", "'2' is not an option"),
        ("performer:a=[]", "option 'a' is an empty list"),
        ({"name": "performer", "a": []}, "option 'a' is an empty list"),
        ({"name": "performer", "a": {"b": 1}}, "option 'a' must be a number, word or true/false, got {'b': 1}"),
        ({"name": "performer", "a": [[1]]}, "option 'a' must be"),
        (3, "expected a name such as performer:features=256, got 3"),
        (None, "expected a name"),
        (["performer"], "expected a name"),
    ],
)
def test_what_is_not_a_name_with_options_is_refused_in_one_line(item: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_specs(item)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_one_is_wanted_several_are_refused() -> None:
    with pytest.raises(UsageError, match="give each option one value"):
        parse_spec("performer:features=[64,256]")
    assert parse_spec("performer:features=[64]").label == "performer:features=64"
