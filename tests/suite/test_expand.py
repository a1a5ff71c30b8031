from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import SuiteError, UsageError
from attnbench.suite.axes import AXES
from attnbench.suite.cell import METHOD_VERSION, Cell, ModelSize, Pretrained
from attnbench.suite.expand import MAX_CELLS, _has_axis, apply_overrides, expand
from attnbench.suite.load import load_suite
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

pytestmark = pytest.mark.usefixtures("small_registry")


def suite_of(*sweeps: dict[str, Any], **rest: Any) -> Suite:
    named = [{"name": f"s{index}", **sweep} for index, sweep in enumerate(sweeps)]
    return Suite.of({"name": "x", "sweeps": named, **rest}, Origin("x.yaml"))


def matrix(**axes: Any) -> dict[str, Any]:
    return {"matrix": {"variant": "softmax", "seq_len": 64, **axes}}


def labels(cells: list[Cell]) -> list[str]:
    return [cell.label for cell in cells]


def test_a_cell_holds_everything_that_the_suite_says() -> None:
    sweep = {
        "level": "model",
        "pass": "training",
        "measure": ["memory", "time"],
        "model": {"layers": 2, "ffn": 8},
        **matrix(variant="performer:features=64", heads=2, head_dim=16, batch=3, dtype="bfloat16", causal=True),
    }
    sweep["matrix"] |= {"bias": "alibi", "seed": 7}
    assert expand(suite_of(sweep), device="cuda:1") == [
        Cell(
            suite="x",
            sweep="s0",
            variant=Spec("performer", (("features", 64),)),
            shape=Shape(batch=3, heads=2, seq_len=64, head_dim=16, causal=True, bias="alibi"),
            level="model",
            pass_="training",
            dtype="bfloat16",
            device="cuda:1",
            seed=7,
            measure=("time", "memory"),
            model=ModelSize(layers=2, ffn=8, vocab=256),
        )
    ]


def test_what_a_suite_leaves_out_is_the_default_of_a_cell() -> None:
    spec = Spec("softmax")
    assert expand(suite_of(matrix())) == [Cell(suite="x", sweep="s0", variant=spec, shape=Shape(seq_len=64))]


def test_the_axis_written_first_varies_slowest() -> None:
    first = suite_of({"matrix": {"variant": ["softmax", "sdpa"], "seq_len": [1, 2]}})
    assert labels(expand(first)) == ["softmax/n1", "softmax/n2", "sdpa/n1", "sdpa/n2"]
    second = suite_of({"matrix": {"seq_len": [1, 2], "variant": ["softmax", "sdpa"]}})
    assert labels(expand(second)) == ["softmax/n1", "sdpa/n1", "softmax/n2", "sdpa/n2"]


def test_cells_are_the_same_every_time() -> None:
    suite = suite_of(matrix(seq_len="1..64", heads=[1, 2]), matrix(batch=[1, 2]))
    assert [cell.cell_id for cell in expand(suite)] == [cell.cell_id for cell in expand(suite)]


def test_a_cell_written_twice_is_one_cell() -> None:
    variants = ["performer", "performer:features=256", "performer:256", {"name": "performer", "kernel": "positive"}]
    assert labels(expand(suite_of(matrix(variant=variants, seq_len="64,32..64")))) == ["performer/n64", "performer/n32"]
    assert expand(suite_of(matrix(kv_len=[None, 64, 64]))) == expand(suite_of(matrix()))


def test_two_sweeps_may_measure_the_same_shape() -> None:
    assert [cell.sweep for cell in expand(suite_of(matrix(), matrix()))] == ["s0", "s1"]


def test_a_profile_replaces_values_on_its_type_of_device_only() -> None:
    suite = suite_of(
        {**matrix(batch=1), "profiles": {"cuda": {"seq_len": 4096}}},
        matrix(),
        profiles={"cuda": {"batch": 32, "seq_len": 1024}, "cpu": {"dtype": "float64"}},
    )
    assert [(c.shape.B, c.shape.N, c.dtype) for c in expand(suite)] == [(1, 64, "float64")] * 2
    assert [(c.shape.B, c.shape.N, c.dtype) for c in expand(suite, device="cuda:0")] == [
        (32, 4096, "float32"),
        (32, 1024, "float32"),
    ]
    assert expand(suite, device="mps") == expand(suite_of(matrix(), matrix()), device="mps")


