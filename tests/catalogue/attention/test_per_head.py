from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.attention.pattern.per_head import PerHead, heads_of, parse_parts
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Bias, Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, No, Traits
from attnbench.errors import Unsupported, UsageError
from tests.catalogue.attention.small import built

SHAPE = Shape(2, 4, 23, 4)
CAUSAL = Shape(2, 4, 23, 4, causal=True)


def draw(n: int = 23, H: int = 4, D: int = 4) -> list[Tensor]:
    return [torch.randn(2, H, n, D, dtype=torch.float64) for _ in "qkv"]


def made(parts: str, shape: Shape = SHAPE, seed: int = 0) -> PerHead:
    return built(PerHead, "per-head", shape, seed=seed, parts=parts).double()


def alone(spec: str, shape: Shape = SHAPE, seed: int = 0) -> nn.Module:
    return build(spec, shape, seed=seed).double()


@pytest.mark.parametrize(
    "spec", ["local:window=3", "performer:features=16", "bigbird:block=3,random_blocks=1", "softmax"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_one_variant_on_all_heads_is_that_variant_bit_for_bit(spec: str, masked: bool) -> None:
    q, k, v = draw()
    mask = torch.rand(2, 23) < 0.6 if masked else None
    name, _, options = spec.partition(":")
    f = made(f"{name}[{options}]" if options else name, seed=3)
    assert torch.equal(f(q, k, v, key_mask=mask), alone(spec, seed=3)(q, k, v, key_mask=mask))


def test_each_group_of_heads_is_its_variant() -> None:
    q, k, v = draw()
    out = made("1*local[window=3,dilation=2]+softmax")(q, k, v)
    local = alone("local:window=3,dilation=2")(q, k, v)
    torch.testing.assert_close(out[:, :1], local[:, :1], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[:, 1:], exact_attention(q, k, v)[:, 1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("parts", "target"),
    [
        ("local+sparse", "softmax"),
        ("softmax+performer", "softmax"),
        ("local+performer[kernel=relu]", "other"),
        ("local+linformer", "learned"),
        ("linear+linformer", "other"),
        ("1*softmax+per-head[parts=linear]", "other"),
        ("nystrom[conv=3]", "learned"),
        ("linformer[projection=mean-pool]+etc[max_distance=0]", "softmax"),
    ],
)
def test_an_error_means_what_it_means_for_all_parts(parts: str, target: str) -> None:
    assert VARIANTS.get("per-head").target(parse_spec(f"per-head:parts={parts}")) == target


def test_it_claims_what_all_of_its_parts_claim() -> None:
    def claims(parts: str) -> Traits:
        return VARIANTS.get("per-head").claims(parse_spec(f"per-head:parts={parts}"))

    assert claims("softmax+chunked").exact
    assert not claims("softmax+local").exact
    assert claims("local+performer").stochastic
    assert not claims("local+sparse").stochastic
    assert claims("softmax+performer").permutable
    assert not claims("softmax+local").permutable
    assert claims("local").rows_sum_to_one
    assert not claims("local+retnet").rows_sum_to_one


def test_parts_that_cannot_be_read_are_said_when_it_is_built() -> None:
    assert VARIANTS.get("per-head").target(parse_spec("per-head:parts=locl")) == "softmax"
    with pytest.raises(UsageError, match="locl"):
        made("locl")


def test_permuting_heads_and_parts_permutes_the_outputs() -> None:
    q, k, v = draw()
    out = made("local[window=3]+linear")(q, k, v)
    order = [3, 2, 1, 0]
    swapped = made("linear+local[window=3]")(*(x[:, order] for x in (q, k, v)))
    torch.testing.assert_close(swapped, out[:, order], rtol=0, atol=1e-12)


def test_random_parts_draw_apart() -> None:
    q, k, v = (x[:, :1].expand(-1, 4, -1, -1) for x in draw())
    out = made("performer[features=8]+performer[features=8]")(q, k, v)
    # The same draws, of which a product's rows may be rounded differently.
    torch.testing.assert_close(out[:, 0], out[:, 1], rtol=0, atol=1e-14)
    assert not torch.allclose(out[:, 1], out[:, 2], atol=1e-3)


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("local", 4, [4]),
        ("local+linear", 4, [2, 2]),
        ("local+linear", 5, [3, 2]),
        ("local+linear+softmax", 8, [3, 3, 2]),
        ("local+linear", 1, [1, 0]),
        ("1*local+linear", 8, [1, 7]),
        ("local+3*linear+softmax", 8, [3, 3, 2]),
        ("2*local+6*linear", 8, [2, 6]),
        ("8*local+linear", 8, [8, 0]),
    ],
)
def test_heads_are_those_named_and_equal_shares_of_the_rest(text: str, total: int, expected: list[int]) -> None:
    assert heads_of(parse_parts(text), total) == expected


def test_parts_have_options_in_brackets_and_numbers_with_a_plus() -> None:
    first, second = parse_parts("2*local[window=64,dilation=2] + performer[features=64,beta=1e+3]")
    assert first == (parse_spec("local:window=64,dilation=2"), 2)
    assert second == (parse_spec("performer:features=64,beta=1000.0"), None)


def test_the_text_of_a_variant_reads_back_as_the_same_variant() -> None:
    spec = parse_spec("per-head:parts=2*local[window=3,dilation=2]+performer[features=16,chunk=5]")
    assert parse_spec(str(spec)) == spec
    assert VARIANTS.get("per-head").check(dict(spec.options)) == dict(spec.options)
    assert isinstance(build(spec, SHAPE), PerHead)
    assert isinstance(build("per-head:local+softmax", SHAPE), PerHead)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a variant such as"),
        ("local+", "not a variant such as"),
        ("0*local", "not a variant such as"),
        ("local[window=3", "not a variant such as"),
        ("local[window=[3,4]]", "not a variant such as"),
        ("locl", "unknown variant 'locl'.*local"),
        ("local[windw=3]", "unknown option 'windw'"),
        ("local[window=-1]", "window=-1"),
        ("local[block=3,dilation=2]", "dilation belongs"),
        ("synthesizer+local", "replaces the whole layer"),
    ],
)
def test_parts_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made(text)


