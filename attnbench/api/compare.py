"""Time variants in turn: ``attnbench.compare``."""

from __future__ import annotations

from typing import Unpack

from attnbench.api.arguments import check_importable
from attnbench.api.shown import Compared
from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import in_python


@in_python(options.CompareOptions)
def compare(*variants: str, progress: bool = True, **given: Unpack[options.CompareOptions]) -> Compared:
    """Time variants in turn at each length, in three processes or more, as ``attnbench compare`` does.

    Args:
        variants: one or more, with options in the text: ``"performer:features=512"``; at level ``layer`` or ``model``
            also a module of x, ``"model.py:Attention"``.
        progress: show a progress bar.
        **given: see below.

    Raises:
        UsageError: a variant or an option is wrong, or one variant is there twice.
    """
    from attnbench.cli.compare import question_of, watching

    question = question_of(variants, given, given.keys()).prepare()
    check_importable(cell.variant for cell in question.cells)
    with console.progress(len(question.lengths), wanted=progress) as bar:
        return Compared(question.answer(watching(bar, question.lengths)))
