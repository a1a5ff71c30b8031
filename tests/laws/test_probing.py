"""What ``attnbench check FILE.py:Class`` finds out about modules that nobody registered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch

from attnbench.errors import Unsupported, UsageError
from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.harness.outside.law_requests import AskModule, examine_module
from attnbench.laws.modules import questions
from attnbench.laws.modules.probed_module import Probe, ProbedModule, subject_of
from attnbench.laws.modules.questions import QUESTIONS, CostGrowth, ModuleAnswers, answer, basics, collected
from attnbench.laws.modules.summary import conclusion, contradictions, lines, named_after

MODULES = Path(__file__).with_name("modules.py")
HARD = Path(__file__).with_name("hard.py")
ASKED = {
    "reads": "who reads whom",
    "between": "how much passes between tokens",
    "pairs": "what it computes",
    "costs": "what it costs",
    "training": "what its backward pass costs",
    "gradient": "whether its gradient is that of its output",
    "idle": "what does nothing",
}


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Sequences of 1,024 tokens in place of 8,192 show how most costs grow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "LONGEST", 1024)
        patch.setattr(questions, "TOKENS", 128)
        patch.setattr(questions, "MOST_DIRECTIONS", 256)
        yield


def hard(name: str, *asked: str) -> ModuleAnswers:
    """Answers to some questions alone."""
    subject = ProbedModule(Probe(f"{HARD}:{name}", "x"))
    return collected(basics(subject), {ASKED[one]: answer(subject, ASKED[one]) for one in asked})


@cache
def found(name: str, call: str = "x", width: int | None = None) -> ModuleAnswers:
    subject = ProbedModule(Probe(f"{MODULES}:{name}", call, width=width))  # type: ignore[arg-type]  # from the table
    return collected(basics(subject), {question: answer(subject, question) for question in QUESTIONS})


def answers(one: ModuleAnswers) -> dict[str, str]:
    return {line.question: line.answer for line in lines(one)}


def test_an_lstm_with_attention_that_has_none_is_told() -> None:
    one = found("AttentionLSTM", "tokens")
    assert not one.pairs.formed
    assert one.state is not None
    assert one.state <= 2 * 16  # the LSTM's own state
    assert not one.sees_future
    assert {name for name, _ in one.idle or ()} == {"score.weight", "score.bias"}
    assert answers(one)["attention"].startswith("none: a recurrence")
    assert contradictions(one) == []
    (said,) = contradictions(one, "softmax")[-1:]
    assert "a recurrence of" in said


def test_an_lstm_that_looks_back_has_attention() -> None:
    one = found("LookingBackLSTM", "tokens")
    assert one.pairs.softmax == 1
    assert one.state is None
    assert contradictions(one, "softmax") == []


def test_a_performer_that_is_a_transformer_is_told() -> None:
    one = found("PerformerLM", "tokens")
    assert one.pairs.fused + one.pairs.softmax == 2
    assert not one.sees_future
    assert one.products is not None
    assert one.products.power == 2
    assert max(one.products.lengths) == 64  # its table of positions ends there
    assert contradictions(one) == []  # a name claims nothing
    (said,) = contradictions(one, "performer")
    assert said.startswith("it is said to be performer, which costs O(n·")
    assert said.endswith("it forms all n × n pairs")
    assert contradictions(one, "performer:features=16") == [said.replace("performer", "performer:features=16")]


def test_a_linformer_that_calls_multi_head_attention_is_told() -> None:
    one = found("LinformerAttention")
    assert one.pairs.softmax + one.pairs.fused == 1
    assert one.sees_future
    assert {name for name, _ in one.idle or ()} == {"E.weight", "E.bias", "F.weight", "F.bias"}
    assert "all n × n pairs" in contradictions(one, "linformer")[0]


@pytest.mark.parametrize("name", ["performer_layer", "linear_layer", "local_layer", "gla_layer"])
def test_what_keeps_its_promise_is_not_accused(name: str) -> None:
    one = found(name, width=16)
    assert not one.pairs.formed
    assert one.products is not None
    assert one.products.power == 1
    assert one.memory is not None
    assert one.memory.power == 1
    assert contradictions(one, name.removesuffix("_layer")) == []


def test_softmax_is_softmax() -> None:
    one = found("softmax_layer", width=16)
    assert one.pairs.softmax == 1
    assert one.products is not None
    assert one.products.power == 2
    assert contradictions(one, "softmax") == []
    assert contradictions(one, "linear") != []
    linear = CostGrowth((128, 256, 512), (10**6, 2 * 10**6, 4 * 10**6))  # as beside a large vocabulary
    assert contradictions(replace(one, products=linear), "softmax") == []


def test_a_product_in_place_is_a_product() -> None:
    assert found("InPlace").pairs.products == 1


def test_a_linear_attention_is_no_softmax() -> None:
    one = found("Efficient")
    assert answers(one)["attention"] == "each token attends to a fixed number of summaries of the whole sequence: 16"
    assert contradictions(one, "softmax") == [
        "it is said to be softmax, which costs O(n²·d); nothing in it grows as n²"
    ]
    assert contradictions(one) == []


def test_exact_attention_in_tiles_is_exact_attention() -> None:
    one = found("chunked_layer", width=16)
    assert not one.pairs.formed
    assert answers(one)["attention"].startswith(
        "no operation forms n × n pairs at once, and products grow as n²: tiles"
    )
    assert contradictions(one, "softmax") == []


def test_a_window_of_a_mask_is_told_from_a_window() -> None:
    masked, real = found("SlidingWindow:masked=true"), found("SlidingWindow")
    assert answers(masked)["attention"].endswith("once in a call; a mask then hides what is not read")
    assert contradictions(masked, "local") == ["it is said to be local, which costs O(n·w·d); it forms all n × n pairs"]
    assert answers(real)["attention"] == "each token attends to a fixed number of keys or summaries: 7"
    assert contradictions(real, "local") == []
    assert masked.reads == real.reads


def test_what_is_made_causal_by_an_option_must_not_see_the_future_and_a_name_may() -> None:
    wrong, right = found("CausalAttention"), found("CausalAttention:past=true")
    assert wrong.sees_future
    assert not right.sees_future
    assert contradictions(wrong) == contradictions(right) == []
    assert contradictions(replace(wrong, claims_past=True)) == ["its options say causal; token 1 changes output 0"]
    assert contradictions(replace(right, claims_past=True)) == []


def test_what_differs_from_call_to_call_is_said_and_looked_at_all_the_same() -> None:
    one = found("Dropping")
    assert answers(one)["repeats"].startswith("no: two calls on the same input differ, in eval mode")
    assert answers(one)["reads"].startswith("each output depends on every token (")
    assert answers(one)["attention"].endswith("once in a call")
    assert "repeats" not in answers(found("Efficient"))
    alone = found("Dropping:alone=true")
    assert not alone.repeats
    assert answers(alone)["reads"].startswith("each output depends only on its own token")


def test_a_softmax_over_words_weighs_no_keys() -> None:
    one = found("LanguageModel", "tokens")
    assert one.pairs.fixed == ()
    assert answers(one)["attention"] == "none: a recurrence or an average"


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("LinearAttention", "linear"),
        ("Linear_Former", "linear"),
        ("LocalConv", None),
    ],
)
def test_the_name_of_a_class_may_ask_for_a_variant(name: str, variant: str | None) -> None:
    entry = named_after(name)
    assert (entry.name if entry else None) == variant


def test_a_layer_that_mixes_nothing_is_told() -> None:
    one = found("identity_layer", width=16)
    assert not one.mixes
    assert answers(one)["attention"] == "none: no token reads another"
    assert "no token reads another" in contradictions(one, "softmax")[-1]


def test_a_recurrence_passes_as_many_numbers_as_it_has_state() -> None:
    one = found("gla_layer", width=16)
    assert one.crossing is not None
    assert all(rank <= 2 * 8 * 8 for _, rank, _ in one.crossing)  # two heads of 8 x 8
    window = found("local_layer", width=16)
    assert window.state is not None
    assert window.state <= 3 * 16
    assert window.reads is not None
    assert window.reads.reach == (3, 0)


def test_one_answer_for_the_sequence() -> None:
    one = found("Pooled")
    assert not one.per_token
    assert one.pairs.pooled == 1
    assert answers(one)["attention"].startswith("pooling")
    assert answers(one)["reads"].startswith("the output depends on each (")


def test_parameters_without_effect_are_named() -> None:
    assert {name for name, _ in found("Dead").idle or ()} == {"unused.weight", "unused.bias", "cancelled"}


def test_what_takes_float32_only_is_looked_at_in_float32() -> None:
    subject = ProbedModule(Probe(f"{MODULES}:Single", "x"))
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
        (f"{MODULES}:Needs", "x", r"or name a function in .*modules.py that makes it"),
        (
            f"{MODULES}:Crossed",
            "x",
            "called with tokens or x alone, and its forward also needs memory; name a class in",
        ),
        (f"{MODULES}:not_a_module", "x", "makes a int, not a torch.nn.Module"),
    ],
)
def test_what_cannot_be_asked_is_one_line(source: str, call: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProbedModule(Probe(source, call))  # type: ignore[arg-type]  # from the table


def test_an_output_that_is_no_sequence_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"expected \(batch, tokens, width\)"):
        ProbedModule(Probe(f"{MODULES}:Scalar", "x"))


@pytest.mark.parametrize(
    ("values", "power", "share"),
    [((10, 20, 40), 1, 0.0), ((1, 4, 16), 2, 1.0), ((7, 9, 13), 1, 0.0), ((3, 10, 36), 2, 8 / 9)],
)
def test_a_cost_is_split_into_its_powers(values: tuple[int, int, int], power: int, share: float) -> None:
    growth = CostGrowth((1, 2, 4), values)
    assert growth.power == power
    assert growth.square_share == pytest.approx(share)


def test_a_cost_whose_square_part_shrinks_is_not_n_squared() -> None:
    lengths = (512, 1024, 2048, 4096, 8192)
    assert CostGrowth(lengths, tuple(n * min(n, 1500) for n in lengths)).power == 1  # what each token takes levels off
    assert CostGrowth(lengths, tuple(n * 41 + n * n // 40 for n in lengths)).power == 2
    assert 1 < CostGrowth(lengths, tuple(n * (n.bit_length() - 1) for n in lengths)).power < 1.3  # n·log n


def test_growth_is_looked_for_to_where_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "LONGEST", 8192)
    levels, late = hard("LevelsOff", "costs"), hard("LateSquare", "costs")
    assert levels.memory is not None
    assert levels.memory.lengths[-1] == 8192
    assert levels.memory.power == 1
    assert late.squares == ["products", "numbers"]
    assert answers(late)["products"].endswith(" FLOPs at n = 8,192, seen from 128 on)")


def test_flops_are_called_flops() -> None:
    growth = hard("Linear", "costs").products
    assert growth is not None
    assert dict(zip(growth.lengths, growth.values, strict=True))[512] == 2 * 512 * 4 * 4
    assert answers(hard("Linear", "costs"))["products"] == "as n (32,768 FLOPs at n = 1,024, seen from 128 on)"


@pytest.mark.parametrize("name", ["LinformerByRows", "LinformerByDistance"])
def test_pairs_without_a_product_of_matrices_cost_n_squared(name: str) -> None:
    one = hard(name, "pairs", "costs")
    assert conclusion(one).startswith("its cost grows as n²")
    assert contradictions(one, "linformer") != []
    assert contradictions(one) == []


def test_a_window_is_looked_past_and_its_range_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one = hard("Window", "reads")
    assert answers(one)["reads"].startswith("each output depends on its token and at most 31 before it (")
    assert answers(one)["reads"].endswith(" of 128 tokens were exchanged)")
    monkeypatch.setattr(questions, "TOKENS", 512)
    assert answers(hard("InBlocks", "reads"))["reads"].startswith(
        "each output depends on its token and at most 47 before it and 47 after it ("
    )


@pytest.mark.parametrize(("size", "most", "state"), [(8, 512, 128), (16, 512, 256), (16, 128, None)])
def test_what_a_probe_looks_for_at_most_is_no_answer(
    size: int, most: int, state: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "MOST_DIRECTIONS", most)
    one = hard(f"State:size={size}", "between")
    assert one.state == state
    assert one.crossing is not None
    assert ("no end was seen" in answers(one)["between tokens"]) == (state is None)
    monkeypatch.setattr(questions, "MOST_DIRECTIONS", 32)
    assert answers(hard("State", "between"))["between tokens"] == (
        "could not be asked: more numbers pass from 4 tokens than were looked for, which is 32"
    )


def test_a_module_that_a_call_changes_for_good_is_made_anew_for_each_length() -> None:
    one = hard("Switching", "pairs", "costs")
    assert one.pairs is not None
    assert not one.pairs.formed
    assert one.pairs.fixed == (8,)
    frozen = hard("Frozen", *ASKED)
    assert frozen.unasked == {}
    assert frozen.pairs is not None
    assert frozen.pairs.formed


def test_lengths_that_a_module_insists_on_are_found() -> None:
    blocks = ProbedModule(Probe(f"{HARD}:InBlocks", "x"))
    assert (blocks.shortest, blocks.unit) == (48, 48)
    one = hard("OneLength", *ASKED)
    assert "growth needs three lengths" in one.unasked["what it costs"]
    assert ASKED["reads"] not in one.unasked
    assert answers(one)["memory"].startswith("could not be asked: growth needs three lengths, each twice")
    assert conclusion(one).startswith("how its cost grows is not fully known: ")


def test_n_before_the_batch_is_found_out_and_examples_that_mix_are_said() -> None:
    subject = ProbedModule(Probe(f"{MODULES}:SequenceFirst", "x"))
    assert subject.turned
    reads = collected(basics(subject), {ASKED["reads"]: answer(subject, ASKED["reads"])}).reads
    assert reads is not None
    assert reads.future is None
    assert any(one.after for one in reads.exchanged)
    assert answers(hard("MixesExamples"))["examples"] == "an example of a batch changes another"


def test_a_token_that_stands_for_none_is_not_asked_with() -> None:
    subject = ProbedModule(Probe(f"{HARD}:Padded", "tokens"))
    assert not (subject.draw(1000) == 1).any()
    assert not collected(basics(subject), {ASKED["reads"]: answer(subject, ASKED["reads"])}).mixes


def test_attention_to_summaries_that_each_query_reads_is_no_pooling() -> None:
    one = hard("Agent", "pairs", "reads", "costs")
    assert answers(one)["attention"] == "each token attends to a fixed number of summaries of the whole sequence: 12"


def test_the_backward_pass_is_looked_at() -> None:
    one = hard("SquareBackward", "pairs", "costs", "training")
    assert "trained_products" in one.squares
    (said,) = contradictions(one, "linear")
    assert "its products of the backward pass grow as n²" in said
    assert answers(hard("Linear", "gradient"))["gradient"] == "that of the output"
    wrong = hard("WrongGradient", "gradient")
    assert "its gradient is not that of the output" in contradictions(wrong, "linear")[0]
    assert contradictions(wrong) == []


def test_a_question_that_cannot_be_asked_says_why_and_leaves_the_others_theirs() -> None:
    one = hard("NoGradient", *ASKED)
    assert set(one.unasked) == {ASKED["between"], ASKED["training"], ASKED["gradient"], ASKED["idle"]}
    assert answers(one)["training"] == "could not be asked: no gradient reaches x or a parameter"
    assert one.reads is not None
    subject = ProbedModule(Probe(f"{MODULES}:Guessing", "x"))
    assert answer(subject, ASKED["reads"]) == {
        "unasked": "two calls on the same input differ, by random numbers that are not torch's"
    }
    assert "products" in answer(subject, ASKED["costs"])


def test_a_question_that_ends_the_process_leaves_the_others_their_answers() -> None:
    settings = Settings(process="as-shipped", dtypes=(), rates=False)
    begun: list[str] = []
    with Worker(settings) as worker:
        one = examine_module(worker, Probe(f"{HARD}:Dies", "x"), 100.0, begun.append)
    assert begun == list(QUESTIONS)
    assert one.memory is not None
    assert "exit" in one.unasked[ASKED["idle"]]


def test_an_answer_survives_its_way_through_json() -> None:
    wanted = Probe(f"{MODULES}:Pooled", "x")
    answers = {}
    for question in QUESTIONS:
        request = AskModule(wanted, question)
        again = AskModule.from_json(json.loads(json.dumps(request.to_json())))
        assert again == request
        answers[question] = request.answered({"found": json.loads(json.dumps(again.found()))})
    known = AskModule(wanted).answered({"found": AskModule(wanted).found()})
    assert replace(collected(known, answers), memory=None) == replace(found("Pooled"), memory=None)
    with pytest.raises(UsageError, match="no such file"):
        AskModule(Probe("nowhere.py:Model", "x")).found()


def test_a_module_that_its_calls_change_is_told_and_has_a_new_module_for_each() -> None:
    one = hard("Counting", "reads", "idle", "gradient")
    assert answers(one)["repeats"].endswith("a call changes what the next one gives, so each question has a new module")
    assert answers(one)["reads"].startswith("each output depends on every token (")
    assert one.idle == ()
    assert one.unasked == {ASKED["gradient"]: "a call changes what the next one gives"}
    alone = ProbedModule(Probe(f"{MODULES}:Dropping:alone=true", "x"))
    assert not alone.stateful


def test_what_writes_into_its_input_and_its_old_output_repeats() -> None:
    one = hard("WritesInput", "reads", "training")
    assert one.unasked == {}
    assert one.repeats
    assert not one.stateful
    assert answers(one)["reads"].startswith("each output depends on every token (")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", ["WeightsFirst", "OfThree", "Masked", "Masked:hides=false", "Zeros", "Reentrant"])
def test_what_wants_or_gives_more_than_x_is_called_as_it_wants(name: str) -> None:
    one = hard(name, "reads", "pairs", "idle", "between")
    assert one.unasked == {}
    assert answers(one)["attention"].startswith("plain softmax attention")
    assert one.crossing is not None
    assert one.crossing[0][1] == 4 * 16
    assert one.idle == ()


def test_numbers_that_are_not_finite_are_said_and_accuse_nobody() -> None:
    one = hard("NotFinite", "reads", "gradient", "idle")
    assert one.repeats
    assert one.apart
    assert answers(one)["reads"] == "could not be asked: 16 of the 2,048 numbers of its output are NaN or infinite"
    assert set(one.unasked) == {ASKED["reads"], ASKED["gradient"], ASKED["idle"]}
    assert contradictions(one, "linear") == contradictions(one, "softmax") == []


def test_whole_blocks_that_no_size_tells_are_found_in_either_layout() -> None:
    subject = ProbedModule(Probe(f"{HARD}:ManyBlocks", "x"))
    assert (subject.turned, subject.shortest, subject.unit, subject.apart) == (True, 56, 56, True)


def test_two_examples_with_the_numbers_of_one_longer_sequence_are_no_layout() -> None:
    subject = ProbedModule(Probe(f"{HARD}:Landmarks", "x"))
    assert (subject.turned, subject.shortest) == (False, 128)


def test_a_size_that_happens_to_be_the_only_length_is_no_pair() -> None:
    one = hard("AsWide", "pairs")
    assert answers(one)["attention"] == (
        "could not be asked: it takes 24 tokens only, and one of its layers or heads is as wide"
    )
    assert contradictions(one, "linear") == []


def test_layers_as_wide_as_two_lengths_are_no_pairs() -> None:
    one = hard("WideAsLengths", "pairs")
    assert one.pairs is not None
    assert not one.pairs.formed
    blocks = hard("WideAsLengths:one=512,other=768,block=256", "pairs", "reads")
    assert answers(blocks)["attention"] == (
        "could not be asked: at each length up to 768 one of its layers or heads is as wide"
    )
    linear = CostGrowth((128, 256, 512), (10, 20, 40))
    for said in ("linear", "softmax"):  # n × n pairs are a small part of what costs 10 there
        assert contradictions(replace(blocks, products=linear, numbers=linear), said) == []


def test_a_table_of_kinds_is_no_vocabulary() -> None:
    subject = ProbedModule(Probe(f"{HARD}:PadsFirst", "tokens"))
    assert (subject.vocab, subject.padding) == (40, [1])
    assert answers(hard_tokens("PadsFirst", "reads"))["reads"].startswith("each output depends on every token (")


def hard_tokens(name: str, *asked: str) -> ModuleAnswers:
    subject = ProbedModule(Probe(f"{HARD}:{name}", "tokens"))
    return collected(basics(subject), {ASKED[one]: answer(subject, ASKED[one]) for one in asked})


def test_a_peak_that_another_part_of_the_call_takes_over_is_no_square() -> None:
    lengths = (256, 512, 1024)
    assert CostGrowth(lengths, (700, 700, 1400)).power is None
    assert CostGrowth((*lengths, 2048), (700, 700, 1400, 2800)).power == 1
    assert CostGrowth((*lengths, 2048), (10, 20, 40, 200)).power is None
    assert CostGrowth((*lengths, 2048), (20, 70, 300, 1200)).power == 2
    assert CostGrowth((*lengths, 2048), (1, 8, 64, 512)).power == 3
    assert CostGrowth(lengths, (7_000, 14_100, 28_600)).power == 2
    assert CostGrowth(lengths, (7_000, 14_100, 28_600), peak=True).power is None  # no fourth length agrees
    one = hard("Peak", "costs")
    assert one.memory is not None
    assert one.memory.peak
    assert one.memory.power == 1
    last = replace(one, memory=CostGrowth(lengths, (700, 700, 1400)))
    assert conclusion(last).startswith("how its cost grows is not fully known: memory: faster from one length to the")


def test_a_slow_module_is_asked_about_fewer_tokens_before_shorter_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "TOKENS", 512)
    monkeypatch.setattr(questions, "SECONDS", 3.0)
    monkeypatch.setattr(questions, "process_time", count(step=0.1).__next__)  # 0.1 s for a call
    told = answers(hard("Window:window=200", "reads"))["reads"]
    assert told.startswith("each output depends on its token and at most 199 before it")
    assert told.endswith("(8 of 512 tokens were exchanged)")


def test_one_token_that_may_be_a_sequence_is_no_evidence_of_a_layout() -> None:
    subject = ProbedModule(Probe(f"{HARD}:Picture", "x"))
    assert (subject.turned, subject.shortest) == (False, 16)
    one = hard("Picture", "reads")
    assert one.mixes
    assert contradictions(one, "local") == []


def test_what_keeps_its_tokens_is_changed_by_a_call_that_the_same_tokens_do_not_show() -> None:
    one = hard("Streaming", "gradient", "reads")
    assert one.stateful
    assert one.unasked == {ASKED["gradient"]: "a call changes what the next one gives"}
    assert contradictions(one, "softmax") == []


def test_what_the_first_tokens_do_not_show_is_looked_for_in_longer_sequences() -> None:
    one = hard("BlindSpot", "idle", "between")
    assert one.idle == ()
    assert answers(one)["between tokens"].startswith("about 4 numbers, however many tokens went before (0, ")


def test_pairs_of_single_operations_are_pairs() -> None:
    one = hard("WithoutProducts", "pairs")
    assert answers(one)["attention"] == "all n × n pairs are formed, without torch's softmax over them: once in a call"
    assert contradictions(one, "linear") == ["it is said to be linear, which costs O(n·d²); it forms all n × n pairs"]


def test_a_few_keys_beside_products_that_grow_as_n_squared_are_not_all() -> None:
    square = replace(hard("Switching", "pairs"), products=CostGrowth((128, 256, 512), (1, 4, 16)))
    assert square.pairs is not None
    assert square.pairs.fixed == (8,)
    assert answers(square)["attention"].startswith("no operation forms n × n pairs at once, and products grow as n²")


def test_weights_that_the_first_call_makes_are_there_for_every_question() -> None:
    subject = ProbedModule(Probe(f"{HARD}:Lazy", "x", width=4))
    assert {name: parts["unasked"] for name in QUESTIONS if "unasked" in (parts := answer(subject, name))} == {}


@pytest.mark.parametrize("name", ["NeedsHalves", "HalvesAlone", "Compiled"])
def test_types_and_compilers_of_an_author_keep_nothing_from_being_asked(name: str) -> None:
    one = hard(name, "reads", "pairs", "idle")
    assert one.unasked == {}
    assert answers(one)["attention"].startswith("plain softmax attention")
    assert answers(one)["reads"].startswith("each output depends on every token (")
    assert contradictions(one, "softmax") == []


def test_exact_attention_reads_every_token_in_long_sequences_as_well() -> None:
    one = hard("HidesKeys", "reads", "pairs")
    (said,) = contradictions(one, "softmax")
    assert said == f"it is said to be softmax; token 0 changes 1 of {one.reads.n if one.reads else 0} outputs"
    assert contradictions(one, "topk") == []
    sharp = hard("Sharp", "reads", "pairs")
    assert sharp.reads is not None
    assert any(e.before + e.after < sharp.reads.n / 2 for e in sharp.reads.exchanged)
    assert contradictions(sharp, "softmax") == []
    assert contradictions(hard("Window:window=200", "reads"), "local") == []


@pytest.mark.parametrize(("by_gain", "zero"), [("true", "gain"), ("false", "out.weight")])
def test_attention_in_a_branch_that_starts_at_zero_is_seen_through_noise(by_gain: str, zero: str) -> None:
    one = hard(f"StartsAtZero:by_gain={by_gain}", "reads", "pairs", "idle")
    assert contradictions(one, "softmax") == []
    assert one.idle == ()
    assert answers(one)["zeros"] == f"small noise in place of {zero}"
    assert "zeros" not in answers(found("InPlace"))


def test_a_mask_that_is_forgotten_in_training_is_seen_whatever_dropout_draws() -> None:
    one = hard("ForgetsItsMask:causal=true", "reads")
    (said,) = contradictions(one)
    assert said == "its options say causal; in training mode token 23 changes output 0"
    assert answers(one)["reads"].startswith("each output depends on its token and all earlier ones (")
    assert hard("Window", "reads").reads.in_training is None  # type: ignore[union-attr]  # it was asked


def test_what_it_cannot_be_made_of_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "functional.py"
    file.write_text("def attention(q, k, v): return (q @ k.mT).softmax(-1) @ v\n")
    with pytest.raises(UsageError) as refused:
        subject_of(Probe(f"{file}:attention"))
    assert "As tokens" not in str(refused.value)
    assert str(refused.value).endswith(
        f"name a class in {file} that calls it: class Own(torch.nn.Module): def forward(self, x): "
        "return attention(x, x, x)"
    )
