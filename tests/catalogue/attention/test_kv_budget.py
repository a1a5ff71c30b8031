"""Budgets of keys: what stays and what is read is what loops over single tokens say, in groups of heads too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.kv_budget.prompt import AfterPrompt
from attnbench.catalogue.attention.selection.kv_budget.quest import Quest
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes, state_bytes
from tests.catalogue.attention.small import built, close

SHAPE = Shape(batch=2, heads=6, kv_heads=2, seq_len=19, head_dim=4, v_dim=3, causal=True)
G = SHAPE.G
PROMPT = 11
NAMES = ["quest", "snapkv", "h2o", "tova", "knorm", "keydiff", "expected-attention"]
EVICTING = NAMES[1:]
each = pytest.mark.parametrize("name", NAMES)
SMALL: dict[str, dict[str, Any]] = {"quest": {"page": 2}, "snapkv": {"window": 2, "pool": 3}}
"""Options beside a budget of 4."""


def qkv(shape: Shape = SHAPE, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (shape.B, shape.H, shape.N, shape.D),
        (shape.B, shape.K, shape.N, shape.D),
        (shape.B, shape.K, shape.N, shape.E),
    )
    q, k, v = (torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes)
    return 2 * q, k, v


def make(name: str, shape: Shape = SHAPE, **options: Any) -> AfterPrompt:
    if name == "expected-attention":  # it says so: values of another width than keys are refused
        shape = replace(shape, v_dim=None)
    return built(AfterPrompt, name, shape, **options).double()


def steps(module: Any, q: Tensor, k: Tensor, v: Tensor, prompt: int = PROMPT) -> Tensor:
    """What the module gives for the tokens behind the prompt, one by one."""
    state, outputs = module.begin(*(x[:, :, :prompt] for x in (q, k, v))), []
    for t in range(prompt, q.shape[2]):
        out, state = module.step(state, *(x[:, :, t : t + 1] for x in (q, k, v)))
        outputs.append(out)
    return torch.cat(outputs, 2)


def row(q: Tensor, k: Tensor, b: int, h: int, i: int) -> Tensor:
    """Probabilities of query i of head h for the keys up to it."""
    return torch.stack([q[b, h, i] @ k[b, h // G, j] / 2 for j in range(i + 1)]).softmax(0)


def best(worth: list[float], count: int, always: range = range(0)) -> set[int]:
    """The tokens in ``always``, and of the others those that are worth most, so many in all."""
    stays = sorted(always, reverse=True)[:count]
    others = sorted(set(range(len(worth))) - set(stays), key=lambda j: -worth[j])
    return {*stays, *others[: count - len(stays)]}


Kept = Callable[[Tensor, Tensor, int, int, int], set[int]]


def of_snapkv(q: Tensor, k: Tensor, b: int, head: int, count: int, window: int = 3, pool: int = 3) -> set[int]:
    prefix, worth = PROMPT - window, [0.0] * PROMPT
    for h in range(head * G, head * G + G):
        for i in range(prefix, PROMPT):
            for j, p in enumerate(row(q, k, b, h, i).tolist()):
                worth[j] += p / (G * window)
    smooth = [0.0] * PROMPT
    for j in range(prefix):
        near = [j + d for d in range(-(pool // 2), pool // 2 + 1)]
        smooth[j] = sum(worth[one] for one in near if 0 <= one < prefix) / pool
    return best(smooth, count, range(prefix, PROMPT))


def of_h2o(q: Tensor, k: Tensor, b: int, head: int, count: int) -> set[int]:
    worth = [0.0] * PROMPT
    for h in range(head * G, head * G + G):
        for i in range(PROMPT):
            for j, p in enumerate(row(q, k, b, h, i).tolist()):
                worth[j] += p
    return best(worth, count, range(PROMPT - count // 2, PROMPT))


def of_normalised_h2o(q: Tensor, k: Tensor, b: int, head: int, count: int) -> set[int]:
    worth = [0.0] * PROMPT
    for h in range(head * G, head * G + G):
        for i in range(PROMPT):
            for j, p in enumerate(row(q, k, b, h, i).tolist()):
                worth[j] += p / (PROMPT - j)
    return best(worth, count, range(PROMPT - 1, PROMPT))


def of_tova(q: Tensor, k: Tensor, b: int, head: int, count: int) -> set[int]:
    worth = [0.0] * PROMPT
    for h in range(SHAPE.H):
        for j, p in enumerate(row(q, k, b, h, PROMPT - 1).tolist()):
            worth[j] += p
    return best(worth, count, range(PROMPT - 1, PROMPT))


def of_knorm(q: Tensor, k: Tensor, b: int, head: int, count: int) -> set[int]:
    return best([-float(k[b, head, j].norm()) for j in range(PROMPT)], count)


def of_keydiff(q: Tensor, k: Tensor, b: int, head: int, count: int) -> set[int]:
    units = [k[b, head, j] / k[b, head, j].norm() for j in range(PROMPT)]
    mean = sum(units, torch.zeros(4, dtype=torch.float64)) / PROMPT
    return best([-float(one @ mean / mean.norm()) for one in units], count)


def by_hand(q: Tensor, k: Tensor, v: Tensor, kept: Kept, count: int) -> Tensor:
    """Behind the prompt, token by token: softmax over what was kept and what has come since."""
    out = torch.zeros(*q.shape[:2], q.shape[2] - PROMPT, v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            stays = sorted(kept(q, k, b, h // G, count))
            assert len(stays) == count
            for t in range(PROMPT, q.shape[2]):
                read = [*stays, *range(PROMPT, t + 1)]
                weights = torch.stack([q[b, h, t] @ k[b, h // G, j] / 2 for j in read]).softmax(0)
                out[b, h, t - PROMPT] = sum(w * v[b, h // G, j] for w, j in zip(weights, read, strict=True))
    return out


CASES: list[tuple[str, dict[str, Any], Kept, int]] = [
    ("snapkv", {"budget": 5, "window": 3, "pool": 3}, of_snapkv, 5),
    ("snapkv", {"budget": 2, "window": 3, "pool": 3}, of_snapkv, 2),
    ("h2o", {"budget": 5}, of_h2o, 5),
    ("h2o", {"ratio": 0.4, "recent": 1, "normalise": True}, of_normalised_h2o, 7),
    ("tova", {"budget": 4}, of_tova, 4),
    ("knorm", {"ratio": 0.5}, of_knorm, 6),
    ("keydiff", {"budget": 4}, of_keydiff, 4),
]


@pytest.mark.parametrize(("name", "options", "kept", "count"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_what_stays_is_what_a_loop_over_tokens_keeps(
    name: str, options: dict[str, Any], kept: Kept, count: int
) -> None:
    for seed in range(2):
        inputs = qkv(seed=seed)
        expected = by_hand(*inputs, kept, count)
        close(steps(make(name, **options), *inputs), expected)
        close(make(name, prompt=PROMPT, **options)(*inputs)[:, :, PROMPT:], expected)


def test_expected_attention_keeps_what_a_normal_query_would_attend_to_by_the_size_of_its_value() -> None:
    q, k, v = qkv(seed=3)

    def kept(q: Tensor, k: Tensor, b: int, head: int, count: int) -> set[int]:
        worth = torch.zeros(PROMPT, dtype=torch.float64)
        for h in range(head * G, head * G + G):
            asked = q[b, h, :PROMPT]
            mean = sum(asked, torch.zeros(4, dtype=torch.float64)) / PROMPT
            shares = []
            for key in k[b, head, :PROMPT]:
                variance = sum(float((one - mean) @ key) ** 2 for one in asked) / PROMPT
                shares.append(float(mean @ key) / 2 + variance / 8)
            worth += torch.tensor(shares, dtype=torch.float64).softmax(0) / G
        return best([float(w * v[b, head, j].norm()) for j, w in enumerate(worth)], count)

    expected = by_hand(q, k, v, kept, 4)
    close(steps(make("expected-attention", budget=4), q, k, v), expected)
    close(make("expected-attention", budget=4, prompt=PROMPT)(q, k, v)[:, :, PROMPT:], expected)


def test_the_expected_exponential_is_that_of_normal_queries() -> None:
    """The mean of exp(q·k/√D) over many normal q is what the score of k says, but for a factor of all keys."""
    module, drawn = make("expected-attention"), torch.randn(1, 1, 200_000, 4, dtype=torch.float64)
    k = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    q = 0.5 * drawn + 0.2
    score = module.scores(q, torch.cat([k, k.new_zeros(1, 1, 200_000 - 3, 4)], 2), None)[0, 0]  # type: ignore[operator]
    mean = (q[0, 0] @ k[0, 0].mT / 2).exp().mean(0)
    torch.testing.assert_close(score[:3] / score[0], mean / mean[0], rtol=0.02, atol=0)


def pages_by_hand(q: Tensor, k: Tensor, v: Tensor, page: int, count: int) -> Tensor:
    out = torch.zeros(*q.shape[:2], q.shape[2] - PROMPT, v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        for head in range(k.shape[1]):
            for t in range(PROMPT, q.shape[2]):
                own, worth = t // page, []
                for number in range(own):
                    keys = k[b, head, number * page : (number + 1) * page]
                    total = 0.0
                    for h in range(head * G, head * G + G):
                        for c in range(4):
                            total += max(float(q[b, h, t, c] * end) for end in (keys[:, c].min(), keys[:, c].max()))
                    worth.append(total)
                chosen = {own, *sorted(range(own), key=lambda one: -worth[one])[: count - 1]}
                read = [j for j in range(t + 1) if j // page in chosen]
                for h in range(head * G, head * G + G):
                    weights = torch.stack([q[b, h, t] @ k[b, head, j] / 2 for j in read]).softmax(0)
                    out[b, h, t - PROMPT] = sum(w * v[b, head, j] for w, j in zip(weights, read, strict=True))
    return out


@pytest.mark.parametrize(("page", "budget", "count"), [(3, 6, 2), (2, 5, 3), (4, 1, 1), (1, 4, 4)])
def test_quest_reads_the_pages_that_a_loop_over_tokens_reads(page: int, budget: int, count: int) -> None:
    inputs = qkv(seed=page)
    expected = pages_by_hand(*inputs, page, count)
    close(steps(make("quest", budget=budget, page=page), *inputs), expected)
    close(make("quest", budget=budget, page=page, prompt=PROMPT)(*inputs)[:, :, PROMPT:], expected)


def test_a_full_cache_of_quest_grows_with_its_bounds() -> None:
    inputs = qkv(seed=5)
    module = make("quest", replace(SHAPE, seq_len=PROMPT), budget=6, page=3)
    close(steps(module, *inputs), pages_by_hand(*inputs, 3, 2))


# The bound


def adversarial() -> dict[str, tuple[Tensor, Tensor]]:
    """Queries and keys of one head whose signs, sizes and ties are unkind to a bound."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 40, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    large = torch.tensor([-1e3, *[1.0] * 7]).double()
    alternating = torch.where(torch.arange(8) % 2 == 0, 1.0, -1.0).double()
    return {
        "random": (q, k),
        "all negative": (-q.abs(), -k.abs()),
        "opposite": (q.abs(), -k.abs()),
        "mixed signs": (q.abs() * alternating, k.abs() * alternating.flip(0)),
        "one large channel": (q * large.abs(), k * large),
        "equal keys": (q, k[:, :, :1].expand(-1, -1, 40, -1)),
        "zeros": (torch.zeros_like(q), k),
    }


