"""Masks of pairs: how they are written, and which keys each token sees."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from attnbench.contract.problem.mask import Mask, mask_of, masks_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible
from attnbench.errors import UsageError

Sees = Callable[[int, int], bool]

# Text, and whether token i sees key j beside what causality hides, written out pair by pair.
DEFINED: list[tuple[str, Sees]] = [
    ("none", lambda i, j: True),
    ("document:5", lambda i, j: i // 5 == j // 5),
    ("document:3+4", lambda i, j: (i // 7, i % 7 >= 3) == (j // 7, j % 7 >= 3)),
    ("document:100", lambda i, j: True),
    ("sliding:1", lambda i, j: i == j),
    ("sliding:4", lambda i, j: abs(i - j) < 4),
    ("sliding:99", lambda i, j: True),
]


def seen(text: str, sees: Sees, total: int, *, causal: bool) -> list[list[bool]]:
    return [[sees(i, j) and (j <= i or not causal) for j in range(total)] for i in range(total)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("start", [0, 6])
@pytest.mark.parametrize(("text", "sees"), DEFINED, ids=[text for text, _ in DEFINED])
def test_a_query_sees_the_keys_that_the_definition_names(text: str, sees: Sees, start: int, causal: bool) -> None:
    total = 17
    visible = Visible(causal, mask_of(text), start)
    expected = torch.tensor(seen(text, sees, total, causal=causal))[start:]
    found = visible.pairs(slice(0, total - start), slice(0, total), total, torch.device("cpu"))
    assert torch.equal(found, expected)
    spans = [visible.span(i, total) for i in range(total - start)]
    assert spans == [(row.index(True), total - row[::-1].index(True)) for row in expected.tolist()]
    share = expected.double().mean()
    if not start or causal or text != "none":
        shape = Shape(seq_len=total - start, q_start=start, causal=causal, mask=text)
        assert shape.density == pytest.approx(float(share))


@pytest.mark.parametrize("prefix", [1, 5, 30])
def test_a_prefix_is_seen_by_all_and_the_rest_by_what_follows(prefix: int) -> None:
    shape = Shape(seq_len=17, mask=f"prefix:{prefix}")
    assert shape.causal
    found = Visible.of(shape).pairs(slice(0, 17), slice(0, 17), 17, torch.device("cpu"))
    expected = torch.tensor([[j <= i or j < prefix for j in range(17)] for i in range(17)])
    assert torch.equal(found, expected)
    assert shape.density == pytest.approx(float(expected.double().mean()))


@pytest.mark.parametrize("text", ["none", "prefix:6", "document:3+4", "sliding:4"])
def test_ranges_of_queries_see_what_their_queries_see(text: str) -> None:
    visible = Visible(True, mask_of(text), 2)
    for a, b in itertools.combinations(range(16), 2):
        rows = visible.pairs(slice(a, b), slice(0, 18), 18, torch.device("cpu"))
        some, every = visible.seen_by_some(slice(a, b), 18), visible.seen_by_all(slice(a, b), 18)
        assert rows.any(0).nonzero().flatten().tolist() == list(range(some.start, some.stop))
        assert rows.all(0).nonzero().flatten().tolist() == list(range(every.start, every.stop))
        part = visible.pairs(slice(a, b), slice(3, 9), 18, torch.device("cpu"))
        assert torch.equal(part, rows[:, 3:9])


def test_a_query_sees_something_where_one_of_its_keys_is_real() -> None:
    visible = Visible(True, mask_of("sliding:3"))
    real = torch.tensor([[True, False, False, False, True, False]])
    assert visible.seeing(real, 6).flatten().tolist() == [True, True, True, False, True, True]


def test_causal_is_another_word_for_causality_and_not_another_cell() -> None:
    assert Shape(mask="causal") == Shape(causal=True)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("sliding:window=8", "sliding:8"),
        ({"name": "document", "lengths": "3+4"}, "document:3+4"),
        ({"name": "document", "lengths": "ragged"}, "document:ragged"),
        ("padded:ragged-7", "padded:ragged-7"),
        ("padded:512", "padded:512"),
        ({"name": "prefix", "length": 4}, "prefix:4"),
        ("none", "none"),
    ],
)
def test_a_mask_has_one_form(written: object, text: str) -> None:
    assert list(map(str, masks_of(written))) == [text]


def test_lists_are_several_masks() -> None:
    assert masks_of({"name": "sliding", "window": [4, 8]}) == [Mask("sliding", (4,)), Mask("sliding", (8,))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slide:4", "unknown mask 'slide'"),
        ("prefix", "takes its length and nothing else"),
        ("prefix:0", "length must be a whole number of at least 1"),
        ("prefix:3+4", "length must be a whole number of at least 1"),
        ("document:3+", "lengths must be whole numbers of at least 1 with [+] in between, or ragged"),
        ("document:3+0", "lengths must be whole numbers of at least 1 with [+] in between, or ragged"),
        ("padded:ragged-0", "lengths must be whole numbers of at least 1 with [+] in between, or ragged"),
        ("sliding:ragged", "window must be a whole number of at least 1"),
        ("padded", "takes its lengths and nothing else"),
        ("sliding:true", "window must be"),
        ("none:3", "takes no options"),
        ("sliding:window=3,step=2", "takes its window and nothing else"),
    ],
)
def test_a_mistake_is_refused_with_what_can_be_written(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mask_of(text)


@pytest.mark.parametrize("text", ["document:ragged", "document:ragged-3", "padded:ragged"])
def test_ragged_documents_add_up_to_any_number_of_tokens(text: str) -> None:
    for tokens in (1, 2, 23, 512, 16384):
        mask = mask_of(text).among(tokens)
        assert sum(mask.sizes) == tokens
        assert str(mask) == f"document:{'+'.join(map(str, mask.sizes))}"
        shape = Shape(seq_len=tokens, mask=text)
        assert Visible.of(shape).mask == mask
        assert shape.density == Shape(seq_len=tokens, mask=str(mask)).density


def test_a_seed_draws_the_same_shares_at_every_length() -> None:
    for seed in range(20):
        few, many = (mask_of(f"document:ragged-{seed + 1}").among(n).sizes for n in (4096, 65536))
        assert len(few) == len(many)
        assert all(abs(16 * a - b) <= 16 * len(few) for a, b in zip(few, many, strict=True))
        assert all(4096 // 64 <= size <= 4096 // 2 for size in few[:-1])
    assert len({mask_of(f"document:ragged-{seed}").among(4096).sizes for seed in range(1, 21)}) == 20


def test_padded_documents_are_the_same_pairs() -> None:
    assert mask_of("padded:3+4").among(14) == mask_of("document:3+4")
    assert Shape(seq_len=14, mask="padded:3+4").density == Shape(seq_len=14, mask="document:3+4").density


def test_the_first_query_may_stand_behind_the_first_key() -> None:
    shape = Shape(seq_len=4, q_start=12, causal=True)
    assert (shape.N, shape.M, shape.cross) == (4, 16, False)
    assert Shape(seq_len=4, kv_len=16, q_start=12, causal=True) == shape


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"seq_len": 4, "kv_len": 16, "causal": True}, "or set q_start to 12"),
        ({"seq_len": 4, "kv_len": 16, "mask": "sliding:2"}, "mask sliding:2 needs .* remove kv_len or mask"),
        ({"seq_len": 4, "q_start": 2}, "q_start does nothing without causality or a mask"),
        ({"seq_len": 4, "q_start": -1, "causal": True}, "at least 0, got -1"),
    ],
)
def test_places_that_make_no_sense_are_refused(sizes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Shape(**sizes)  # type: ignore[arg-type]  # of several types