@pytest.mark.parametrize(
    ("row", "left"),
    [
        ({"variant": "softmax"}, "f64 f256 p64 p256"),
        ({"variant": "performer"}, "s64 s256"),
        ({"variant": {"name": "performer"}}, "s64 s256"),
        (
            {"variant": "performer:features=64"},
            "s64 s256 p64 p256",
        ),
        (
            {"variant": "performer:features=256"},
            "s64 s256 f64 f256",
        ),
        ({"variant": ["softmax", "performer:features=[64,256]"], "seq_len": ">64"}, "s64 f64 p64"),
        ({"seq_len": ">= 64", "variant": "performer"}, "s64 s256"),
        ({"seq_len": [1, 64], "variant": "performer"}, "s64 s256 f256 p256"),
        ({"seq_len": "<=64", "heads": 8, "causal": False, "dtype": "float32", "batch": "!=2"}, "s256 f256 p256"),
        ({"seq_len": "128..256"}, "s64 f64 p64"),
        ({"seq_len": ["<64", "==256"]}, "s64 f64 p64"),
        ({"kv_len": ">64"}, "s64 f64 p64"),
        ({"sweep": "s0", "device": "cpu", "seq_len": 256}, "s64 f64 p64"),
        ({"inputs": "gaussian", "seed": 0, "head_dim": 64, "seq_len": 64}, "s256 f256 p256"),
    ],
)
def test_a_cell_that_meets_every_condition_of_a_row_is_left_out(row: dict[str, Any], left: str) -> None:
    axes = {"variant": ["softmax", "performer:features=[64,256]"], "seq_len": [64, 256]}
    short = {"softmax": "s", "performer:features=64": "f", "performer": "p"}
    cells = expand(suite_of(matrix(**axes), exclude=[row]))
    assert " ".join(f"{short[cell.variant.label]}{cell.shape.N}" for cell in cells) == left


@pytest.mark.parametrize(
    "row",
    [
        {"variant": "sdpa"},
        {"device": "cuda"},
        {"heads": "<8"},
        {"causal": True},
        {"bias": ["alibi", "relative"]},
        {"inputs": "gaussian:logit_std=2"},
    ],
)
def test_a_row_that_no_cell_meets_leaves_all(row: dict[str, Any]) -> None:
    assert len(expand(suite_of(matrix(), exclude=[row]))) == 1


def test_a_row_for_one_sweep_leaves_the_others_alone() -> None:
    suite = suite_of(matrix(), matrix(), exclude=[{"sweep": "s0", "variant": "softmax"}])
    assert [cell.sweep for cell in expand(suite)] == ["s1"]


def test_include_adds_cells_that_exclude_does_not_see() -> None:
    suite = suite_of(
        matrix(variant=["softmax", "sdpa"]),
        matrix(variant="sdpa"),
        exclude=[{"seq_len": ">=128"}],
        include=[{"sweep": "s0", "variant": "sdpa", "seq_len": 128}],
    )
    assert [f"{cell.sweep} {cell.label}" for cell in expand(suite)] == [
        "s0 softmax/n64",
        "s0 sdpa/n64",
        "s0 sdpa/n128",
        "s1 sdpa/n64",
    ]


@pytest.mark.parametrize(
    ("sweep", "row", "left"),
    [
        ({"pass": "decode"}, {"causal": True}, 0),
        ({"pass": "decode"}, {"causal": False}, 1),
        ({"pass": "generate"}, {"new_tokens": 32}, 0),
        ({"pass": "generate"}, {"new_tokens": 0}, 1),
        ({"level": "model", "architecture": "decoder"}, {"causal": True}, 0),
        ({"level": "model", "architecture": "encoder-decoder", "causal": True}, {"causal": True}, 1),
    ],
)
def test_conditions_are_on_what_a_cell_is_and_not_on_what_the_suite_leaves_to_its_pass_and_model(
    sweep: dict[str, Any], row: dict[str, Any], left: int
) -> None:
    axes = {name: sweep.pop(name) for name in [*sweep] if name in AXES}
    kept = {**matrix(variant="sdpa")}
    cells = expand(suite_of({**sweep, **matrix(**axes)}, kept, exclude=[{"sweep": "s0", **row}]))
    assert sum(cell.sweep == "s0" for cell in cells) == left


def test_keys_that_a_causal_pass_does_not_allow_are_told_with_the_line() -> None:
    with pytest.raises(SuiteError, match=r"^x\.yaml:1: causal attention needs as many keys as queries"):
        expand(suite_of({"pass": "decode", **matrix(kv_len=128)}))
    assert len(expand(suite_of({"pass": "decode", **matrix(kv_len=[None, 128])}, exclude=[{"kv_len": 128}]))) == 1


def test_more_cells_than_anyone_wants_are_refused_before_one_is_made() -> None:
    suite = suite_of(matrix(seq_len="1..10000+1", heads="1..1000+1", batch="1..1000+1"))
    started = time.perf_counter()
    with pytest.raises(SuiteError) as refused:
        expand(suite)
    assert str(refused.value) == "x.yaml:1: 10000000000 cells, at most 20000; use fewer values here"
    assert time.perf_counter() - started < 1


def test_the_largest_suite_takes_a_moment() -> None:
    excluded = [{"variant": "softmax", "seq_len": f">={n}"} for n in range(2000, 2100)]
    suite = suite_of(matrix(variant=["softmax", "sdpa"], seq_len="1..1000+1", heads="1..10+1"), exclude=excluded)
    started = time.process_time()
    assert len(expand(suite)) == MAX_CELLS
    assert time.process_time() - started < 10  # some 2 s on an idle core


def test_a_suite_without_cells_is_refused() -> None:
    with pytest.raises(SuiteError) as refused:
        expand(suite_of(matrix(), exclude=[{"variant": "softmax"}]))
    assert str(refused.value) == "x.yaml:1: every cell is excluded; remove a condition"


