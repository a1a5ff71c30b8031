from __future__ import annotations

import pytest

from attnbench.catalogue.tasks.duplication import Duplication
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported


def test_each_label_is_the_next_token_of_the_second_half() -> None:
    examples = Duplication(Shape(seq_len=20, causal=True), symbols=5).batch(0, 0, 30)
    assert examples.tokens[:, :10].equal(examples.tokens[:, 10:])
    assert (examples.tokens[:, 0] == 0).all()
    assert (examples.tokens[:, 1:10] > 0).all()
    assert examples.labels[:, 10:-1].equal(examples.tokens[:, 11:] - 1)
    assert (examples.labels[:, :10] == NO_LABEL).all()
    assert (examples.labels[:, -1] == NO_LABEL).all()


def test_attention_that_sees_the_answer_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"^duplication predicts the next token; set causal: true$"):
        Duplication(Shape(seq_len=20))


@pytest.mark.parametrize("n", [2, 21])
def test_a_length_that_does_not_halve_is_refused(n: int) -> None:
    with pytest.raises(Unsupported, match="even length of at least 4"):
        Duplication(Shape(seq_len=n, causal=True))