def worst_excess(module: Quest, q: Tensor, k: Tensor, page: int) -> float:
    """The largest amount by which a key of a page is beyond the bound of the page."""
    pages = k.unflatten(2, (-1, page))
    bound = module.bounds(q, pages.amin(3), pages.amax(3))
    largest = (q @ k.mT).unflatten(-1, (-1, page)).amax(-1)
    return float((largest - bound).max() / largest.abs().max().clamp(min=1))


@pytest.mark.parametrize("kind", adversarial())
@pytest.mark.parametrize("page", [1, 4, 8])
def test_no_key_is_beyond_the_bound_of_its_page(kind: str, page: int) -> None:
    module = make("quest", page=page)
    assert isinstance(module, Quest)
    assert worst_excess(module, *adversarial()[kind], page) <= 1e-12


# Groups and batches


@each
def test_a_group_reads_the_same_keys_and_groups_read_others_but_for_tova(name: str) -> None:
    q, k, v = qkv()
    read = make(name, budget=4, **SMALL.get(name, {})).keys_read(q, k, v, PROMPT)
    assert read.shape == (2, 2, 8, 19)
    assert torch.equal(read[:, 0], read[:, 1]) == (name == "tova")


@each
def test_other_queries_of_another_group_change_nothing_but_in_tova(name: str) -> None:
    q, k, v = qkv()
    module = make(name, budget=4, **SMALL.get(name, {}))
    before = module.keys_read(q, k, v, PROMPT)[:, 0]
    q[:, G:] = qkv(seed=9)[0][:, G:]
    assert torch.equal(module.keys_read(q, k, v, PROMPT)[:, 0], before) != (name == "tova")