def test_causal_attention_to_another_sequence_is_refused_unless_excluded() -> None:
    axes = matrix(kv_len=[None, 32], causal=[False, True])
    with pytest.raises(SuiteError) as refused:
        expand(suite_of(axes))
    assert str(refused.value) == (
        "x.yaml:1: causal attention needs as many keys as queries, not 32 and 64; remove kv_len or causal; "
        "or exclude these cells"
    )
    cells = expand(suite_of(axes, exclude=[{"causal": True, "kv_len": 32}]))
    assert [(cell.shape.M, cell.shape.causal) for cell in cells] == [(64, False), (64, True), (32, False)]


def test_a_bias_is_an_axis_like_any_other() -> None:
    axes = matrix(bias=["none", "alibi", "relative"], variant=["softmax", "sdpa"])
    profiles = {"cuda": {"bias": "alibi"}}
    assert len(expand(suite_of(axes, exclude=[{"bias": None}]))) == 4  # "none" in YAML
    suite = suite_of(axes, profiles=profiles, exclude=[{"bias": "relative", "variant": "sdpa"}])
    biases = [(cell.shape.bias, cell.variant.name) for cell in expand(suite)]
    assert biases == [(b, v) for v in ("softmax", "sdpa") for b in ("none", "alibi", "relative")][:-1]
    assert {cell.shape.bias for cell in expand(suite, device="cuda")} == {"alibi"}
    added = suite_of(matrix(), include=[{"bias": "relative", "seq_len": 8}])
    assert [(cell.shape.N, cell.shape.bias) for cell in expand(added)] == [(64, "none"), (8, "relative")]


def test_a_bias_between_two_sequences_is_refused_unless_excluded() -> None:
    axes = matrix(kv_len=[None, 32], bias=["none", "alibi"])
    with pytest.raises(
        SuiteError, match="bias alibi needs as many keys as queries, not 32 and 64; remove kv_len or bias; or exclude"
    ):
        expand(suite_of(axes))
    assert len(expand(suite_of(axes, exclude=[{"bias": "alibi", "kv_len": 32}]))) == 3


def test_a_mask_is_an_axis_like_any_other() -> None:
    masks = [None, "causal", "prefix:8", {"name": "document", "lengths": "3+5"}, {"name": "sliding", "window": [4, 8]}]
    cells = expand(suite_of(matrix(mask=masks)))
    told = [(cell.shape.mask, cell.shape.causal) for cell in cells]
    assert told == [
        ("none", False),
        ("none", True),
        ("prefix:8", True),
        ("document:3+5", False),
        ("sliding:4", False),
        ("sliding:8", False),
    ]
    assert len(expand(suite_of(matrix(mask=masks), exclude=[{"mask": ["sliding:window=4", None]}]))) == 4
    assert len(expand(suite_of(matrix(mask=masks), exclude=[{"causal": True}]))) == 4
    again = [Cell.from_json(json.loads(json.dumps(cell.to_json()))) for cell in cells]
    assert again == cells


@pytest.mark.parametrize("mask", ["document:30+40", "padded:128"])
def test_documents_add_up_to_the_sequence_as_often_as_they_are_repeated(mask: str) -> None:
    words = (
        f"mask {mask}: documents of .* do not add up to 64; give lengths that do, write .*:ragged, or make the length"
    )
    with pytest.raises(SuiteError, match=words.replace("+", "[+]")):
        expand(suite_of(matrix(mask=mask)))
    assert len(expand(suite_of(matrix(mask=["document:64", "padded:16", "document:ragged"])))) == 3


def test_causality_has_two_names_and_one_cell() -> None:
    (one,), (other,) = expand(suite_of(matrix(mask="causal"))), expand(suite_of(matrix(causal=True)))
    assert one.cell_id == other.cell_id


def test_queries_may_be_the_last_tokens_of_more_keys() -> None:
    cells = expand(suite_of(matrix(q_start=[0, 64, 192], causal=True)))
    assert [(cell.shape.N, cell.shape.M) for cell in cells] == [(64, 64), (64, 128), (64, 256)]
    (whole,) = expand(suite_of(matrix(q_start=192, kv_len=256, causal=True)))
    assert whole == cells[2]
    few = expand(suite_of(matrix(q_start=[0, 64, 192], causal=True), exclude=[{"kv_len": ">128"}]))
    assert [cell.shape.M for cell in few] == [64, 128]


def test_compiling_is_an_axis_like_any_other() -> None:
    axes = matrix(compile=[False, True], variant=["softmax", "sdpa"])
    cells = expand(suite_of(axes, exclude=[{"compile": True, "variant": "sdpa"}]))
    assert sorted((cell.variant.name, cell.compile) for cell in cells) == [
        ("sdpa", False), ("softmax", False), ("softmax", True),
    ]  # fmt: skip
    assert [cell.compile for cell in expand(apply_overrides(suite_of(matrix()), {"compile": "true,false"}))] == [
        True,
        False,
    ]


