from __future__ import annotations

import pytest

from attnbench.catalogue.tasks.copy import Copy
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported


def test_blank_i_is_asked_for_symbol_i() -> None:
    examples = Copy(Shape(seq_len=64), symbols=5).batch(0, 0, 40)
    assert (examples.tokens[:, 32:] == 5).all()
    assert (examples.tokens[:, :32] < 5).all()
    assert examples.labels[:, 32:].equal(examples.tokens[:, :32])
    assert (examples.labels[:, :32] == NO_LABEL).all()


def test_places_after_the_last_blank_are_not_asked() -> None:
    examples = Copy(Shape(seq_len=9), count=3).batch(0, 0, 40)
    assert ((examples.labels != NO_LABEL).sum(0) > 0).tolist() == [False] * 3 + [True] * 3 + [False] * 3
    assert (examples.tokens[:, 3:] == 16).all()


@pytest.mark.parametrize(("n", "count"), [(8, 5), (1, None)])
def test_what_does_not_fit_is_refused(n: int, count: int | None) -> None:
    with pytest.raises(Unsupported, match="do not fit"):
        Copy(Shape(seq_len=n), count=count)
