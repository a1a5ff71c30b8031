from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from attnbench.contract.inputs import INPUTS, draw_qkv, register_input
from attnbench.contract.problem.padding import real_tokens
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import exact_attention, masked_attention, mean_of_visible
from attnbench.contract.problem.shape import Bias, Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import Visible
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, No, Traits, register
from attnbench.errors import AttnbenchError, BrokenContract, Unsupported, UsageError
from attnbench.laws import exact_error
from attnbench.laws.exact_error import ErrorResult, hold_rows, measure_error
from attnbench.suite.cell import Cell

SHAPE = Shape(2, 2, 12, 8)
SOFTMAX, OTHER = Traits(target="softmax"), Traits(target="other")
STEPS = replace(SOFTMAX, decode=True, shares="by itself")


class Exact(nn.Module):
    """Softmax in the dtype it is given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.causal = shape.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return exact_attention(q, k, v, causal=self.causal).to(q.dtype)


class Biased(Exact):
    """Softmax with the bias of the shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.position_bias = position_bias(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return exact_attention(q, k, v, causal=self.causal, bias=self.position_bias).to(q.dtype)


class Scaled(Exact):
    """Exact attention times a factor."""

    def __init__(self, shape: Shape, *, factor: Annotated[float, Field(description="factor")] = 1.5) -> None:
        super().__init__(shape)
        self.factor = factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q, k, v) * self.factor


class Noisy(Exact):
    """Exact attention times a factor drawn in the constructor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("factor", 1 + torch.rand(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q, k, v) * self.factor


class Mean(Exact):
    """Mean of the visible values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return mean_of_visible(v, q.shape[2], causal=self.causal).to(q.dtype)


class Broken(Exact):
    """Infinite in the draws whose first random number is above 0.7."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("infinite", torch.rand(()) > 0.7)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return v.masked_fill(self.infinite, float("inf"))


class Padded(Exact):
    """Exact for real tokens, with nonsense in the rows of padded ones."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out = exact_attention(q, k, v, causal=self.causal, key_mask=key_mask).to(q.dtype)
        alike = key_mask is not None and key_mask.shape[1] == q.shape[2]
        return out.masked_fill(~key_mask[:, None, :, None], 1e3) if alike else out


class Typed(Exact):
    """Exact in the dtype of its parameter, which is that of q."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        assert self.one.dtype == q.dtype
        return super().forward(q, k, v) * self.one


class Masked(Exact):
    """Softmax over what each query may see."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.visible = Visible.of(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return exact_attention(q, k, v, causal=self.visible)


class Wide(Exact):
    """Exact with the bias and the sink of the shape, in float64 whatever it is given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.position_bias, self.sink = position_bias(shape), sink_of(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        sink = None if self.sink is None else self.sink.logit
        return exact_attention(q, k, v, causal=self.causal, bias=self.position_bias, sink=sink)


class Listing(Exact):
    """Its answer is in a list."""

    def forward(self, *inputs: Tensor, key_mask: Tensor | None = None) -> Any:
        return [super().forward(*inputs)]


class Stepwise(Exact):
    """Exact, for one token after the other."""

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.prompt = k.shape[2]
        return k, v

    def step(self, state: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        k, v = torch.cat((state[0], k), 2), torch.cat((state[1], v), 2)
        return self.answer(q, k, v), (k, v)

    def answer(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exact_attention(q, k, v).to(q.dtype)


class Ahead(Stepwise):
    """Sees what comes later, if it is asked to."""

    def __init__(self, shape: Shape, *, ahead: Annotated[bool, Field(description="ahead")] = False) -> None:
        super().__init__(shape)

    @classmethod
    def claims(cls, traits: Traits, options: Any) -> Traits:
        return replace(traits, causal=No("it looks ahead")) if options["ahead"] else traits


class Drifting(Stepwise):
    """Wrong by one percent more with each step."""

    def answer(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().answer(q, k, v) * (1 + 0.01 * (k.shape[2] - self.prompt))


class Forgetful(Stepwise):
    """Steps that read every third key, from another one on in each head of keys, and calls that keep the first key."""

    def pairs_by_place(self, keys: int, device: torch.device) -> Any:
        return Columns((1, 1, keys, keys))

    def tokens_kept(self, prompt: int) -> int:
        return prompt // 3

    def keys_read(self, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
        at = torch.arange(k.shape[2]) + torch.arange(k.shape[1])[:, None]
        return (at % 3 == 0)[:, None].expand(k.shape[0], k.shape[1], k.shape[2] - prompt, -1)


class Columns:
    """Each query keeps the first keys alone."""

    def __init__(self, size: tuple[int, int, int, int], first: int = 1) -> None:
        self.all = torch.zeros(size, dtype=torch.bool)
        self.all[..., :first] = True

    def pairs(self, queries: slice) -> Tensor:
        return self.all[:, :, queries]


class FirstKeys(Exact):
    """Chooses the first key, and two where some are padding."""

    def select(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Columns:
        return Columns((*q.shape[:3], k.shape[2]), 1 if key_mask is None else 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Columns) -> Tensor:
        raise AssertionError


class Blind(Exact):
    """Its first key is fixed by its place."""

    def pairs_by_place(self, keys: int, device: torch.device) -> Columns:
        assert device.type == "cpu"
        return Columns((1, 1, keys, keys))


class Twice(nn.Module):
    """Twice what another module gives."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = other

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.other(*inputs)
        return 2 * out


