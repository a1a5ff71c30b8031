from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.errors import UsageError
from attnbench.suite.select import matches

LABEL = "speed/performer:features=64/n4096"


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("performer", True),
        ("PerFormer", True),
        ("features=64", True),
        ("n4096", True),
        ("linformer", False),
        ("not performer", False),
        ("not not performer", True),
        ("performer and not n4096", False),
        ("performer and n4096", True),
        ("linformer or performer", True),
        ("linformer or performer and n1024", False),
        ("(linformer or performer) and n4096", True),
        ("performer or linformer and n1024", True),
        ("not (linformer or n1024)", True),
        ("not linformer and not n1024", True),
        ("NOT linformer AND performer", True),
        ("((performer))", True),
        ("not(linformer)", True),
    ],
)
def test_an_expression_chooses(expression: str, chosen: bool) -> None:
    assert matches(expression, LABEL) is chosen


def test_case_of_the_label_does_not_matter() -> None:
    assert matches("bigbird", "BigBird/n8")


@pytest.mark.parametrize(
    "expression",
    [
        *("", "performer and", "not", "and performer", "a and or b", "()", "(performer", "performer linformer"),
        *("performer)", "performer (linformer)", "performer not linformer", "w0 == w0", "a, b"),
        *("(" * 300 + "a" + ")" * 300, "not " * 300 + "a", "not " * 100_000 + "a"),
    ],
)
def test_a_broken_expression_is_refused_in_one_line(expression: str) -> None:
    with pytest.raises(UsageError) as refused:
        matches(expression, LABEL)
    shown = expression if len(expression) <= 60 else expression[:59] + "…"
    what = "not words with and, or, not and parentheses"
    assert str(refused.value) == f"-k {shown!r}: {what}; write for instance 'performer and not n4096'"


def test_an_expression_may_nest_deeply() -> None:
    assert matches("not (" * 100 + "performer" + ")" * 100, LABEL)


WORDS = st.sampled_from(["and", "or", "not", "(", ")", "performer", "n4096", "x"])


@given(st.lists(WORDS, max_size=12).map(" ".join) | st.text())
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        assert matches(text, LABEL) in (True, False)
    except UsageError as error:
        refused = str(error)
    else:
        refused = ""
    assert "\n" not in refused


@given(st.lists(st.sampled_from(["performer", "x", "n4096", "y"]), min_size=1, max_size=6), st.data())
def test_an_expression_means_what_python_means(words: list[str], data: st.DataObject) -> None:
    text = words[0]
    for word in words[1:]:
        joint = data.draw(st.sampled_from([" and ", " or ", " and not ", " or not "]))
        text = f"({text})" if data.draw(st.booleans()) else text
        text = f"{text}{joint}{word}"
    names = {word: word in LABEL for word in words}
    assert matches(text, LABEL) == eval(text, {"__builtins__": {}}, names)  # words of this test only
