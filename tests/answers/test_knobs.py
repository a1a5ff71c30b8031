"""Every variant's knob: that it exists, counts, and costs more in the direction that it claims."""

from __future__ import annotations

import pytest

from attnbench.answers.match.search import MOST_COUNTED, knob_of, ladder_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.rules import broken_option
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.traits import Knob, Traits
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import UsageError
from attnbench.harness.inside.call import prepare
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.suite.cell import Cell

SHIPPED = [entry for entry in VARIANTS if entry.make.__module__.startswith("attnbench.catalogue.attention.")]
NONE = {
    "equals softmax attention": {"chunked", "flex", "sdpa", "softmax"},
    "a line to compare with": {"identity", "mean-value"},
    "a large rank takes another algorithm, and the full one none": {"oracle-lowrank"},
    "no option but the size of chunks": {"cosformer", "efficient", "hedgehog", "linear", "retnet", "taylor"},
    "no option": {"fnet", "xca"},
    "it has shares, which are no whole numbers, or counts of two kinds": {
        *("xattention", "flexprefill", "minference", "sparge"),
    },
    "a window of a video has three sides": {"sta"},
    "a band in a video is as wide as the frames of that video": {"radial"},
    "its options have no order by cost, or are those of its parts": {"per-head", "pooling", "sinkhorn", "sparse"},
    "blocks that share a scale cost the same, however many, and so do bits that are emulated": {
        *("quantised", "quantised-cache"),
    },
    "softmax attention until something follows a prompt": {
        *("expected-attention", "h2o", "keydiff", "knorm", "quest", "snapkv", "tova"),
    },
    "the rank of its gate is no accuracy": {"gla", "kda", "rwkv7", "gated-delta-2"},
    "another operator than softmax, with no accuracy to buy": {
        *("hca", "mla"),
        *("additive", "bilinear", "kernel", "location", "monotonic", "rwwn"),
        *("deltaformer", "differential", "fox", "gated-softmax", "mesa", "parallax", "path"),
        *("conv", "hyena", "long-conv", "lstm", "gru", "dense"),
    },
}
TURNED = sorted(
    [entry.name for entry in SHIPPED if entry.traits.knob]
    + [
        *("local:block=16", "sparse:pattern=fixed,length=128", "sparse:pattern=summary,length=128"),
        *("aft:mode=local", "synthesizer:mode=factorized-random", "synthesizer:mode=factorized-dense"),
        *("hyperattention:block=16", "linformer:projection=mean-pool", "memory-compressed:kernel=mean"),
    ]
)
"""Each knob, in each mode that has one."""


def knob(text: str) -> Knob:
    found = knob_of(parse_spec(text))
    assert found is not None
    return found


def test_every_shipped_variant_has_a_knob_or_a_reason_for_having_none() -> None:
    without = {entry.name for entry in SHIPPED if entry.traits.knob is None}
    assert without == set().union(*NONE.values())


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_a_knob_is_an_option_that_takes_whole_numbers(entry: Variant) -> None:
    assert broken_option(entry, entry.traits, entry.settings) is None


@pytest.mark.parametrize("text", TURNED)
def test_what_is_said_to_cost_more_costs_more(text: str) -> None:
    spec = parse_spec(text)
    rungs = ladder_of(spec, knob(text), 256)
    ends = [rungs.values[0], rungs.values[min(len(rungs.values) - 1, 15)]]
    mixer = VARIANTS.get(spec.name).kind == "mixer"
    costs = []
    for value in ends:
        cell = Cell(
            "s", "w", rungs.at(value), Shape(heads=2, seq_len=256, head_dim=16), level="layer" if mixer else "operator"
        )
        call = prepare(cell)
        costs.append((count(call.run).matmul_flops, peak_tensor_bytes(call.run) or 0, call.param_bytes))
    cheap, dear = costs
    assert dear[0] >= cheap[0], "matmul FLOPs"
    assert dear[0] > cheap[0] or max(b - a for a, b in zip(cheap[1:], dear[1:], strict=True)) > 0, "nothing grows"


# Ladders


@pytest.mark.parametrize(
    ("text", "n", "first", "last", "step"),
    [
        ("performer", 4096, 8, 4096, 8),
        ("performer", 100, 8, 96, 8),
        ("performer", 5, 1, 5, 1),
        ("reformer", 4096, 1, 64, 1),
        ("bigbird", 4096, 0, MOST_COUNTED, 1),
        ("thinformer", 4096, 0, 12, 1),
        ("hyperattention", 1024, 8, 1024, 8),
        ("memory-compressed", 64, 64, 1, -1),
        ("aft:mode=local", 64, 8, 64, 8),
    ],
)
def test_a_ladder_holds_the_values_worth_trying(text: str, n: int, first: int, last: int, step: int) -> None:
    values = ladder_of(parse_spec(text), knob(text), n).values
    assert (values[0], values[-1], values.step) == (first, last, step)


def test_a_rung_is_the_variant_with_its_other_options_and_the_value_even_at_its_default() -> None:
    rungs = ladder_of(parse_spec("performer:kernel=hyperbolic"), Knob("features"), 512)
    assert rungs.at(256).label == "performer:features=256,kernel=hyperbolic"


def test_more_than_the_length_is_tried_where_it_is_asked_for() -> None:
    assert ladder_of(Spec("performer"), Knob("features"), 64, most=65536).values[-1] == 65536
    assert ladder_of(Spec("reformer"), Knob("rounds", step=1), 64, most=65536).values[-1] == 64


def test_no_value_at_all_is_told_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="gmlp: ffn must be at least 2, and at most 1 is tried; raise --most"):
        ladder_of(Spec("gmlp"), Knob("ffn"), 64, most=1)


# Claims


@pytest.mark.parametrize(
    ("knob", "said"),
    [
        (Knob("feature"), "knob 'feature': there is no option 'feature'; did you mean 'features'?"),
        (Knob("kernel"), "knob 'kernel': a knob is an option that takes whole numbers, or none"),
        (Knob("beta"), "knob 'beta': a knob is an option that takes whole numbers, or none"),
    ],
)
def test_a_knob_that_is_no_count_is_a_broken_contract(knob: Knob, said: str) -> None:
    performer = VARIANTS.get("performer")
    assert broken_option(performer, Traits(knob=knob), ()) == said
    assert broken_option(performer, Traits(given=(("kernel=relu", {"knob": knob}),)), ()) == said


def test_what_is_exact_has_nothing_to_buy() -> None:
    assert "has no accuracy to buy" in str(Traits(exact=True, knob=Knob("chunk")).problem())