def test_cells_are_called_what_they_were_before_there_were_further_axes() -> None:
    axes = matrix(bias=["none", "alibi", "relative"], compile=[False, True], padding=[0, 0.5])
    plain, *others = expand(suite_of(axes))
    data = plain.to_json()
    assert data["shape"].pop("bias") == "none"
    assert [data["shape"].pop(axis) for axis in ("kv_heads", "qk_heads", "v_dim")] == [None, None, None]
    assert [data["shape"].pop(axis) for axis in ("mask", "q_start", "sink")] == ["none", 0, "none"]
    assert data.pop("compile") is False
    assert data.pop("launch") == "auto"
    assert data.pop("padding") == 0.0
    assert data.pop("new_tokens") == 0
    assert data.pop("kept_prefix") == 0
    assert data.pop("state_dtype") == "auto"
    assert data["shape"].pop("added_tokens") == 0
    assert data["shape"].pop("query_stride") == 1
    assert data.pop("architecture") == "encoder"
    assert data.pop("positions") is None
    assert data.pop("task") is None
    assert data.pop("test_len") is None
    assert data.pop("training") is None
    assert data.pop("fit") == 0
    assert data.pop("pretrained") is None
    assert (data.pop("replaced"), data.pop("tuned"), data.pop("train")) == ("all", 0, "all")
    canonical = json.dumps([METHOD_VERSION, data], sort_keys=True)
    assert plain.cell_id == hashlib.sha256(canonical.encode()).hexdigest()[:16]
    assert len({cell.cell_id for cell in (plain, *others)}) == 12
    assert [Cell.from_json(json.loads(json.dumps(cell.to_json()))) for cell in others] == others


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        expand(suite_of(matrix()), device="cdua")
    assert str(refused.value) == "unknown device 'cdua'; did you mean 'cuda'?"


@pytest.mark.parametrize(
    ("axis", "value", "expected"),
    [
        ("seq_len", "32,128", [32, 128]),
        ("seq_len", "32..128", [32, 64, 128]),
        ("seq_len", "8,32..96+32", [8, 32, 64, 96]),
        ("seq_len", 16, [16]),
        ("seq_len", [16, "32..64"], [16, 32, 64]),
        ("kv_len", "null,32", [None, 32]),
        ("causal", "true,false", [True, False]),
        ("bias", "none,alibi", ["none", "alibi"]),
        ("bias", ["none"], ["none"]),
        ("compile", "false,true", [False, True]),
        ("bias", [None, "alibi"], ["none", "alibi"]),
        ("mask", "none,sliding:4,document:3+4", ["none", "sliding:4", "document:3+4"]),
        ("mask", "sliding:window=[4,8],prefix:2", ["sliding:4", "sliding:8", "prefix:2"]),
        ("dtype", "float64, bfloat16", ["float64", "bfloat16"]),
        ("variant", "sdpa", [Spec("sdpa")]),
        ("variant", "softmax,sdpa", [Spec("softmax"), Spec("sdpa")]),
        (
            "variant",
            "sdpa,performer:features=64,kernel=trig, softmax",
            [Spec("sdpa"), Spec("performer", (("features", 64), ("kernel", "trig"))), Spec("softmax")],
        ),
        (
            "variant",
            "performer:features=[32,64],sdpa",
            [Spec("performer", (("features", 32),)), Spec("performer", (("features", 64),)), Spec("sdpa")],
        ),
        ("variant", ["sdpa", "performer:64"], [Spec("sdpa"), Spec("performer", (("_", 64),))]),
        ("inputs", "gaussian:logit_std=2", [Spec("gaussian", (("logit_std", 2.0),))]),
        ("inputs", "file:a/b.safetensors", [Spec("file", (("_", "a/b.safetensors"),))]),
    ],
)
def test_an_axis_can_be_set_from_the_command_line(axis: str, value: Any, expected: list[Any]) -> None:
    suite = apply_overrides(suite_of(matrix(batch=2)), {axis: value})
    assert suite.sweeps[0].matrix.given() == {
        "variant": [Spec("softmax")],
        "seq_len": [64],
        "batch": [2],
        axis: expected,
    }


def test_what_is_set_wins_over_profiles_and_narrows_include() -> None:
    suite = suite_of(
        {**matrix(), "profiles": {"cuda": {"batch": 4}}},
        profiles={"cuda": {"batch": 32, "heads": 2}},
        include=[{"variant": ["sdpa", "performer:features=64"], "seq_len": [128, 256]}],
    )
    cells = expand(
        apply_overrides(suite, {"batch": "1", "seq_len": 256, "variant": "performer:features=64"}), device="cuda"
    )
    assert [(cell.label, cell.shape.B, cell.shape.H) for cell in cells] == [("performer:features=64/n256", 1, 2)]
    cells = expand(apply_overrides(suite, {"seq_len": 512}))
    assert labels(cells) == ["softmax/n512"]


def test_axes_of_the_operator_level_leave_other_sweeps_alone() -> None:
    layer = {**matrix(), "level": "layer"}
    cells = expand(apply_overrides(suite_of(matrix(), layer), {"inputs": "gaussian:logit_std=2"}))
    assert [cell.inputs.label for cell in cells] == ["gaussian:logit_std=2.0", "gaussian"]
    with pytest.raises(UsageError) as refused:
        apply_overrides(suite_of(layer), {"inputs": "gaussian:logit_std=2"})
    assert (
        str(refused.value) == "--set inputs: only sweeps at level operator have this axis, and 'x' has none; remove it"
    )


