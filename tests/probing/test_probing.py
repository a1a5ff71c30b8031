"""What ``attnbench check FILE.py:Class`` finds out about modules that nobody registered."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from attnbench.errors import Unsupported, UsageError
from attnbench.probing import Found, Subject, Wanted, contradictions, lines, probe
from attnbench.probing.questions import Growth
from attnbench.probing.verdict import named_after
from attnbench.run.module import ProbeModule

MODULES = Path(__file__).with_name("modules.py")


@cache
def found(name: str, call: str = "x", width: int | None = None) -> Found:
    return probe(Subject(Wanted(f"{MODULES}:{name}", call, width=width)))  # type: ignore[arg-type]  # from the table


def answers(one: Found) -> dict[str, str]:
    return {line.question: line.answer for line in lines(one)}


def test_an_lstm_with_attention_that_has_none_is_told() -> None:
    one = found("AttentionLSTM", "tokens")
    assert not one.pairs.formed
    assert one.state is not None
    assert one.state <= 2 * 16  # the LSTM's own state
    assert not one.sees_future
    assert {name for name, _ in one.idle} == {"score.weight", "score.bias"}
    assert answers(one)["attention"].startswith("none: a recurrence")
    (said,) = contradictions(one, "AttentionLSTM")
    assert "a recurrence of" in said


def test_an_lstm_that_looks_back_has_attention() -> None:
    one = found("LookingBackLSTM", "tokens")
    assert one.pairs.softmax == 1
    assert one.state is None
    assert contradictions(one, "LookingBackLSTM") == []


def test_a_performer_that_is_a_transformer_is_told() -> None:
    one = found("PerformerLM", "tokens")
    assert one.pairs.fused + one.pairs.softmax == 2
    assert not one.sees_future
    assert one.products is not None
    assert one.products.power == 2
    assert max(one.products.lengths) == 64  # its table of positions ends there
    (said,) = contradictions(one, "PerformerLM")
    assert said.startswith("its name says performer, which costs O(n·")
    assert said.endswith("it forms all n × n pairs")


def test_a_linformer_that_calls_multi_head_attention_is_told() -> None:
    one = found("LinformerAttention")
    assert one.pairs.softmax + one.pairs.fused == 1
    assert one.sees_future
    assert {name for name, _ in one.idle} == {"E.weight", "E.bias", "F.weight", "F.bias"}
    assert "all n × n pairs" in contradictions(one, "LinformerAttention")[0]


@pytest.mark.parametrize("name", ["performer_layer", "linear_layer", "local_layer", "gla_layer"])
def test_what_keeps_its_promise_is_not_accused(name: str) -> None:
    one = found(name, width=16)
    assert not one.pairs.formed
    assert one.products is not None
    assert one.products.power == 1
    assert one.memory is not None
    assert one.memory.power == 1
    assert contradictions(one, name) == []


def test_softmax_is_softmax() -> None:
    one = found("softmax_layer", width=16)
    assert one.pairs.softmax == 1
    assert one.products is not None
    assert one.products.power == 2
    assert contradictions(one, "softmax_layer") == []
    assert contradictions(one, "softmax_layer", "linear") != []
    linear = Growth((128, 256, 512), (10**6, 2 * 10**6, 4 * 10**6))  # as beside a large vocabulary
    assert contradictions(replace(one, products=linear), "softmax_layer") == []


def test_a_linear_attention_is_no_softmax() -> None:
    one = found("Efficient")
    assert answers(one)["attention"] == "each token attends to a fixed number of summaries of the whole sequence: 16"
    assert contradictions(one, "x", "softmax") == [
        "it is said to be softmax, which costs O(n²·d); its products grow as n"
    ]
    assert contradictions(one, "Efficient") == []


def test_exact_attention_in_tiles_is_exact_attention() -> None:
    one = found("chunked_layer", width=16)
    assert not one.pairs.formed
    assert answers(one)["attention"].startswith(
        "no operation forms n × n pairs at once, and products grow as n²: tiles"
    )
    assert contradictions(one, "chunked_layer", "softmax") == []


def test_a_window_of_a_mask_is_told_from_a_window() -> None:
    masked, real = found("SlidingWindow:masked=true"), found("SlidingWindow")
    assert answers(masked)["attention"].endswith("once in a call; a mask then hides what is not read")
    assert contradictions(masked, "SlidingWindow") == [
        "its name says local, which costs O(n·w·d); it forms all n × n pairs"
    ]
    assert answers(real)["attention"] == "each token attends to a fixed number of keys: 7"
    assert contradictions(real, "SlidingWindow") == []
    assert masked.reads == real.reads


def test_what_its_name_calls_causal_must_not_see_the_future() -> None:
    wrong, right = found("CausalAttention"), found("CausalAttention:past=true")
    assert contradictions(wrong, "CausalAttention") == ["its name says causal; token 1 changes output 0"]
    assert contradictions(right, "CausalAttention") == contradictions(wrong, "NonCausal_Attention") == []
    assert contradictions(wrong, "NanoGPT") == ["its name says gpt; token 1 changes output 0"]


def test_what_differs_from_call_to_call_is_said_and_looked_at_all_the_same() -> None:
    one = found("Dropping")
    assert answers(one)["repeats"].startswith("no: two calls on the same input differ, in eval mode")
    assert answers(one)["reads"] == "each output depends on every token"
    assert answers(one)["attention"].endswith("once in a call")
    assert "repeats" not in answers(found("Efficient"))
    alone = found("Dropping:alone=true")
    assert not alone.repeats
    assert answers(alone)["reads"] == "each output depends only on its own token"


def test_a_softmax_over_words_weighs_no_keys() -> None:
    one = found("LanguageModel", "tokens")
    assert one.pairs.fixed == ()
    assert answers(one)["attention"] == "none: a recurrence, a window or an average"


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("FAVORAttention", "performer"),
        ("Sliding_Window", "local"),
        ("LocalAttention", "local"),
        ("MultiScaleRetention", "retnet"),
        ("LSHAttention", "reformer"),
        ("LinearAttention", "linear"),
        ("LocalConv", None),
    ],
)
def test_the_name_of_a_class_names_a_variant_also_by_other_words(name: str, variant: str | None) -> None:
    entry = named_after(name)
    assert (entry.name if entry else None) == variant


def test_a_layer_that_mixes_nothing_is_told() -> None:
    one = found("identity_layer", width=16)
    assert not one.mixes
    assert answers(one)["attention"] == "none: no token reads another"
    assert "no token reads another" in contradictions(one, "x", "softmax")[0]


def test_a_recurrence_passes_as_many_numbers_as_it_has_state() -> None:
    one = found("gla_layer", width=16)
    assert one.crossing is not None
    assert all(rank <= 2 * 8 * 8 for _, rank, _ in one.crossing)  # two heads of 8 x 8
    window = found("local_layer", width=16)
    assert window.state is not None
    assert window.state <= 3 * 16
    assert not any(window.reads[-1][:-4])


def test_one_answer_for_the_sequence() -> None:
    one = found("Pooled")
    assert not one.per_token
    assert one.pairs.pooled == 1
    assert answers(one)["attention"].startswith("pooling")
    assert answers(one)["reads"] == "the output depends on every token"


def test_parameters_without_effect_are_named() -> None:
    assert {name for name, _ in found("Dead").idle} == {"unused.weight", "unused.bias", "cancelled"}


def test_what_takes_float32_only_is_looked_at_in_float32() -> None:
    subject = Subject(Wanted(f"{MODULES}:Single", "x"))
    assert subject.dtype == torch.float32
    assert not found("Single").mixes


@pytest.mark.parametrize(
    ("source", "call", "message"),
    [
        ("nowhere.py:Model", "x", "nowhere.py: no such file"),
        (f"{MODULES}:Poold", "x", "no class 'Poold'; did you mean 'Pooled'"),
        (f"{MODULES}:Needs", "x", "Needs needs dim, heads; write .*:Needs:dim=64,heads=64"),
        (f"{MODULES}:Pooled:din=4", "x", "takes no 'din'; did you mean 'dim'"),
        (f"{MODULES}:Pooled:8", "x", "write its options by name"),
        (f"{MODULES}:Pooled", "tokens", "has no embedding to read tokens with; use --call x"),
        (f"{MODULES}:PerformerLM", "x", "called with x .* it raises"),
        (f"{MODULES}:SequenceFirst", "x", "one example changes another; if it takes"),
        (f"{MODULES}:Needs", "x", r"or name a function in .*modules.py that makes it"),
        (
            f"{MODULES}:Crossed",
            "x",
            "called with tokens or x alone, and its forward also needs memory; name a class in",
        ),
        (f"{MODULES}:Guessing", "x", "two calls on the same input differ, by random numbers that are not torch's"),
        (f"{MODULES}:not_a_module", "x", "makes a int, not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_asked_is_one_line(source: str, call: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Subject(Wanted(source, call))  # type: ignore[arg-type]  # from the table


def test_an_output_that_is_no_sequence_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"expected \(batch, tokens, width\)"):
        Subject(Wanted(f"{MODULES}:Scalar", "x"))


@pytest.mark.parametrize(
    ("values", "power", "share"),
    [((10, 20, 40), 1, 0.0), ((1, 4, 16), 2, 1.0), ((7, 9, 13), 1, 0.0), ((3, 10, 36), 2, 8 / 9)],
)
def test_a_cost_is_split_into_its_powers(values: tuple[int, int, int], power: int, share: float) -> None:
    growth = Growth((1, 2, 4), values)
    assert growth.power == power
    assert growth.square_share == pytest.approx(share)


def test_an_answer_survives_its_way_through_json() -> None:
    request = ProbeModule(Wanted(f"{MODULES}:Pooled", "x"))
    again = ProbeModule.from_json(json.loads(json.dumps(request.to_json())))
    assert again == request
    assert request.answered(json.loads(json.dumps(again.answer()))) == found("Pooled")
    with pytest.raises(UsageError, match="no such file"):
        request.answered(ProbeModule(Wanted("nowhere.py:Model", "x")).answer())