def one_random(part: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """An input of which q, k or v is drawn, by its number, and the rest is the same whatever the seed."""

    def draw(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """One of three is drawn."""
        size = shape.B, shape.H, shape.N, shape.D
        parts = [torch.linspace(-1, 1, math.prod(size)).view(size) + number for number in range(3)]
        parts[part] = torch.randn(size, generator=generator)
        return parts[0], parts[1], parts[2]

    return draw


class Never(nn.Module):
    """Must not be run."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, *inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        raise AssertionError


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(exact_error._kept_problem, "_results", OrderedDict())  # what other tests drew
    VARIANTS._filled()  # all that there are, lest they be registered while the table is another one
    monkeypatch.setattr(VARIANTS, "_entries", {})
    monkeypatch.setattr(INPUTS, "_entries", dict(INPUTS._filled()))
    for name, cls, traits in (
        ("exact", Exact, Traits(exact=True)),
        ("biased", Biased, Traits(exact=True, bias=True)),
        ("deaf", Exact, Traits(exact=True, bias=True)),
        ("scaled", Scaled, SOFTMAX),
        ("noisy", Noisy, Traits(target="softmax", stochastic=True)),
        ("mean", Mean, SOFTMAX),
        ("elsewhere", Scaled, OTHER),
        ("broken", Broken, SOFTMAX),
        ("padded", Padded, Traits(exact=True)),
        ("typed", Typed, Traits(exact=True)),
        ("masked", Masked, Traits(exact=True, mask=True, q_start=True)),
        ("wide", Wide, Traits(exact=True, bias=True, sink=True)),
        ("listing", Listing, Traits(exact=True)),
        ("stepwise", Stepwise, replace(STEPS, exact=True)),
        ("ahead", Ahead, STEPS),
        ("drifting", Drifting, STEPS),
        ("forgetful", Forgetful, STEPS),
        ("first-keys", FirstKeys, SOFTMAX),
        ("blind", Blind, SOFTMAX),
        ("fitted", Never, Traits(target="learned", causal=No("the future is in it"))),
    ):
        register(name, family="exact", source="", formula="", cost="", traits=traits)(cls)
    register("mixer", family="mixing", source="", formula="", cost="", kind="mixer", traits=OTHER)(Never)

    @register_input("fixed")
    def fixed(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The same whatever the seed."""
        q, k, v = torch.linspace(-1, 1, 3 * shape.B * shape.H * shape.N * shape.D).sin().chunk(3)
        size = shape.B, shape.H, shape.N, shape.D
        return q.view(size), k.view(size), v.view(size)

    @register_input("coin")
    def coin(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """One of two, by the seed."""
        q, k, v = fixed(shape, generator)
        return q * (1 if torch.rand((), generator=generator) < 0.5 else 2), k, v

    @register_input("tiny")
    def tiny(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Values whose squares a float32 cannot hold."""
        q, k, v = fixed(shape, generator)
        return q, k, v * 1e-20

    for part, name in enumerate("qkv"):
        register_input(f"random-{name}")(one_random(part))
    return


def measured(
    variant: str, shape: Shape = SHAPE, *, inputs: str = "gaussian", draws: int = 3, **given: Any
) -> ErrorResult:
    one = Cell("s", "w", parse_spec(variant), shape, inputs=parse_spec(inputs), error_draws=draws, **given)
    return measure_error(one)


def test_an_exact_variant_has_rounding_error_only() -> None:
    result = measured("exact", dtype="float64")
    assert (result.kind, result.doubt) == ("exact", "")
    assert result.rel_error == 0
    assert result.max_abs_error == 0
    assert result.cosine == pytest.approx(1)
    assert 0 < measured("exact").rel_error < 1e-7


def test_rounding_the_inputs_is_not_the_variants_error() -> None:
    # The oracle sees the same bfloat16 inputs; what is left is the rounding of the output, 2^-9 at most per number.
    assert 2**-12 < measured("exact", dtype="bfloat16").rel_error < 2**-8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", ["alibi", "relative"])
def test_the_oracle_has_the_bias_of_the_shape(bias: Bias, causal: bool) -> None:
    shape = replace(SHAPE, bias=bias, causal=causal)
    for dtype, bound in (("float64", 1e-15), ("float32", 1e-7), ("bfloat16", 2**-8)):
        assert measured("biased", shape, dtype=dtype).rel_error <= bound
        assert measured("deaf", shape, dtype=dtype).rel_error > 0.04
    assert measured("biased", shape).draws == 3
    with pytest.raises(Unsupported, match="bias: not built here: nothing is added to the logits"):
        measured("scaled", shape)


def test_relative_error_and_cosine_are_those_of_the_definition() -> None:
    result = measured("scaled:factor=1.5")
    assert result.kind == "approximation"
    assert result.rel_error == pytest.approx(0.5, rel=1e-6)
    assert result.rel_error_std == pytest.approx(0, abs=1e-6)
    assert result.cosine == pytest.approx(1)
    assert measured("scaled:factor=-2.0").cosine == pytest.approx(-1)
    assert result.draws == 3


def test_the_largest_absolute_error_is_over_all_draws() -> None:
    each = [measured("scaled", draws=1, seed=seed).max_abs_error for seed in range(3)]
    assert measured("scaled").max_abs_error == max(each)


def test_another_operator_has_a_distance() -> None:
    assert measured("elsewhere").kind == "distance"
    assert measured("elsewhere").rel_error == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("shape", [SHAPE, Shape(2, 2, 12, 8, causal=True), Shape(1, 2, 5, 8, 9)], ids=str)
def test_the_trivial_error_is_that_of_the_mean_of_visible_values(shape: Shape) -> None:
    result = measured("mean", shape, dtype="float64")
    assert result.rel_error == pytest.approx(result.trivial_error, rel=1e-12)
    assert result.trivial_error > 0.1


def test_the_mean_of_visible_values_is_attention_without_logits() -> None:
    v = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    flat = torch.zeros(2, 3, 7, 4, dtype=torch.float64)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(mean_of_visible(v, 7, causal=True), masked_attention(flat, flat, v, causal))
    torch.testing.assert_close(mean_of_visible(v, 7, causal=False), masked_attention(flat, flat, v, causal | True))


def test_random_weights_that_should_be_learned_have_no_error() -> None:
    assert measured("fitted") == ErrorResult("learned", draws=0)


def test_what_a_learned_variant_does_not_allow_is_reported_all_the_same() -> None:
    with pytest.raises(Unsupported, match="the future is in it"):
        measured("fitted", Shape(1, 1, 4, 8, causal=True))


def test_a_mixer_has_no_error() -> None:
    with pytest.raises(
        Unsupported, match=r"^a mixer replaces the whole layer and has no q, k, v; use --level layer or model$"
    ):
        measured("mixer")


def test_draws_differ_in_input_and_in_variant() -> None:
    alone = [measured("noisy", draws=1, seed=seed) for seed in (0, 1, 2)]
    errors = sorted(result.rel_error for result in alone)
    together = measured("noisy")
    assert errors[0] < errors[1] < errors[2]
    assert together.rel_error == errors[1]
    assert together.rel_error_std == pytest.approx(torch.tensor(errors).std().item(), rel=1e-5)
    assert together.trivial_error == sorted(result.trivial_error for result in alone)[1]


def test_repeating_a_fixed_input_does_not_count_as_several_draws() -> None:
    result = measured("scaled", inputs="fixed", draws=5)
    assert result.draws == 1
    assert result.rel_error_std is None


def test_a_stochastic_variant_on_a_fixed_input_has_several_draws() -> None:
    result = measured("noisy", inputs="fixed", draws=5)
    assert result.draws == 5
    assert result.rel_error_std > 0


def test_one_draw_has_no_standard_deviation() -> None:
    assert measured("noisy", draws=1).rel_error_std is None


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert measured("noisy") == measured("noisy")


def test_one_draw_with_infinity_is_not_hidden_by_the_median_of_the_others() -> None:
    each = [measured("broken", draws=1, seed=seed).rel_error for seed in range(6)]
    assert 0 < sum(map(math.isnan, each)) < 3
    result = measured("broken", draws=6)
    assert math.isnan(result.rel_error)
    assert result == ErrorResult("approximation", rel_error=result.rel_error)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.01])
def test_rows_of_nan_are_as_far_from_exact_as_any_others(wrong: float) -> None:
    qkv = draw_qkv(parse_spec("gaussian"), SHAPE, 0)
    exact = exact_attention(*qkv).to(qkv[0])
    hold_rows(Exact(SHAPE), qkv, SHAPE, output=exact)
    with pytest.raises(AttnbenchError, match="exact, but off by "):
        hold_rows(Exact(SHAPE), qkv, SHAPE, output=exact * wrong)


def test_no_draw_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^error_draws must be at least 1, got 0$"):
        measured("exact", draws=0)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'exact'"):
        measured("exakt")
    with pytest.raises(UsageError, match="did you mean 'gaussian'"):
        measured("exact", inputs="gausian")


GIVEN = (parse_spec("gaussian"), SHAPE, 0, torch.float32)


def test_long_inputs_are_compared_in_blocks_without_changing_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []

    def noted(*inputs: Tensor, block: int, **more: Any) -> Tensor:
        blocks.append(block)
        return exact_attention(*inputs, block=block, **more)

    monkeypatch.setattr(exact_error, "exact_attention", noted)
    whole = exact_error._new_problem(*GIVEN, "cpu", 0.0, 0)
    for logits in (2 * 2 * 12 * 5, 2 * 2 * 12 * 6 - 1, 1):
        monkeypatch.setattr(exact_error, "_ORACLE_LOGITS", logits)
        blocked = exact_error._new_problem(*GIVEN, "cpu", 0.0, 0)
        torch.testing.assert_close(blocked.exact, whole.exact, rtol=1e-12, atol=1e-15)
    assert blocks == [512, 5, 5, 1]


def test_small_draws_are_kept_for_the_next_variant_and_large_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_kept_problem", "_new_problem"):
        monkeypatch.setattr(exact_error, name, lambda *given, name=name: (name, *given))
    for shape, elements in ((Shape(2, 3, 5, 7, 11), 2 * 3 * 11 * 7), (Shape(2, 3, 11, 7, 5), 2 * 3 * 11 * 7)):
        given = (parse_spec("gaussian"), shape, 3, torch.float32, "cpu", 0.5, 0)
        for room, name in ((elements, "_kept_problem"), (elements - 1, "_new_problem")):
            monkeypatch.setattr(exact_error, "_KEPT_ELEMENTS", room)
            assert exact_error._problem(*given) == (name, *given)


def test_an_exact_output_of_zeros_gives_no_relative_error_and_says_so() -> None:
    @register_input("zeros")
    def zeros(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Values that are all 0, as a captured layer may have them."""
        q, k, v = (torch.zeros(shape.B, shape.H, shape.N, shape.D) for _ in range(3))
        return q, k, v

    for variant in ("exact", "scaled"):
        found = measured(variant, inputs="zeros")
        assert (found.rel_error, found.rel_error_std, found.doubt) == (
            None,
            None,
            "no relative error: the exact output is 0",
        )


def test_no_variant_meets_what_another_wrote_into_its_inputs() -> None:
    class Writes(Exact):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            for one in (q, k, v):
                one.data.numpy()[:] = 0
            return v

    register("own-writes", family="exact", source="", formula="", cost="", traits=SOFTMAX)(Writes)
    measured("own-writes", Shape(2, 2, 24, 8))
    found = measured("exact", Shape(2, 2, 24, 8))
    assert found.rel_error is not None
    assert found.rel_error < 1e-6


def test_without_float64_on_the_device_the_exact_answer_is_computed_on_the_cpu() -> None:
    shape = replace(SHAPE, bias="relative", sink="learned")
    spec, _, seed, dtype = GIVEN
    here, there = (exact_error._new_problem(spec, shape, seed, dtype, device, 0.5, 0) for device in ("cpu", "mps"))
    assert there.exact.device.type == "cpu"
    assert torch.equal(here.exact, there.exact)
    assert (here.trivial_error, here.digest) == (there.trivial_error, there.digest)
    assert not here.exact.requires_grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [0.25, 0.5])
def test_padded_tokens_are_neither_seen_nor_compared(causal: bool, padding: float) -> None:
    shape = replace(SHAPE, causal=causal)
    result = measured("padded", shape, draws=1, dtype="float64", padding=padding)
    assert result.rel_error == pytest.approx(0, abs=1e-15)
    assert result.cosine == pytest.approx(1)
    off, size = 0.0, 0.0
    drawn = [x.double() for x in draw_qkv(parse_spec("gaussian"), shape, 0)]
    for example, n in enumerate(real_tokens(2, 12, padding)):
        q, k, v = (x[example : example + 1, :, :n] for x in drawn)
        exact = exact_attention(q, k, v, causal=causal)
        means = torch.stack([v[:, :, : i + 1 if causal else n].mean(2) for i in range(n)], 2)
        off, size = off + float((means - exact).square().sum()), size + float(exact.square().sum())
    assert result.trivial_error == pytest.approx(math.sqrt(off / size), rel=1e-12)


def test_queries_of_another_sequence_are_all_compared_where_keys_are_padded() -> None:
    shape = Shape(2, 2, 5, 8, 9)
    result = measured("padded", shape, draws=1, dtype="float64", padding=0.5)
    assert result.rel_error == pytest.approx(0, abs=1e-15)
    off, size = 0.0, 0.0
    drawn = [x.double() for x in draw_qkv(parse_spec("gaussian"), shape, 0)]
    for example, n in enumerate(real_tokens(2, 9, 0.5)):
        q, k, v = (x[example : example + 1] for x in drawn)
        exact = exact_attention(q, k[:, :, :n], v[:, :, :n])
        off += float((v[:, :, :n].mean(2, keepdim=True) - exact).square().sum())
        size += float(exact.square().sum())
    assert result.trivial_error == pytest.approx(math.sqrt(off / size), rel=1e-12)


def test_what_is_measured_may_be_made_of_the_variant_and_has_the_dtype_of_the_cell() -> None:
    cell = Cell("s", "w", parse_spec("exact"), SHAPE, error_draws=2, dtype="float64")
    assert measure_error(cell, adapt=Twice).rel_error == 1
    for dtype in ("float64", "bfloat16"):
        assert measured("typed", dtype=dtype).draws == 3


def test_an_answer_that_is_no_tensor_breaks_the_contract() -> None:
    with pytest.raises(BrokenContract) as broken:
        measured("listing")
    assert str(broken.value) == "it breaks the contract: it returns a list, not a torch.Tensor"


def test_two_draws_have_a_standard_deviation_and_the_cosine_is_a_mean() -> None:
    alone = [measured("noisy", draws=1, seed=seed) for seed in (0, 1)]
    assert measured("noisy", draws=2).rel_error_std == pytest.approx(statistics.stdev(one.rel_error for one in alone))
    rows = []
    for seed in (0, 1):
        q, k, v = (x.double() for x in draw_qkv(parse_spec("gaussian"), SHAPE, seed))
        exact, mean = exact_attention(q, k, v), v.mean(2, keepdim=True)
        rows.append((exact * mean).sum(-1) / (exact.norm(dim=-1) * mean.norm(dim=-1)))
    assert measured("mean", draws=2, dtype="float64").cosine == pytest.approx(float(torch.stack(rows).mean()))


def test_the_cosine_of_the_smallest_rows_is_that_of_their_direction() -> None:
    assert measured("exact", inputs="tiny", dtype="float64").cosine == pytest.approx(1)


def test_a_draw_that_came_before_is_left_out_and_later_ones_still_count() -> None:
    def differ(seed: int) -> bool:
        return draws_of(seed, 2) == 2

    def draws_of(seed: int, draws: int) -> int:
        return measured("scaled", inputs="coin", draws=draws, seed=seed).draws

    seed = next(seed for seed in range(64) if not differ(seed) and differ(seed + 1))
    assert draws_of(seed, 3) == 2
    assert [measured("scaled", inputs=f"random-{part}").draws for part in "qkv"] == [3, 3, 3]


@pytest.mark.parametrize(
    ("causal", "mask", "start"),
    [
        (True, "none", 4),
        (True, "prefix:5", 0),
        (False, "sliding:3", 0),
        (True, "sliding:3", 4),
        (False, "document:4+1", 0),
        (True, "document:4+1", 2),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_the_mean_of_visible_values_is_that_of_the_keys_that_a_mask_and_padding_leave(
    causal: bool, mask: str, start: int, padded: bool
) -> None:
    shape = Shape(2, 3, 7, 4, causal=causal, mask=mask, q_start=start)
    v, visible = torch.randn(2, 3, shape.M, 4, dtype=torch.float64), Visible.of(shape)
    real = torch.rand(2, shape.M) < 0.5 if padded else torch.ones(2, shape.M, dtype=torch.bool)
    got = mean_of_visible(v, 7, causal=visible, key_mask=real if padded else None)
    for example, row in enumerate(real):
        for i in range(7):
            seen = [j for j in range(*visible.span(i, shape.M)) if row[j]]
            wanted = v[example, :, seen].mean(1) if seen else torch.zeros(3, 4, dtype=torch.float64)
            torch.testing.assert_close(got[example, :, i], wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_the_mean_of_visible_values_without_places_leaves_padding_out(causal: bool) -> None:
    v, real = torch.randn(3, 2, 5, 4), torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    queries = 5 if causal else 3
    got = mean_of_visible(v, queries, causal=causal, key_mask=real)
    assert got.shape == (3, 2, queries, 4)
    for example, row in enumerate(real):
        for i in range(queries):
            seen = [j for j in range(i + 1 if causal else 5) if row[j]]
            wanted = v[example, :, seen].double().mean(1) if seen else torch.zeros(2, 4, dtype=torch.float64)
            torch.testing.assert_close(got[example, :, i], wanted)


@pytest.mark.parametrize("asked", [{}, {"bias": "relative"}, {"bias": "alibi"}, {"sink": "learned"}], ids=str)
def test_the_oracle_gets_what_the_variant_gets_as_rounded_to_its_dtype(asked: dict[str, Any]) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        assert measured("wide", replace(SHAPE, **asked), dtype=dtype).rel_error == pytest.approx(0, abs=1e-12)


class Device(TorchFunctionMode):
    """A device called cuda:0, whose tensors can be told by a mark."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = [isinstance(one, str | torch.device) and str(one) == "cuda:0" for one in args]
        if func is not Tensor.to or not any(there):
            return func(*args, **(kwargs or {}))
        moved = func(*("cpu" if place else one for place, one in zip(there, args, strict=True)), **(kwargs or {}))
        moved = moved.clone()
        moved.marked = True
        return moved


def test_the_variant_and_the_oracle_get_all_that_they_need_on_the_device_of_the_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def note(*tensors: Tensor | None) -> None:
        seen.extend(hasattr(one, "marked") for one in tensors)

    class Elsewhere(Wide):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            note(q, k, v, key_mask, self.position_bias.steps)
            return self.gain * super().forward(q, k, v)

    def oracle(*qkv: Tensor, bias: nn.Module, sink: Tensor, key_mask: Tensor, **more: Any) -> Tensor:
        note(*qkv, bias.steps, sink, key_mask)
        return exact_attention(*qkv, bias=bias, sink=sink, key_mask=key_mask, **more)

    learned = Traits(target="learned", bias=True, sink=True)
    register("elsewhere-too", family="exact", source="", formula="", cost="", traits=learned)(Elsewhere)
    monkeypatch.setattr(exact_error, "exact_attention", oracle)
    monkeypatch.setattr(exact_error, "_LESSONS", 2)
    shape = replace(SHAPE, bias="alibi", sink="learned")
    with Device():
        measured("elsewhere-too", shape, padding=0.5, device="cuda:0", draws=1, fit=2)
    assert seen == [True] * (3 * 6 + 3 * 5)  # a draw and two lessons; the output of each


def test_the_trivial_answer_is_compared_where_the_exact_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*answers: Tensor) -> float:
        assert {one.device.type for one in answers} == {"meta"}
        return 0.0

    monkeypatch.setattr(exact_error, "relative_error", compare)
    assert exact_error._new_problem(*GIVEN, "meta", 0.0, 0).exact.device.type == "meta"
    for causal in (False, True, Visible(causal=True)):
        v = torch.empty(2, 2, 12, 8, device="meta")
        assert mean_of_visible(v, 12, causal=causal).device.type == "meta"


@pytest.mark.parametrize("mask", ["none", "sliding:3", "prefix:5"])
@pytest.mark.parametrize("start", [0, 4])
def test_the_oracle_sees_what_the_mask_and_the_place_of_the_queries_leave(mask: str, start: int) -> None:
    shape = replace(SHAPE, causal=True, mask=mask, q_start=start)
    result = measured("masked", shape, dtype="float64")
    assert result.rel_error == pytest.approx(0, abs=1e-12)
    assert result.trivial_error > 0.1


@pytest.mark.parametrize("variant", ["first-keys", "blind"])
@pytest.mark.parametrize("padding", [0.0, 0.5])
@pytest.mark.parametrize("causal", [False, True])
def test_what_keeps_some_pairs_has_their_share_of_the_weight_and_of_the_visible_pairs(
    variant: str, padding: float, causal: bool
) -> None:
    shape = replace(SHAPE, causal=causal)
    result = measured(variant, shape, padding=padding, draws=2, dtype="float64")
    chosen = 2 if padding and variant == "first-keys" else 1
    masses, kept, visible = [], 0, 0
    for seed in (0, 1):
        weights = []
        q, k, _ = (x.double() for x in draw_qkv(parse_spec("gaussian"), shape, seed))
        for example, n in enumerate(real_tokens(2, 12, padding) if padding else (12, 12)):
            for i in range(n):
                seen = i + 1 if causal else n
                logits = q[example, :, i, None] @ k[example, :, :seen].mT * 8**-0.5
                weights.append(logits.softmax(-1)[:, 0, :chosen].sum(-1))
                kept, visible = kept + min(chosen, seen), visible + seen
        masses.append(float(torch.cat(weights).mean()))
    assert result.kept_mass == pytest.approx(statistics.fmean(masses))
    assert result.kept_pairs == pytest.approx(kept / visible)
    assert (measured("exact").kept_mass, measured("exact").kept_pairs) == (None, None)


# What follows a prompt

PROMPT = Shape(2, 4, 12, 8, kv_heads=2)


def generated(variant: str, steps: int = 5, **given: Any) -> ErrorResult:
    return measured(variant, PROMPT, pass_="generate", new_tokens=steps, dtype="float64", **given)


def drawn_of(seed: int, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v of a prompt and its steps, and the exact answers to the steps."""
    q, k, v = (x.double() for x in draw_qkv(parse_spec("gaussian"), replace(PROMPT, seq_len=12 + steps), seed))
    return q, k, v, exact_attention(q, k, v, causal=True)[:, :, 12:]


def test_steps_are_compared_with_the_exact_answers_to_them_alone() -> None:
    result = generated("stepwise", draws=1)
    assert (result.kind, result.kept_mass, result.kept_pairs) == ("exact", None, None)
    assert result.rel_error == pytest.approx(0, abs=1e-12)
    assert result.cosine == pytest.approx(1)
    _, _, v, exact = drawn_of(0, 5)
    means = torch.stack([v[:, :, : 13 + step].mean(2) for step in range(5)], 2).repeat_interleave(2, 1)
    assert result.trivial_error == pytest.approx(float((means - exact).norm() / exact.norm()))


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_the_error_of_each_stretch_of_steps_is_told_and_that_of_the_first_and_the_last_quarter(steps: int) -> None:
    wrong = 0.01 * torch.arange(1, steps + 1)[:, None]
    exact = [drawn_of(seed, steps)[3] for seed in range(3)]

    def off(first: int, stop: int) -> float:
        part = slice(first, stop)
        each = [float((one[:, :, part] * wrong[part]).norm() / one[:, :, part].norm()) for one in exact]
        return statistics.median(each)

    result, quarter = generated("drifting", steps), math.ceil(steps / 4)
    assert result.first == pytest.approx(off(0, quarter))
    assert result.last == pytest.approx(off(steps - quarter, steps))
    assert result.steps == pytest.approx([off(part.start, part.stop) for part in exact_error.stretches(steps)])
    assert result.rel_error == pytest.approx(off(0, steps))


def late(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Values that are 0 up to the second new token."""
    q, k, v = INPUTS.get("gaussian").make(shape, generator)
    v[:, :, : PROMPT.N + 2] = 0
    return q, k, v


def test_steps_whose_exact_outputs_are_all_0_have_no_error_and_the_others_have_theirs() -> None:
    register_input("late")(late)
    result = generated("drifting", inputs="late")
    assert (result.first, result.steps[:2]) == (None, (None, None))
    assert result.steps[2:] == pytest.approx((0.03, 0.04, 0.05))
    assert 0.04 < result.last < 0.05


@pytest.mark.parametrize("steps", [1, 2, 31, 32, 33, 100])
def test_stretches_follow_each_other_over_all_steps_and_differ_by_one_step_at_most(steps: int) -> None:
    parts = exact_error.stretches(steps)
    assert len(parts) == min(32, steps)
    assert [t for part in parts for t in range(part.start, part.stop)] == list(range(steps))
    sizes = {part.stop - part.start for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_other_passes_have_no_steps() -> None:
    result = measured("drifting", draws=1)
    assert (result.first, result.last, result.steps) == (None, None, ())


def test_the_mass_of_a_budget_is_what_its_keys_have_of_the_exact_probability() -> None:
    masses = []
    for seed in range(3):
        q, k, *_ = drawn_of(seed, 5)
        for t in range(12, 17):
            logits = q[:, :, t, None] @ k[:, :, : t + 1].repeat_interleave(2, 1).mT * 8**-0.5
            weights = logits.softmax(-1)[:, :, 0]
            masses += [weights[:, h, [j for j in range(t + 1) if (j + h // 2) % 3 == 0]].sum(-1) for h in range(4)]
    result = generated("forgetful")
    assert result.kept_mass == pytest.approx(float(torch.stack(masses).mean()))
    assert result.kept_pairs is None


def test_a_generation_without_steps_of_the_same_meaning_is_refused() -> None:
    with pytest.raises(Unsupported) as refused:
        generated("stepwise", padding=0.5)
    assert str(refused.value).startswith("padding: in passes stepwise and generate all sequences have one length")
    with pytest.raises(Unsupported) as refused:
        generated("exact")
    assert str(refused.value) == "decode: it has no begin and step"
    with pytest.raises(Unsupported) as refused:
        generated("ahead:ahead=true")
    assert str(refused.value) == "decode: it looks ahead"
    assert generated("ahead").rel_error == pytest.approx(0, abs=1e-12)