def test_lengths_may_be_written_as_figures_write_them() -> None:
    suite = suite_of(matrix(seq_len=["1k", "2k..8k"]), exclude=[{"seq_len": ">=8k"}, {"seq_len": "2k"}])
    assert [cell.shape.N for cell in expand(suite)] == [1024, 4096]
    for value, lengths in (("16k", [16384]), ("512,1k", [512, 1024]), ("1k..4k", [1024, 2048, 4096])):
        suite = apply_overrides(suite_of(matrix()), {"seq_len": value})
        assert [cell.shape.N for cell in expand(suite)] == lengths


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("seq_lem", "1", "unknown axis 'seq_lem'; did you mean 'seq_len'?"),
        (
            "zzz",
            "1",
            "unknown axis 'zzz'; write variant, seq_len, kv_len, q_start, heads, kv_heads, qk_heads, head_dim, v_dim, "
            "batch, dtype, causal, mask, bias, sink, compile, launch, padding, new_tokens, kept_prefix, state_dtype, "
            "inputs, added_tokens, query_stride, architecture, positions, task, test_len, learning_rate, replaced, "
            "tuned, train or seed",
        ),
        ("variant", "perfomer", "--set variant: unknown variant 'perfomer'; did you mean 'performer'?"),
        ("variant", "", "--set variant: '' is not a name; write at most 64 letters, digits, '.', '_' and '-'"),
        ("heads", "0", "--set heads: 'heads' must lie between 1 and 1048576, got 0; write a number in between"),
        ("seq_len", [], "--set seq_len: 'seq_len' is an empty list; give at least one value"),
        ("seq_len", "16K", "--set seq_len: 'seq_len' must be whole numbers, got the text '16K'; write 1024 or 1k or "
         "512,1024 or 1024..16384 (doubling) or 1024..4096+1024 (steps)"),
        ("dtype", "float23", "--set dtype: 'dtype' cannot be 'float23'; "
         "did you mean 'float32'?"),
        ("bias", "yes", "--set bias: 'bias' cannot be 'yes'; write none, alibi or relative"),
        ("causal", "yes", "--set causal: 'causal' cannot be 'yes'; write true or false"),
    ],
)  # fmt: skip
def test_an_axis_that_cannot_be_set_is_refused(axis: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        apply_overrides(suite_of(matrix()), {axis: value})
    assert str(refused.value) == message


def test_setting_an_axis_leaves_the_suite_as_it_was() -> None:
    suite = suite_of(matrix(), profiles={"cuda": {"batch": 32}})
    before = suite.to_yaml()
    apply_overrides(suite, {"batch": "4", "seq_len": "1"})
    assert suite.to_yaml() == before


def test_editors_get_a_schema_in_which_ranges_are_legal() -> None:
    axis = Suite.model_json_schema()["$defs"]["Matrix"]["properties"]["seq_len"]
    assert axis["anyOf"][0] == {"type": ["integer", "string"]}


def from_text(tmp_path: Path, text: str) -> Suite:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    return load_suite(file)


def line_of(refused: pytest.ExceptionInfo[BaseException]) -> str:
    """``4: what is wrong``."""
    return str(refused.value).partition("x.yaml:")[2]


TWO_SWEEPS = """name: x
sweeps:
  - name: one
    matrix: {variant: softmax, seq_len: 64}
  - name: two
    matrix:
      variant: softmax
      seq_len: 64
"""


def test_a_mistake_that_only_the_cells_show_is_told_with_the_line_of_its_cause(tmp_path: Path) -> None:
    with pytest.raises(SuiteError) as refused:
        expand(from_text(tmp_path, f"{TWO_SWEEPS}exclude:\n  - seq_len: '>=1'\n"))
    assert line_of(refused) == "9: every cell is excluded; remove a condition"
    with pytest.raises(SuiteError) as refused:
        expand(
            from_text(tmp_path, TWO_SWEEPS.replace("seq_len: 64\n", "seq_len: 1..10000+1\n      heads: [1, 2, 3]\n"))
        )
    assert line_of(refused) == "6: 30001 cells, at most 20000; use fewer values here"
    text = TWO_SWEEPS.replace("seq_len: 64\n", "seq_len: 64\n      kv_len: 3\n      causal: true\n")
    with pytest.raises(SuiteError) as refused:
        expand(from_text(tmp_path, text))
    assert line_of(refused).startswith("6: causal attention needs as many keys as queries")
    with pytest.raises(SuiteError) as refused:
        expand(from_text(tmp_path, f"{TWO_SWEEPS}include:\n  - {{sweep: two, kv_len: 3, causal: true}}\n"))
    assert line_of(refused).startswith("6: causal attention needs as many keys as queries")
    text = TWO_SWEEPS.replace("      variant: softmax\n", "      variant: [softmax, none]\n")
    with pytest.raises(SuiteError) as refused:
        expand(from_text(tmp_path, text))
    assert line_of(refused) == (
        "7: 'variant': none is a trained model as it is; write level: pretrained, or another variant"
    )


def test_cells_of_all_sweeps_and_of_included_rows_are_counted_together() -> None:
    one, two = matrix(seq_len="1..7500+1", heads=[1, 2]), matrix(seq_len="1..5001+1")
    with pytest.raises(SuiteError, match="20001 cells, at most 20000"):
        expand(suite_of(one, two))
    with pytest.raises(SuiteError, match="20001 cells, at most 20000"):
        expand(suite_of(one, include=[{"seq_len": "1..5001+1", "heads": 1}]))
    with pytest.raises(SuiteError, match="30000 cells, at most 20000"):
        expand(suite_of(one, profiles={"cuda": {"heads": [1, 2, 3, 4]}}), device="cuda:0")
    many = {"seq_len": "1..10000+1", "heads": [1, 2, 3]}
    assert len(expand(suite_of(matrix(), profiles={"cuda": many}))) == 1


def test_draws_of_an_error_and_sizes_of_a_model_are_those_of_the_sweep() -> None:
    drawn = {**matrix(), "measure": ["error"], "error_draws": 7}
    assert [(cell.error_draws, cell.model, cell.training) for cell in expand(suite_of(drawn))] == [(7, None, None)]
    (whole,) = expand(suite_of({**matrix(), "level": "model"}))
    assert whole.model == ModelSize()
    (layer,) = expand(suite_of({**matrix(), "level": "layer"}))
    assert layer.model is None


def test_an_included_row_stands_in_the_sweeps_that_it_names_with_the_rest_of_their_axes() -> None:
    suite = suite_of(
        matrix(heads=2),
        matrix(heads=4),
        include=[{"seq_len": 128}, {"sweep": ["s1"], "heads": [1, 8]}],
    )
    assert [(cell.sweep, cell.shape.H, cell.shape.N) for cell in expand(suite)] == [
        ("s0", 2, 64),
        ("s0", 2, 128),
        ("s1", 4, 64),
        ("s1", 4, 128),
        ("s1", 1, 64),
        ("s1", 8, 64),
    ]


def test_an_included_axis_means_something_only_in_sweeps_that_take_it() -> None:
    generated = {**matrix(), "pass": "generate"}
    suite = suite_of(matrix(), generated, include=[{"seq_len": 8, "new_tokens": 5}])
    assert [(cell.sweep, cell.shape.N, cell.new_tokens) for cell in expand(suite)] == [
        ("s0", 64, 0),
        ("s0", 8, 0),
        ("s1", 64, 32),
        ("s1", 8, 5),
    ]
    said = "x.yaml:1: 'new_tokens' does nothing without pass: generate or decode; remove it"
    for sweep in ([], "s0"):
        with pytest.raises(SuiteError) as refused:
            suite_of(matrix(), *[generated] * bool(sweep), include=[{"sweep": sweep, "new_tokens": 5}])
        assert str(refused.value) == said


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1"])
def test_a_row_for_a_type_of_device_leaves_others_alone(device: str) -> None:
    suite = suite_of(matrix(heads=[1, 2]), exclude=[{"device": "cuda", "heads": 2}])
    assert [cell.shape.H for cell in expand(suite, device=device)] == ([1, 2] if device == "cpu" else [1])


def test_a_refused_value_names_the_option_that_was_typed() -> None:
    for options, option in (
        (None, "--set dtype"),
        ({"dtype": "--dtype"}, "--dtype"),
        ({"heads": "--heads"}, "--set dtype"),
    ):
        with pytest.raises(UsageError) as refused:
            apply_overrides(suite_of(matrix()), {"dtype": "float23"}, options=options)
        assert str(refused.value) == f"{option}: 'dtype' cannot be 'float23'; did you mean 'float32'?"


SWEEPS: dict[str, dict[str, Any]] = {
    "operator": {"matrix": {}},
    "layer": {"level": "layer", "matrix": {}},
    "model": {"level": "model", "matrix": {"architecture": ["encoder"]}},
    "two halves": {"level": "model", "matrix": {"architecture": ["encoder", "encoder-decoder"]}},
    "task": {"level": "model", "matrix": {"task": ["copy"]}},
    "score": {"level": "model", "pass": "training", "measure": ["score"], "matrix": {"task": ["copy"]}},
    "generated": {"pass": "generate", "matrix": {}},
    "decoded": {"pass": "decode", "matrix": {}},
}
OPERATORS = {"operator", "generated", "decoded"}


@pytest.mark.parametrize(
    ("only", "owners"),
    [
        ("", set(SWEEPS)),
        ("operator", OPERATORS),
        ("cross", {*OPERATORS, "two halves"}),
        ("layer", {"layer", "model", "two halves", "task", "score"}),
        ("model", {"model", "two halves", "task", "score"}),
        ("task", {"task", "score"}),
        ("score", {"score"}),
        ("generate", {"generated", "decoded"}),
        ("steps", {"generated", "decoded"}),
    ],
)
def test_an_axis_is_set_in_the_sweeps_where_it_means_something(only: str, owners: set[str]) -> None:
    axes = [name for name, axis in AXES.items() if axis.only == only]
    assert axes
    for axis in axes:
        sweeps = {name: suite_of({**sweep, **matrix(**sweep["matrix"])}).sweeps[0] for name, sweep in SWEEPS.items()}
        assert {name for name, sweep in sweeps.items() if _has_axis(sweep, axis)} == owners


@pytest.mark.parametrize(
    ("axis", "value", "owners"),
    [
        ("kv_len", 3, "at level operator or of an encoder-decoder"),
        ("added_tokens", 3, "at level layer or model"),
        ("architecture", "decoder", "at level model"),
        ("task", "copy", "with a task"),
        ("learning_rate", 0.1, "that measure a score"),
        ("test_len", 128, "that measure a score"),
        ("new_tokens", 3, "with pass: generate or decode"),
        ("kept_prefix", 3, "with pass: generate"),
        ("state_dtype", "bfloat16", "with pass: decode, stepwise or generate"),
    ],
)
def test_an_axis_that_no_sweep_has_is_refused_with_those_that_would(axis: str, value: Any, owners: str) -> None:
    level = "operator" if axis == "added_tokens" else "layer"
    with pytest.raises(UsageError) as refused:
        apply_overrides(suite_of({**matrix(), "level": level}), {axis: value})
    told = f"--set {axis}: only sweeps {owners} have this axis, and 'x' has none; remove it"
    assert str(refused.value) == told


def test_the_architecture_is_set_before_the_keys_that_depend_on_it() -> None:
    suite = apply_overrides(
        suite_of({**matrix(), "level": "model"}), {"kv_len": "32", "architecture": "encoder-decoder"}
    )
    assert [(cell.architecture, cell.shape.M) for cell in expand(suite)] == [("encoder-decoder", 32)]


def test_rows_that_do_not_name_an_axis_stay_as_they_are_when_it_is_set() -> None:
    include = [{"heads": 2}, {"variant": [{"name": "performer", "features": 64}, "sdpa"], "batch": 3}]
    suite = apply_overrides(suite_of(matrix(), include=include), {"variant": "performer:features=64"})
    assert [row.given() for row in suite.include] == [
        {"heads": [2]},
        {"variant": [Spec("performer", (("features", 64),))], "batch": [3]},
    ]
    suite = apply_overrides(suite_of(matrix(), include=include), {"heads": 4})
    assert [row.given() for row in suite.include] == [
        {"variant": [Spec("performer", (("features", 64),)), Spec("sdpa")], "batch": [3]}
    ]
    assert suite.sweeps[0].matrix.heads == [4]


def test_what_is_set_takes_the_place_of_every_profile_of_the_suite_and_of_a_sweep() -> None:
    profiles = {"cuda": {"batch": 4, "heads": 2}, "cpu": {"batch": 5}}
    suite = suite_of({**matrix(), "profiles": {"mps": {"batch": 6}}}, profiles=profiles)
    changed = apply_overrides(suite, {"batch": 1})
    for device, heads in (("cpu", 8), ("cuda", 2), ("mps", 8)):
        assert [(cell.shape.B, cell.shape.H) for cell in expand(changed, device=device)] == [(1, heads)]


TRAINED = {**matrix(variant=["none", "sdpa"]), "level": "pretrained", "measure": ["time", "loss"], "model": "listops"}


def test_a_sweep_over_a_trained_model_has_the_axes_that_the_model_leaves_open_alone() -> None:
    (sweep,) = suite_of(TRAINED).sweeps
    axes = {axis for axis in AXES if _has_axis(sweep, axis)}
    sizes = {"variant", "seq_len", "heads", "kv_heads", "head_dim", "batch", "dtype", "causal", "seed"}
    assert axes == sizes | {"replaced", "tuned", "train"}


def test_what_is_set_holds_for_a_trained_model_too() -> None:
    suite = apply_overrides(suite_of(TRAINED, matrix()), {"seq_len": "16,32", "dtype": "bfloat16", "padding": "0.5"})
    assert [(cell.sweep, cell.label, cell.dtype, cell.padding) for cell in expand(suite)] == [
        ("s0", "none/n16", "bfloat16", 0.0),
        ("s0", "none/n32", "bfloat16", 0.0),
        ("s0", "sdpa/n16", "bfloat16", 0.0),
        ("s0", "sdpa/n32", "bfloat16", 0.0),
        ("s1", "softmax/n16", "bfloat16", 0.5),
        ("s1", "softmax/n32", "bfloat16", 0.5),
    ]


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({}, Pretrained("listops", "", 16)),
        ({"windows": 8, "text": "a.txt"}, Pretrained("listops", "a.txt", 8)),
        ({"measure": ["time"]}, Pretrained("listops", "", 0)),
    ],
)
def test_a_cell_says_which_trained_model_reads_what_and_how_many_windows_of_it_for_a_loss(
    changes: dict[str, Any], trained: Pretrained
) -> None:
    assert [cell.pretrained for cell in expand(suite_of({**TRAINED, **changes}))] == [trained] * 2