# What is lost, and what it costs


@each
def test_without_a_budget_to_keep_every_step_is_exact(name: str) -> None:
    inputs = qkv()
    expected = exact_attention(*inputs, causal=True)[:, :, PROMPT:]
    for options in ({"ratio": 0.0}, {"budget": 64}):
        close(steps(make(name, **options), *inputs), expected)


@pytest.mark.parametrize("name", EVICTING)
def test_a_cache_holds_the_budget_and_what_is_new(name: str) -> None:
    q, k, v = qkv()
    state = make(name, budget=4).begin(*(x[:, :, :PROMPT] for x in (q, k, v)))  # type: ignore[operator]
    assert state_bytes(state) == 2 * 2 * (4 + 19 - PROMPT) * (4 + 3) * 8


def test_quest_keeps_all_and_two_bounds_a_page() -> None:
    q, k, v = qkv()
    state = make("quest", budget=4, page=4).begin(*(x[:, :, :PROMPT] for x in (q, k, v)))  # type: ignore[operator]
    assert state_bytes(state) == 2 * 2 * (20 * (4 + 3) + 2 * 5 * 4) * 8


@each
def test_no_step_repeats_keys_for_the_heads_that_share_them(name: str) -> None:
    shape = Shape(batch=1, heads=8, kv_heads=1, seq_len=2048, head_dim=32, causal=True)
    q, k, v = (x.float() for x in qkv(shape))
    module = build(name, shape, budget=1024)
    token = [x[:, :, -1:] for x in (q, k, v)]
    with torch.inference_mode():
        state = module.begin(*(x[:, :, :-1] for x in (q, k, v)))  # type: ignore[operator]
        peak = peak_tensor_bytes(lambda: module.step(state, *token))  # type: ignore[operator]
    assert peak is not None
    assert peak < 3 * k.nbytes


@each
def test_how_many_are_kept_is_told_in_tokens(name: str) -> None:
    assert make(name).tokens_kept(10_000) == 256
    assert make(name, budget=100).tokens_kept(64) == 64
    assert make(name, ratio=0.75).tokens_kept(1024) == 256
    assert make(name, ratio=0.0).tokens_kept(1000) == 1000


def test_pages_are_kept_as_a_whole() -> None:
    assert make("quest", budget=100).tokens_kept(1000) == 112
