"""What ``attnbench score`` says of wrong options: in words of its command line, as ``compare`` does."""

from __future__ import annotations

from typing import Any

import pytest

from attnbench.cli.compare import question_of
from attnbench.cli.score import score
from attnbench.errors import UsageError


def said(variants: list[str], **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        score(variants, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "recal"}, "--task: unknown task 'recal'; did you mean 'recall'?"),
        ({"task": "recall:pear=4"}, "--task: recall: unknown option 'pear'; did you mean 'pairs'?"),
        ({"task": "zzz"}, "--task: unknown task 'zzz'; 'attnbench list tasks' shows the names"),
        ({"task": "no task"}, "--task: 'no task' is not a name; write at most 64 letters, digits, '.', '_' and '-'"),
        ({"n": 2**31}, "--n must lie between 1 and 1073741824, got 2147483648; write a number in between"),
        (
            {"test_n": "64,lots"},
            "--test-n must be whole numbers, got the text 'lots'; write 1024 or 1k or 512,1024 or "
            "1024..16384 (doubling) or 1024..4096+1024 (steps)",
        ),
        ({"test_n": "0"}, "--test-n must lie between 1 and 1073741824, got 0; write a number in between"),
        ({"batch": 2**21}, "--batch must lie between 1 and 1048576, got 2097152; write a number in between"),
        ({"heads": 2**21}, "--heads must lie between 1 and 1048576, got 2097152; write a number in between"),
        ({"head_dim": 2**21}, "--head-dim must lie between 1 and 1048576, got 2097152; write a number in between"),
        ({"steps": 10**8}, "--steps must be at most 10000000, got 100000000; change the number"),
        ({"layers": 5000}, "--layers must be at most 1000, got 5000; change the number"),
        ({"ffn": 2**21}, "--ffn must be at most 1048576, got 2097152; change the number"),
        ({"rates": "0.001,5"}, "--rates must be above 0 and at most 1, got 5; write 0.002, say"),
        ({"rates": "fast"}, "--rates must be above 0 and at most 1, got 'fast'; write 0.002, say"),
    ],
)
def test_an_option_that_cannot_be_is_named_as_it_was_typed(options: dict[str, Any], message: str) -> None:
    assert said(["linear"], **options) == message


@pytest.mark.parametrize("variant", ["perfomer", "performer:feature=8", "performer:features=0", "performer:features=x"])
def test_what_is_wrong_with_a_variant_is_said_as_compare_says_it(variant: str) -> None:
    with pytest.raises(UsageError) as error:
        question_of([variant, "softmax"], {}, ()).prepare()
    assert said([variant]) == str(error.value)


def test_a_device_that_does_not_exist_is_told_as_compare_tells_it() -> None:
    with pytest.raises(UsageError) as error:
        question_of(["linear", "softmax"], {"device": "gpu"}, ()).prepare()
    assert said(["linear"], device="gpu") == str(error.value)