def test_the_largest_number_of_steps_is_that_of_the_training_and_what_is_trained_means_nothing_without_one() -> None:
    trained = {**TRAINED, "measure": "loss", "tuning": {"learning_rate": 0.01, "redraw": 3}}
    trained["matrix"] = {**TRAINED["matrix"], "tuned": [0, 9, 4], "train": "variant", "replaced": ["0+2", 1, "all"]}
    cells = expand(suite_of(trained))
    assert {cell.pretrained for cell in cells} == {Pretrained("listops", "", 16, 9, 0.01, 3)}
    assert {(cell.tuned, cell.replaced, cell.train) for cell in cells} == {
        (steps, which, "variant") for steps in (0, 9, 4) for which in ("0+2", "1", "all")
    }
    untrained = {**TRAINED, "matrix": {**TRAINED["matrix"], "train": ["variant", "all"]}}
    assert [(cell.train, cell.label) for cell in expand(suite_of(untrained))] == [
        ("all", cell.label) for cell in expand(suite_of(TRAINED))
    ]


@pytest.mark.parametrize(
    ("changes", "axes", "said"),
    [
        ({}, {"replaced": "first"}, "'replaced' cannot be 'first'; write all, a layer such as 3, or 0.5"),
        ({}, {"replaced": True}, "'replaced' cannot be true"),
        ({}, {"tuned": 5}, "'tuned' trains a model, which is not timed; write measure: loss alone"),
        ({"measure": "loss", "tuning": {}}, {}, "'tuning' does nothing without 'tuned' in the matrix; remove it"),
        ({"measure": "loss", "tuning": {"rate": 1}}, {"tuned": 5}, "unknown key 'rate'"),
    ],
)
def test_what_is_not_trained_after_a_swap_is_refused(changes: dict[str, Any], axes: dict[str, Any], said: str) -> None:
    with pytest.raises(SuiteError, match=said):
        suite_of({**TRAINED, **changes, "matrix": {**TRAINED["matrix"], **axes}})


