"""Gates that an operator reads beside q, k and v: their distributions, and what a caller may give."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softmax

import attnbench.contract.reads as known
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BETA, CHANNEL_DECAY, DECAY, Read, draw_reads
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import SuiteError, Unsupported, UsageError
from attnbench.harness.inside.call import prepare
from attnbench.laws.exact_error import measure_error
from attnbench.suite.cell import Cell, Pass
from attnbench.suite.expand import expand
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

CORES = [entry.core for entry in VARIANTS if entry.core is not None]
READS = {f"{name}": one for name, one in vars(known).items() if isinstance(one, Read)}
SHAPE = Shape(2, 3, 23, 4, causal=True)

each = pytest.mark.parametrize("core", CORES, ids=lambda core: core.name)
LABELS = [*(core.name for core in CORES), "log-linear:base=gated-delta", "log-linear:levels=3", "deltaformer:asks=key"]


def drawn(core: Variant, shape: Shape = SHAPE, seed: int = 0, label: str = "") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (shape.B, shape.H, shape.N, shape.D),
        *[(shape.B, shape.K, shape.M, width) for width in (shape.D, shape.E)],
    )
    qkv = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    reads = core.claims(parse_spec(label or core.name)).reads
    return [*qkv, *(x.double() for x in draw_reads(reads, shape, seed))]


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_gate_is_drawn_within_its_range_and_with_its_width(read: Read) -> None:
    shape = Shape(2, 6, 50, 8, kv_heads=3, v_dim=5)
    (gate,) = draw_reads([read], shape, 0)
    assert gate.shape == (2, 3, 50, {"one": 1, "key": 8, "value": 5}.get(read.width, 7))
    assert gate.dtype == torch.float32
    assert gate.min() >= read.least
    assert gate.max() <= read.most
    assert gate.std() > 0.01


def test_a_gate_follows_from_its_name_and_the_seed() -> None:
    both, alone = draw_reads([BETA, DECAY], SHAPE, 1), draw_reads([DECAY], SHAPE, 1)
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(alone[0], draw_reads([DECAY], SHAPE, 2)[0])
    assert not torch.equal(both[0], both[1])


@pytest.mark.parametrize(
    ("label", "width"),
    [("gsa", 64), ("abc:slots=5", 5), ("log-linear", 6), ("log-linear:levels=3", 3), ("log-linear:levels=9", 9)],
)
def test_an_option_or_the_length_says_the_width_of_a_gate(label: str, width: int) -> None:
    spec = parse_spec(label)
    (core,) = (one for one in CORES if one.name == spec.name)
    inputs = drawn(core, label=label)
    assert inputs[-1].shape == (2, 3, 23, width)
    assert build(spec, SHAPE, level="operator").double()(*inputs).isfinite().all()
    if spec.options or label == "gsa":
        inputs[-1] = inputs[-1][..., 1:]
        with pytest.raises(UsageError, match=rf"is \(B, K, N, \w+\), here \(2, 3, 23, {width}\), and not"):
            build(spec, SHAPE, level="operator").double()(*inputs)


def test_a_decay_is_that_of_a_trained_layer() -> None:
    (gate,) = draw_reads([CHANNEL_DECAY], Shape(1, 400, 60, 16), 0)
    left = gate.exp2()
    # Half of the tokens keep between 75 and 99.9 % of a channel, and hardly one forgets all.
    low, high = left.flatten()[::7].quantile(torch.tensor([0.25, 0.75])).tolist()
    assert 0.75 < low < high < 0.999
    assert (left < 0.01).float().mean() < 0.02


@each
def test_a_core_is_described_and_its_options_are_the_layers(core: Variant) -> None:
    layer = VARIANTS.get(core.name)
    assert core.kind == "operator"
    assert core.traits.reads
    assert "iffers from" in (core.make.__doc__ or "")
    assert len(core.summary) <= 80
    for name, option in core.options.items():
        assert layer.options[name].default == option.default
    assert {*core.around} == {*layer.options} - {*core.options}
    formulas = ("dense", "written_out")
    holder = next(one for one in inspect.getmro(core.make) if {*formulas} & {*vars(one)})
    methods = [name for name, what in vars(holder).items() if inspect.isfunction(getattr(what, "__func__", what))]
    assert next(name for name in methods if name != "__init__") in formulas


def token_by_token(step: Callable[..., tuple[Any, Tensor]], q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Outputs of a recurrence over single tokens ``(B, H, D, 1)`` in float64, from an empty state."""
    state: Any = torch.zeros_like(k.mT @ v)
    rows = []
    for t in range(q.shape[2]):
        token = [x[:, :, t, :, None] for x in (q, k, v, *gates)]
        state, row = step(state, *token)
        rows.append(row.mT)
    return torch.cat(rows, 2)


