"""Tests that say again, at other sizes, what tests/test_contract.py holds every variant to, are slow ones."""

from __future__ import annotations

import re

import pytest

from attnbench.testing import LAWS

SAID_AGAIN = {
    "finite differences": "gradcheck|finite_differences",
    "tracing": "on_fake_tensors|runs_without_data|known_without_running",
    "gradient modes": "inference_mode_strides_and_batches",
    "padding": "gives_what_the_shorter_one_gives|padding_may_stand_anywhere|padded_keys_(are_as_if|change_nothing)",
    "causality": "do_not_depend_on_later_tokens|does_not_reach_earlier|with_any_later_token|later_tokens_change_no_bit",
    "large inputs": "(tokens|scores|logits)(_and_tiles_without_a_visible_key)?_stay_finite",
    "low precision": "(lower|half)_precision_(stays_close|inputs_are_summed|is_near_float64|is_finite_and_near)",
    "blind query": "(query|token)_that_sees_no_key_gives_zero|all_padding_gives_zero",
    "memory": "memory_grows_(with_the_length_(and|alone)|linearly$|no_faster_than_the_sequence$)|never_.*in_memory",
    "batch": "one_sequence_alone_equals_itself_in_a_batch",
}
"""By the law, words in the names of the tests."""

assert set(SAID_AGAIN) <= set(LAWS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    again = re.compile("|".join(SAID_AGAIN.values()))
    for item in items:
        if item.path.parent.name == "attention" and again.search(item.name.partition("[")[0]):
            item.add_marker(pytest.mark.slow)