def test_after_set_a_trained_model_is_not_timed_either() -> None:
    with pytest.raises(SuiteError, match="'tuned' trains a model, which is not timed"):
        apply_overrides(suite_of(TRAINED), {"tuned": "0,5"})


def test_positions_that_are_set_take_the_place_of_those_of_the_model_and_leave_its_other_sizes() -> None:
    model = {"level": "model", "model": {"positions": "rotary", "layers": 2}}
    for axes, positions in (({}, "rotary"), ({"batch": 3}, "rotary"), ({"positions": "none"}, "none")):
        (cell,) = expand(apply_overrides(suite_of({**matrix(), **model}), axes))
        assert cell.model is not None
        assert cell.model.layers == 2
        assert (cell.positions or cell.model.positions) == positions


def test_of_two_mistakes_the_one_that_was_typed_first_is_told() -> None:
    wrong = {"seq_len": "short", "dtype": "float23"}
    for typed in (wrong, dict(reversed(wrong.items()))):
        first = next(iter(typed))
        with pytest.raises(UsageError, match=rf"^--set {first}: "):
            apply_overrides(suite_of(matrix()), typed)


def test_a_suite_in_which_an_axis_was_set_still_knows_its_file() -> None:
    suite = apply_overrides(suite_of(matrix(causal=True)), {"kv_len": 32})
    with pytest.raises(SuiteError, match=r"^x\.yaml:1: causal attention needs as many keys as queries"):
        expand(suite)