def rule_of(name: str) -> Callable[..., tuple[Any, Tensor]]:
    """The recurrence as its paper writes it, without a line of the package."""

    def gla(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        S = 2.0**g * S + k @ v.mT
        return S, S.mT @ q / 2

    def ssd(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        S = 2.0**g * S + k @ v.mT
        return S, S.mT @ q

    def delta(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (normalize(x, dim=2) for x in (q, k))
        S = (torch.eye(4, dtype=q.dtype) - beta * k @ k.mT) @ S + beta * k @ v.mT
        return S, S.mT @ q

    def gated_delta(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        S, read = delta(2.0**g * S, q, k, v, beta)
        return S, read / 2

    def apart(S: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (normalize(x, dim=2) for x in (q, k))
        S = 2.0**g * S
        S = S - k @ (b * k).mT @ S + k @ (w * v).mT
        return S, S.mT @ q / 2

    def comba(S: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        (beta, g, b, p), (q, k) = gates, (normalize(x, dim=2) for x in (q, k))
        S = 2.0**g * S - b * beta * k @ k.mT @ S + beta * k @ v.mT
        return S, S.mT @ (q - p * k) / 2

    def rwkv7(S: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
        kappa, a, g = gates
        kappa = normalize(kappa, dim=2)
        S = 2.0**g * S - (a * kappa) @ kappa.mT @ S + k @ v.mT
        return S, S.mT @ q

    def mesa(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (normalize(x, dim=2) for x in (q, k))
        H, G = (S if S.shape[3] == 8 else torch.cat([S, S], 3)).chunk(2, 3)
        H, G = 2.0**g * H + beta * k @ k.mT, 2.0**g * G + beta * k @ v.mT
        return torch.cat([H, G], 3), G.mT @ torch.linalg.inv(H + torch.eye(4, dtype=q.dtype)) @ q

    def gsa(S: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Any, Tensor]:
        K, V = S if isinstance(S, tuple) else (0.0, 0.0)
        K, V = 2.0**g * K + (1 - 2.0**g) @ k.mT, 2.0**g * V + (1 - 2.0**g) @ v.mT
        return (K, V), V.mT @ softmax(K @ q, 2)

    def abc(S: Any, q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Any, Tensor]:
        W, K, V = S if isinstance(S, tuple) else (0.0, 0.0, 0.0)
        W, K, V = W + s.exp(), K + s.exp() @ k.mT, V + s.exp() @ v.mT
        return (W, K, V), (V / W).mT @ softmax(K / W @ q / 2, 2)

    def log_linear(S: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *others: Tensor) -> tuple[Any, Tensor]:
        (weights, *rates), past, own = others, S if isinstance(S, list) else [], k @ v.mT
        step = torch.eye(4, dtype=q.dtype)
        for beta in rates:
            q, k = normalize(q, dim=2) / 2, normalize(k, dim=2)
            step, own = step - beta * k @ k.mT, beta * k @ v.mT
        past, last = [*(2.0**g * step @ one for one in past), own], weights.shape[2] - 1
        levels = [min((len(past) - 1 ^ place).bit_length(), last) for place in range(len(past))]
        read = sum(weights[:, :, level, None] * one.mT @ q for level, one in zip(levels, past, strict=True))
        assert isinstance(read, Tensor)
        return past, read

    def fox(S: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Any, Tensor]:
        K, V, L = S if isinstance(S, tuple) else (k[..., :0], v[..., :0], g[..., :0])
        K, V, L = torch.cat([K, k], 3), torch.cat([V, v], 3), torch.cat([L + g, 0 * g], 3)
        return (K, V, L), V @ softmax(K.mT @ q / 2 + L.mT, 2)

    def path(S: Any, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> tuple[Any, Tensor]:
        K, V = S if isinstance(S, tuple) else (k[..., :0], v[..., :0])
        w = normalize(w, dim=2)
        K, V = torch.cat([K - beta * w @ w.mT @ K, k], 3), torch.cat([V, v], 3)
        return (K, V), V @ softmax(K.mT @ q / 2, 2)

    def deltaformer(S: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, asks: str = "query") -> tuple[Any, Tensor]:
        K, U = S if isinstance(S, tuple) else (k[..., :0], v[..., :0])
        found = U @ softmax(K.mT @ (k if asks == "key" else q) / 2, 2)
        K, U = torch.cat([K, k], 3), torch.cat([U, v - beta * found], 3)
        return (K, U), U @ softmax(K.mT @ q / 2, 2)

    return {
        "gsa": gsa,
        "abc": abc,
        "log-linear": log_linear,
        "log-linear:levels=3": log_linear,
        "log-linear:base=gated-delta": log_linear,
        "fox": fox,
        "path": path,
        "deltaformer": deltaformer,
        "deltaformer:asks=key": partial(deltaformer, asks="key"),
        "rwkv7": rwkv7,
        "mesa": mesa,
        "gla": gla,
        "ssd": ssd,
        "mamba2": ssd,
        "delta": delta,
        "gated-delta": gated_delta,
        "kda": gated_delta,
        "gated-delta-2": apart,
        "comba": comba,
    }[name]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("n", [23, 130])
def test_it_is_the_recurrence_of_its_paper(label: str, n: int) -> None:
    core, shape = VARIANTS.get(label.partition(":")[0]).at("operator"), Shape(2, 3, n, 4, causal=True)
    inputs, module = drawn(core, shape, label=label), build(label, shape, level="operator").double()
    expected = token_by_token(rule_of(label), *inputs)
    torch.testing.assert_close(module(*inputs), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("label", LABELS)
def test_a_padded_token_is_passed_over_as_if_it_were_absent(label: str) -> None:
    core = VARIANTS.get(label.partition(":")[0]).at("operator")
    inputs, real = drawn(core, label=label), torch.arange(23) % 5 != torch.tensor([[1], [3]])
    out = build(label, SHAPE, level="operator").double()(*inputs, key_mask=real)
    for example, own in enumerate(real):
        expected = token_by_token(rule_of(label), *(x[example : example + 1, :, own] for x in inputs))
        torch.testing.assert_close(out[example : example + 1, :, own], expected, rtol=1e-10, atol=1e-11)


@each
def test_heads_of_queries_that_share_keys_share_their_gates(core: Variant) -> None:
    shape = Shape(2, 6, 23, 4, causal=True, kv_heads=3)
    label = "deltaformer:asks=key" if core.name == "deltaformer" else core.name
    q, *others = inputs = drawn(core, shape)
    out = build(label, shape, level="operator").double()(*inputs)
    wide = [x.repeat_interleave(2, 1) for x in others]
    alone = build(label, Shape(2, 6, 23, 4, causal=True), level="operator").double()(q, *wide)
    torch.testing.assert_close(out, alone, rtol=1e-10, atol=1e-11)


def test_gates_that_do_not_fit_are_refused_with_the_remedy_at_the_first_call() -> None:
    (core,) = (one for one in CORES if one.name == "gated-delta")
    q, k, v, beta, decay = drawn(core)

    def told(*inputs: Tensor, **named: Tensor) -> str:
        with pytest.raises(UsageError) as refusal:
            build("gated-delta", SHAPE, level="operator").double()(*inputs, **named)
        return str(refusal.value)

    assert told(q, k, v, beta) == (
        "gated-delta reads beta (B, K, N, 1), log2_decay (B, K, N, 1) after q, k and v, and got 1 tensors there; give "
        "these by place"
    )
    assert told(q, k, v, beta=beta, log2_decay=decay).endswith("got 0 tensors there; give these by place")
    assert told(q, k, v, beta[..., 0], decay) == (
        "gated-delta: beta is (B, K, N, 1), here (2, 3, 23, 1), and not (2, 3, 23)"
    )
    assert told(q, k, v, beta, -decay).startswith(
        "gated-delta: log2_decay is at most 0, log2 of the share of the state"
    )
    assert told(q, k, v, 3 + beta, decay).startswith("gated-delta: beta is 0 to 2, the share of the step towards v; 3.")


def test_gates_of_padded_tokens_may_be_anything_and_later_calls_are_not_looked_at() -> None:
    (core,) = (one for one in CORES if one.name == "gated-delta")
    q, k, v, beta, decay = drawn(core)
    mask = torch.arange(23) < torch.tensor([[15], [23]])
    padded = decay.masked_fill(~mask[:, None, :, None], 7.0)
    module = build("gated-delta", SHAPE, level="operator").double()
    assert module(q, k, v, beta, padded, key_mask=mask).isfinite().all()
    assert not module._forward_pre_hooks
    assert module(q, k, v, 0 * beta - 1, decay).isfinite().all()


def test_an_option_of_the_layer_is_refused_at_level_operator_alone() -> None:
    with pytest.raises(UsageError, match="option 'expand' belongs to the layer; level operator has chunk, form"):
        build("gated-delta:expand=1", SHAPE, level="operator")
    build("gated-delta:expand=1", SHAPE)
    with pytest.raises(UsageError, match="unknown option 'chunks'; did you mean 'chunk'"):
        build("gated-delta:chunks=1", SHAPE, level="operator")


def test_a_suite_refuses_it_at_level_operator_alone() -> None:
    def cells(level: str) -> list[Cell]:
        matrix = {"variant": {"name": "gated-delta", "expand": 1}, "seq_len": 64}
        return expand(Suite.of({"name": "x", "sweeps": [{"name": "s", "level": level, "matrix": matrix}]}, Origin("x")))

    with pytest.raises(SuiteError, match="option 'expand' belongs to the layer; level operator has chunk, form"):
        cells("operator")
    (cell,) = cells("layer")
    assert cell.variant.options == (("expand", 1),)


def test_a_cell_measures_the_core_at_level_operator_and_the_layer_elsewhere() -> None:
    (core,) = (one for one in CORES if one.name == "kda")
    spec = Spec("kda")
    assert Cell("s", "t", spec, SHAPE).entry is core
    assert Cell("s", "t", spec, SHAPE, level="layer").entry is VARIANTS.get("kda")
    assert Cell("s", "t", Spec("sdpa"), SHAPE).entry is VARIANTS.get("sdpa")


@each
@pytest.mark.parametrize("pass_", ["forward", "training", "decode", "generate"])
def test_a_cell_of_it_is_called_with_its_gates(core: Variant, pass_: Pass) -> None:
    call = prepare(Cell("s", "t", Spec(core.name), SHAPE, pass_=pass_, dtype="bfloat16", new_tokens=0))
    first, second = (torch.cat([x.flatten().float() for x in flat(call.on(number)())]) for number in (0, 1))
    assert first.isfinite().all()
    assert not torch.equal(first, second)


def flat(found: object) -> list[Tensor]:
    return [x for x in found if x is not None] if isinstance(found, tuple) else [found]  # type: ignore[list-item]  # one


def test_its_error_is_a_distance_over_several_draws_of_the_gates() -> None:
    cell = Cell("s", "t", Spec("gated-delta"), SHAPE, measure=("error",), inputs=Spec("gaussian"))
    found = measure_error(cell)
    assert (found.kind, found.draws) == ("distance", 5)
    assert found.rel_error_std
    assert measure_error(cell) == found


def test_a_mixer_without_a_core_says_which_have_one() -> None:
    with pytest.raises(Unsupported, match=r"a mixer replaces the whole layer.*operators within: fox, path, "):
        prepare(Cell("s", "t", Spec("gru"), SHAPE))