def test_key_padding_and_decoding_are_refused_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = VARIANTS.get("linear")
    traits = replace(entry.traits, key_padding=No("it has no mask"), decode=No("it has no state"))
    monkeypatch.setitem(VARIANTS._entries, "linear", replace(entry, traits=traits))
    f = made("local+linear", CAUSAL)
    q, k, v = draw()
    f(q, k, v)
    with pytest.raises(Unsupported, match="linear: key padding: it has no mask"):
        f(q, k, v, key_mask=torch.ones(2, 23, dtype=torch.bool))
    with pytest.raises(Unsupported, match="linear: decode: it has no state"):
        f.begin(q, k, v)


@pytest.mark.parametrize("bias", ["alibi", "relative"])
@pytest.mark.parametrize("shape", [SHAPE, CAUSAL])
@pytest.mark.parametrize(
    "parts",
    [
        "softmax",
        "1*softmax+local[window=23]",
        "1*chunked[query_chunk=5]+2*softmax+sdpa",
        "2*softmax+per-head[parts=softmax]",
        "3*softmax+sparse[length=23]",
        "1*softmax+sparse[length=23]+2*topk[keys=23]",
    ],
)
def test_each_head_has_its_own_row_of_the_bias(parts: str, shape: Shape, bias: Bias) -> None:
    shape = replace(shape, bias=bias)
    f, inputs = made(parts, shape), [x.requires_grad_() for x in draw()]
    whole = alone("softmax", shape)
    got, expected = f(*inputs), exact_attention(*inputs, causal=shape.causal, bias=whole.position_bias)  # type: ignore[arg-type]  # a module may hold anything
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(f.dense(*inputs), expected, rtol=0, atol=1e-12)
    if bias == "relative":
        (table,) = f.parameters()
        (wanted,) = torch.autograd.grad(whole(*inputs).square().sum(), list(whole.parameters()))
        (grad,) = torch.autograd.grad(got.square().sum(), table)
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-11)
    if shape.causal:
        state = f.begin(*(x[:, :, :22].detach() for x in inputs))
        out, _ = f.step(state, *(x[:, :, 22:].detach() for x in inputs))
        torch.testing.assert_close(out, expected[:, :, 22:], rtol=0, atol=1e-12)


def test_a_bias_is_refused_with_the_reason_of_the_part_that_takes_none() -> None:
    with pytest.raises(Unsupported, match="bias: performer: a bias belongs to a pair"):
        made("softmax+performer", replace(SHAPE, bias="alibi"))
    claims = VARIANTS.get("per-head").claims
    refused = claims(parse_spec("per-head:parts=softmax+performer")).bias
    assert isinstance(refused, No)
    assert refused.startswith("performer: ")
    assert refused.endswith("no weight for each pair")
    assert claims(parse_spec("per-head:parts=softmax+local")).bias is True


def test_parts_without_causality_work_where_none_is_asked_for() -> None:
    f = made("bigbird[block=3,random_blocks=1]+longformer[window=2,global_tokens=2]")
    q, k, v = draw()
    torch.testing.assert_close(f.dense(q, k, v), f(q, k, v), rtol=0, atol=1e-12)


def test_parameters_of_all_parts_are_found_and_learn() -> None:
    f = made("longformer[window=2,projections=own]+linformer[rank=4]")
    assert len(list(f.parameters())) == 4
    f(*draw()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in f.parameters())