def test_cells_name_each_option_and_none_at_its_default() -> None:
    suite = apply_overrides(suite_of(matrix()), {"variant": ["performer:64", "performer:features=64,kernel=positive"]})
    (cell,) = expand(suite)
    assert cell.variant == Spec("performer", (("features", 64),))


def test_axes_are_set_before_variants_are_known_and_names_are_taken_as_they_stand() -> None:
    data = {"name": "x", "sweeps": [{"name": "s", "matrix": {"variant": "mine:speed=3", "seq_len": 64}}]}
    asked = {"variant": "yours:path=a:b=c,speed=3,other=d:e=f,theirs", "seq_len": 8}
    suite = apply_overrides(Suite.of(data, Origin()), asked, names=False)
    yours = Spec("yours", (("other", "d:e=f"), ("path", "a:b=c"), ("speed", 3)))
    assert suite.sweeps[0].matrix.given() == {"variant": [yours, Spec("theirs")], "seq_len": [8]}


@pytest.mark.parametrize(
    ("positions", "left"), [("learned", "s1 s2"), ("none", "s0 s2"), ("rotary", "s0 s1"), ("sinusoid", "s0 s1 s2")]
)
def test_a_row_without_positions_in_its_matrix_has_those_of_its_level(positions: str, left: str) -> None:
    model = {**matrix(), "level": "model"}
    sweeps = (model, matrix(), {**model, "model": {"positions": "rotary"}})
    cells = expand(suite_of(*sweeps, exclude=[{"positions": positions}]))
    assert " ".join(cell.sweep for cell in cells) == left


def test_cells_of_one_shape_share_it() -> None:
    one, other = expand(suite_of(matrix(variant=["softmax", "sdpa"])))
    assert one.shape is other.shape
