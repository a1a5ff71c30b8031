from __future__ import annotations

from attnbench.cli.show import prose


def test_a_paragraph_is_filled_anew() -> None:
    assert prose("one two three four\nfive", 14) == "one two three\nfour five"


def test_a_bullet_keeps_its_line_and_its_indentation() -> None:
    text = "Modes:\n- first one\n  goes on here\n- second\nafter"
    assert prose(text, 20) == "Modes:\n- first one goes on\n  here\n- second\nafter"


def test_errors_keep_a_line_each() -> None:
    text = "Raises:\n    UsageError: an option of\n        another mode.\n    Unsupported: too long."
    expected = (
        "Raises:\n    UsageError: an\n        option of\n        another mode.\n    Unsupported: too\n        long."
    )
    assert prose(text, 22) == expected


def test_markup_is_gone_and_what_it_marked_stays() -> None:
    assert (
        prose("``rank=3`` by :meth:`redraw` of :class:`~attnbench.contract.problem.shape.Shape`", 80)
        == "rank=3 by redraw of Shape"
    )


def test_empty_lines_separate_paragraphs() -> None:
    assert prose("a\n\n\nb", 80) == "a\n\nb"


def test_a_formula_without_spaces_is_not_cut() -> None:
    assert prose("see softmax_j(q_i·k_j/√D) here", 12) == "see\nsoftmax_j(q_i·k_j/√D)\nhere"


def test_a_shape_stays_on_one_line() -> None:
    assert prose("of q ``(B, H)`` to k", 9) == "of q\n(B, H) to\nk"
    assert prose("``" + "word " * 6 + "``", 14) == "word word word\nword word word"
