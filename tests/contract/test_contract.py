"""Every variant of the package is held to every law, and works where variants live: in layers and in the encoder."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.rules import broken_option
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import HOME, VARIANTS, No, Variant
from attnbench.errors import Unsupported
from attnbench.laws import LAWS, check_variant
from attnbench.laws.laws import SHAPE, Case, cases, gap
from attnbench.measure.status import Status
from attnbench.models.encoder import Encoder, as_layer
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, ModelSize
from tests.compilers import needs_compiler

PACKAGE = [entry for entry in VARIANTS if entry.make.__module__.startswith("attnbench.catalogue.attention.")]
ALL = [entry for entry in PACKAGE if not entry.traits.compiled]
"""Without what takes seconds for each shape."""

RECURRENT = (
    *("deltaformer", "gsa", "log-linear", "gated-delta", "gated-delta-2"),
    *("comba", "kda", "rwkv7", "mamba2", "mesa"),
)
"""Layers that read both ways by a form of their own."""

LAWFUL = [
    *ALL,
    *(pytest.param(entry, marks=[pytest.mark.slow, needs_compiler]) for entry in PACKAGE if entry not in ALL),
]
"""Compiled variants where there is a compiler."""


# Loading the compiler of flex imports a part of torch that uses another, deprecated one.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def each(entries: list[Variant]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=lambda entry: entry.name)


def spec_of(entry: Variant) -> Spec:
    """The variant in its first setting."""
    return parse_spec(f"{entry.name}:{entry.settings[0]}".rstrip(":"))


# The laws


IN_TURN = ("tracing", "unwritten memory", "low precision", "receptive field", "finite differences")
"""Laws that meet one setting of each variant: they take long. In make test-all they meet every setting, as all do."""

EVERY_OTHER = (
    *("any length", "longer sequences", "inputs untouched", "gradient modes", "causality", "padding", "hidden keys"),
    *("anything in padding", "hidden weights", "blind query", "batch", "heads", "value width", "large inputs", "seed"),
    *("gradients reach", "documents"),
)
"""Laws that meet every other setting. Of random faults in variants the laws found 316, and they find all of these
where these laws and those before meet one setting; without some settings of the remaining laws they miss a few."""

OTHERS = [name for name, law in LAWS.items() if name != "formula" and not law.needs_time]


@cache
def cases_of(name: str) -> list[Case]:
    """All cases of a variant, which know what they claim once they were asked."""
    return list(cases(VARIANTS.get(name)))


def some_of(entry: Variant, law: str) -> list[Case]:
    """The cases that concern a law; of a setting that is one both causal and not, only one of them."""
    first = OTHERS.index(law) + PACKAGE.index(entry)  # or all variants would be causal in the same laws
    by_setting: dict[tuple[Spec, bool], list[Case]] = {}
    for case in cases_of(entry.name):
        if LAWS[law].concerns(case):
            by_setting.setdefault((case.spec, case.operator), []).append(case)
    chosen = [both[place % len(both)] for place, both in enumerate(by_setting.values(), first)]
    at = first % max(1, len(chosen))
    turned = chosen[at:] + chosen[:at]
    if law in IN_TURN:  # one of the layer and one of the operator within
        return [next(case for case in turned if case.operator is one) for one in {case.operator for case in turned}]
    return turned[::2] if law in EVERY_OTHER else turned


def each_with_its_laws() -> pytest.MarkDecorator:
    """A law that concerns no case of a variant would hold whatever the variant does."""
    compiled = [pytest.mark.slow, needs_compiler]
    return pytest.mark.parametrize(
        ("law", "entry"),
        [
            pytest.param(law, entry, id=f"{law}-{entry.name}", marks=compiled if entry.traits.compiled else [])
            for law in OTHERS
            for entry in PACKAGE
            if some_of(entry, law)
        ],
    )


@each_with_its_laws()
def test_it_holds(entry: Variant, law: str) -> None:
    """Laws meet settings, causal or not: all of them but for the laws above. Each is causal in every other law."""
    found = [finding for case in some_of(entry, law) for finding in LAWS[law].examine(case)]
    if not found:  # nothing is claimed, or what is claimed is refused in these cases
        found = list(check_variant(entry, laws=[law]).findings)
    assert [f"{finding.case}: {finding.fault}" for finding in found if not finding.held] == []


@pytest.mark.slow
@each(LAWFUL)
def test_every_law_holds_in_every_case(entry: Variant) -> None:
    report = check_variant(entry, time=False)
    assert report.held, [f"{finding.law}: {finding.case}: {finding.fault}" for finding in report.faults]


ELSEWHERE = {
    "limit to exact": "names options of its own",
    "average": "takes operators, whose values it sets to 1; test_synthesizer.py holds rows of a layer",
}
"""Laws that do not meet every setting that claims what they prove -> why."""


@each(ALL)
def test_a_law_looks_at_each_setting_that_claims_what_it_proves(entry: Variant) -> None:
    settings: dict[tuple[Spec, bool], list[Case]] = {}
    for case in cases_of(entry.name):
        settings.setdefault((case.spec, case.operator), []).append(case)
    unseen = [
        (name, spec.label)
        for name, law in LAWS.items()
        for (spec, _), both in settings.items()
        if name not in ELSEWHERE
        if any(law.claimed(case.traits) for case in both) and not any(law.concerns(case) for case in both)
    ]
    assert unseen == []


@each(LAWFUL)
def test_its_formula_is_written_down_and_gives_its_output(entry: Variant) -> None:
    report = check_variant(entry, laws=["formula"])
    assert report.held, [f"{finding.case}: {finding.fault}" for finding in report.faults]
    assert {finding.case for finding in report.findings} == {
        str(case) for case in cases_of(entry.name) if _possible(case)
    }


def _possible(case: Case) -> bool:
    try:
        case.module()
    except Unsupported:
        return False
    return True


# What a variant says about itself


def test_every_file_with_a_variant_is_named_by_the_package() -> None:
    home = Path(import_module(HOME).__path__[0])
    files = [path for path in home.rglob("*.py") if "\n@register(" in path.read_text(encoding="utf-8")]
    written = {".".join(path.relative_to(home.parents[2]).with_suffix("").parts) for path in files}
    assert written == {entry.make.__module__ for entry in PACKAGE}


@each(PACKAGE)
def test_it_describes_itself_in_one_line_each(entry: Variant) -> None:
    for text in (entry.summary, entry.source, entry.formula, entry.cost):
        assert text
        assert "\n" not in text
    assert len(entry.summary) <= 80
    assert len(entry.cost) <= 20  # so that the list fits 80 columns
    assert entry.make.__doc__ is not None


@each([entry for entry in PACKAGE if entry.family != "reference"])
def test_it_says_what_differs_from_the_paper_or_its_code(entry: Variant) -> None:
    assert "iffers from" in (entry.make.__doc__ or "")


@each(PACKAGE)
def test_every_option_has_a_default_and_says_what_it_is(entry: Variant) -> None:
    for name, option in entry.options.items():
        assert not option.is_required(), name
        assert option.description, name


@each(PACKAGE)
def test_its_settings_and_claims_are_of_options_of_its_own(entry: Variant) -> None:
    assert broken_option(entry, entry.traits, entry.settings) is None
    texts = [*entry.settings, *(text.replace("{n}", "8") for text in entry.traits.exact_with)]
    specs = [parse_spec(f"{entry.name}:{text}" if text else entry.name) for text in texts]
    assert [one.label for one in specs if entry.idle_option(one)] == []


@each(PACKAGE)
def test_what_it_claims_with_an_option_is_another_claim(entry: Variant) -> None:
    claimed = [entry.traits]
    for condition, instead in entry.traits.given:
        assert entry.traits.causal or "causal=" not in condition
        # Two values of one option may claim the same, but neither what is claimed without it.
        assert any(replace(one, **instead) != one for one in claimed)
        claimed.append(replace(claimed[-1], **instead))


def forms(entry: Variant) -> list[str]:
    """Every sentence in which a variant says that it is a form of its own."""
    return [entry.traits.own_form, *(instead.get("own_form", "") for _, instead in entry.traits.given)]


@each(PACKAGE)
def test_where_it_is_a_form_of_its_own_it_says_what_the_source_has(entry: Variant) -> None:
    for text in filter(None, forms(entry)):
        assert "\n" not in text
        assert len(text) <= 160
        assert not text.endswith(".")
        assert "; " in text  # what is here; what is there


@pytest.mark.parametrize(
    ("label", "causal", "whole"),
    [
        ("reformer", True, False),
        ("reformer:members=bucket", True, False),
        ("reformer:members=chunk", True, True),
        ("reformer", False, True),
        ("hyperattention", True, False),
        ("hyperattention", False, True),
        ("sinkhorn", False, False),
        ("sinkhorn:sort=learned", False, True),
        ("sinkhorn:sort=learned", True, False),
        *((name, False, False) for name in ("retnet", "gla", "ssd", "delta", "rfa-gated", "sparse")),
        *((name, True, True) for name in ("retnet", "gla", "ssd", "delta", "rfa-gated", "sparse")),
        *((name, causal, causal) for name in RECURRENT for causal in (False, True)),
        *((name, causal, False) for name in ("perceiver", "memory-compressed", "taylor") for causal in (False, True)),
        ("per-head:parts=local+taylor", False, False),
        ("per-head:parts=local+retnet", False, False),
        ("per-head:parts=local+retnet", True, True),
        ("softmax", True, True),
    ],
)
def test_a_form_of_its_own_depends_on_causality_and_options(label: str, causal: bool, whole: bool) -> None:
    spec = parse_spec(label)
    assert (VARIANTS.get(spec.name).claims(spec, causal=causal).own_form == "") == whole
    record = Record.of(Cell("s", "t", spec, replace(SHAPE, causal=causal)), Status.OK)
    assert (record.own_form == "") == whole


@each(PACKAGE)
def test_what_it_cannot_do_is_refused_with_the_reason(entry: Variant) -> None:
    traits = entry.traits
    cross = replace(SHAPE, kv_len=SHAPE.N + 1)
    biased = replace(SHAPE, bias="alibi")
    causal = replace(SHAPE, causal=True)
    for trait, shape in ((traits.causal, causal), (traits.cross, cross), (traits.bias, biased)):
        if trait:
            build(spec_of(entry), shape)
            continue
        assert isinstance(trait, No)
        assert 10 < len(trait) <= 120
        with pytest.raises(Unsupported) as refusal:
            build(entry.name, shape)
        assert trait in str(refusal.value)
    for trait, asked in ((traits.key_padding, {"key_mask": True}), (traits.decode, {"decode": True})):
        if not trait and (traits.causal or "decode" not in asked):
            assert isinstance(trait, No)
            assert 10 < len(trait) <= 120
            assert trait in str(entry.unsupported_reason(SHAPE, **asked))


@each(PACKAGE)
def test_its_class_opens_with_its_formula(entry: Variant) -> None:
    methods = [name for name, what in vars(entry.make).items() if inspect.isfunction(what)]
    first = next(name for name in methods if name != "__init__")
    # All but the first are what an inherited dense puts together.
    formula = {"dense", "pair_weights", "worth", "read", "plainly", "opened", "plain_gates"}
    formula |= {"forward"} if entry.traits.exact else set()  # whose forward is the formula
    assert first in formula


# Inside a model


@each(ALL)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_it_works_as_a_layer_and_in_the_encoder(entry: Variant, causal: bool) -> None:
    if causal and not entry.traits.causal:
        pytest.skip("not causal")
    case = Case(entry, spec_of(entry), causal)
    x = torch.randn(SHAPE.B, SHAPE.N, SHAPE.C)
    assert as_layer(case.spec, case.shape)(x).shape == x.shape
    model = Encoder(case.spec, case.shape, ModelSize(layers=2, ffn=8, vocab=11)).double()
    tokens = torch.randint(11, (SHAPE.B, SHAPE.N))
    logits = model(tokens)
    assert logits.shape == (SHAPE.B, 2)
    logits.square().sum().backward()
    assert model.tokens[0].weight.grad is not None
    assert 0 < model.tokens[0].weight.grad.abs().max() < torch.inf
    if entry.traits.key_padding:
        mask = torch.arange(SHAPE.N) < torch.tensor([[13], [SHAPE.N]])
        assert gap(model(tokens, key_mask=mask)[:1], model(tokens[:1, :13])) < 1e-9


@each([entry for entry in ALL if entry.traits.decode])
def test_its_layer_decodes_what_it_gives_for_the_whole_sequence(entry: Variant) -> None:
    shape = Shape(batch=2, heads=2, seq_len=9, head_dim=4, causal=True)
    layer = as_layer(spec_of(entry), shape).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    expected = layer(x)
    state = layer.begin(x[:, :5])
    for t in range(5, 9):
        out, state = layer.step(state, x[:, t : t + 1])
        assert gap(out, expected[:, t : t + 1]) < 1e-9
