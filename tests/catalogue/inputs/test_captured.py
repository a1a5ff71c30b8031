from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnbench.catalogue.inputs.captured_qkv import LISTOPS, MINILM, SMOLLM2, Halved, describe
from attnbench.catalogue.inputs.listops_encoder import ListOpsEncoder
from attnbench.contract.inputs import doubt, draw_qkv
from attnbench.contract.problem.reference import exact_attention, mean_of_visible, of_query_heads, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell

S, L, H, N, M, D = 2, 3, 4, 10, 12, 8


def tensors(**replaced: Tensor) -> dict[str, Tensor]:
    q, kv = torch.randn(S, L, H, N, D), torch.randn(S, L, H, M, D)
    return {"q": q, "k": kv, "v": kv + 1, **replaced}


def stored(tmp_path: Path, **replaced: Tensor) -> tuple[str, dict[str, Tensor]]:
    path, content = tmp_path / "own.safetensors", tensors(**replaced)
    save_file({name: tensor.contiguous() for name, tensor in content.items()}, path)
    return str(path), content


def spec(path: str, **options: int) -> Spec:
    return Spec.of("file", {"path": path, **options})


def test_a_draw_is_the_beginning_of_one_sequence_and_layer(tmp_path: Path) -> None:
    path, content = stored(tmp_path)
    drawn = draw_qkv(spec(path, layer=2), Shape(1, 3, 5, D, kv_len=7), seed=1)
    for name, tensor, length in zip("qkv", drawn, (5, 7, 7), strict=True):
        assert torch.equal(tensor, content[name][1:2, 2, :3, :length])


def grouped(tmp_path: Path) -> tuple[str, dict[str, Tensor]]:
    content = {"q": torch.randn(1, 1, 6, 5, 4), "k": torch.randn(1, 1, 2, 5, 4), "v": torch.randn(1, 1, 2, 5, 4)}
    path = str(tmp_path / "grouped.safetensors")
    save_file(content, path)
    return path, content


def test_heads_that_share_keys_in_the_file_share_them_here(tmp_path: Path) -> None:
    path, content = grouped(tmp_path)
    q, k, v = draw_qkv(spec(path), Shape(1, 3, 5, 4, kv_heads=1), seed=0)
    assert torch.equal(q, content["q"][0, :, :3])
    assert torch.equal(k, content["k"][0, :, :1])
    assert torch.equal(v, content["v"][0, :, :1])
    assert doubt(spec(path), Shape(1, 3, 5, 4, kv_heads=1)) == ""


def test_heads_that_share_keys_in_the_file_alone_get_copies_and_a_warning(tmp_path: Path) -> None:
    path, content = grouped(tmp_path)
    shape = Shape(1, 5, 5, 4)
    drawn = draw_qkv(spec(path), shape, seed=0)
    of_keys = [0, 0, 0, 1, 1]  # query heads 0 to 2 share the first, 3 to 5 the second
    for name, tensor, heads in zip("qkv", drawn, (range(5), of_keys, of_keys), strict=True):
        assert torch.equal(tensor, content[name][0][:, list(heads)])
    assert doubt(spec(path), shape) == f"file:path={path}: 3 heads of queries share one of keys there, and 1 here"


def test_heads_that_do_not_share_keys_in_the_file_cannot_share_them_here(tmp_path: Path) -> None:
    path, _ = grouped(tmp_path)
    with pytest.raises(Unsupported, match="3 heads of queries share one head of keys; for 6 heads set kv_heads to 2"):
        draw_qkv(spec(path), Shape(1, 6, 5, 4, kv_heads=3), seed=0)
    own, _ = stored(tmp_path)
    with pytest.raises(Unsupported, match="each head of queries has its own keys; for 4 heads set kv_heads to 4"):
        draw_qkv(spec(own), Shape(1, 4, 5, D, kv_heads=2), seed=0)


def said_causal(tmp_path: Path, metadata: dict[str, str] | None) -> str:
    path = tmp_path / "said.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors().items()}, path, metadata)
    return str(path)


@pytest.mark.parametrize("causal", [False, True])
def test_a_cell_that_is_not_as_causal_as_the_model_is_doubted(tmp_path: Path, causal: bool) -> None:
    path = said_causal(tmp_path, {"attnbench": json.dumps({"causal": causal})})
    there, here = ("causal", "not causal") if causal else ("not causal", "causal")
    wrong, right = Shape(1, H, 5, D, causal=not causal), Shape(1, H, 5, D, causal=causal)
    said = f"captured from attention that is {there}, and this cell is {here}"
    assert doubt(spec(path), wrong) == f"file:path={path}: {said}"
    assert doubt(spec(path), right) == ""


@pytest.mark.parametrize("said", [None, {"attnbench": "no JSON"}, {"attnbench": "[1]"}, {"attnbench": '{"causal": 1}'}])
def test_a_file_that_does_not_say_whether_it_is_causal_is_not_doubted(
    tmp_path: Path, said: dict[str, str] | None
) -> None:
    path = said_causal(tmp_path, said)
    assert {doubt(spec(path), Shape(1, H, 5, D, causal=causal)) for causal in (False, True)} == {""}


def test_the_row_of_an_error_says_what_is_not_as_in_the_model(tmp_path: Path) -> None:
    path = said_causal(tmp_path, {"attnbench": json.dumps({"causal": True})})
    shape = Shape(1, H, N, D)
    for measure in (("error",), ("time", "error"), ("time",)):
        cell = Cell("s", "w", Spec("softmax"), shape, inputs=spec(path), measure=measure, error_draws=1)
        record, _ = run_cell(VisitCell(cell, TimingRules(quick=True)))
        assert record.status is Status.OK, record.reason
        said = "captured from attention that is causal, and this cell is not causal" in record.warnings
        assert said is ("error" in measure)


def test_what_is_drawn_at_random_is_never_doubted() -> None:
    assert doubt(Spec("gaussian"), Shape(1, 4, 5, 8, causal=True, kv_heads=2)) == ""


def test_values_may_be_wider_than_keys(tmp_path: Path) -> None:
    path, content = stored(tmp_path, v=torch.randn(S, L, H, M, D + 3))
    _, _, v = draw_qkv(spec(path), Shape(1, H, N, D, v_dim=D + 3), seed=0)
    assert torch.equal(v, content["v"][0, 0][None, :, :N])
    with pytest.raises(Unsupported, match=f"values of width {D + 3}, not {D}; set v_dim to {D + 3}"):
        draw_qkv(spec(path), Shape(1, H, N, D), seed=0)


def test_consecutive_seeds_see_every_sequence_and_layer_once(tmp_path: Path) -> None:
    path, content = stored(tmp_path)
    drawn = [draw_qkv(spec(path), Shape(1, H, N, D), seed)[0][0] for seed in range(1000, 1000 + S * L)]
    everything = content["q"].flatten(0, 1)
    found = [index for tensor in drawn for index, known in enumerate(everything) if torch.equal(tensor, known)]
    assert sorted(found) == list(range(S * L))


def test_members_of_a_batch_differ(tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    q, _, _ = draw_qkv(spec(path), Shape(S * L, H, N, D), seed=5)
    assert len({tuple(member.flatten().tolist()) for member in q}) == S * L


def test_the_same_seed_gives_the_same_tensors(tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    first, again = (draw_qkv(spec(path), Shape(2, 1, 4, D), 3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_dtypes_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    path, content = stored(tmp_path, **{name: tensor.to(dtype) for name, tensor in tensors().items()})
    q, _, _ = draw_qkv(spec(path, layer=0), Shape(1, H, N, D), 0)
    assert torch.equal(q[0], content["q"][0, 0].float())


def test_other_tensors_in_the_file_are_ignored(tmp_path: Path) -> None:
    path, _ = stored(tmp_path, mask=torch.ones(3))
    draw_qkv(spec(path), Shape(1, 1, 2, D), 0)


def test_the_path_may_be_given_without_its_name(tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    draw_qkv(parse_spec(f"file:{path}"), Shape(1, 1, 2, D), 0)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(1, H + 1, 2, D), "has 4 heads, fewer than 5"),
        (Shape(1, H, N + 1, D), "has 10 positions, fewer than 11"),
        (Shape(1, H, N, D, kv_len=M + 1), "has 12 keys, fewer than 13"),
        (Shape(1, H, N, 2 * D), "has heads of width 8, not 16"),
        (Shape(S * L + 1, H, N, D), r"has 6 \(sequence, layer\) pairs, fewer than batch 7"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shape_that_the_file_cannot_give_is_unsupported(tmp_path: Path, shape: Shape, reason: str) -> None:
    path, _ = stored(tmp_path)
    with pytest.raises(Unsupported, match=reason):
        draw_qkv(spec(path), shape, 0)


def test_one_layer_leaves_fewer_pairs(tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    with pytest.raises(Unsupported, match="has 2 "):
        draw_qkv(spec(path, layer=0), Shape(3, 1, 2, D), 0)


def fails(path: str | Path, **options: int) -> str:
    with pytest.raises(UsageError) as raised:
        draw_qkv(spec(str(path), **options), Shape(1, 1, 2, D), 0)
    message = str(raised.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_a_missing_file_is_named_with_what_is_expected(tmp_path: Path) -> None:
    message = fails(tmp_path / "none.safetensors")
    assert "No such file" in message
    assert "expected safetensors with q (S, L, H, N, D)" in message
    assert "No such file" in fails(Path("~nobody-here/none.safetensors"))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "Is a directory" in fails(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"x" * 5000])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.pt"
    path.write_bytes(content)
    assert "not a readable safetensors file" in fails(path)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "tensors.pt")
    assert "not a readable safetensors file" in fails(tmp_path / "tensors.pt")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    Path(path).write_bytes(Path(path).read_bytes()[:-10])
    assert "not a readable safetensors file" in fails(path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_file({"q": torch.randn(1, 1, 1, 2, D)}, tmp_path / "q.safetensors")
    assert "no tensor k, v;" in fails(tmp_path / "q.safetensors")


@pytest.mark.parametrize(
    "replaced",
    [
        {"q": torch.randn(H, N, D)},
        {"v": torch.randn(S, L, H, M - 1, D)},
        {"k": torch.randn(S, L, H, M + 1, D)},
        {"q": torch.randn(S, L, H + 1, N, D)},
        {"q": torch.randn(S, L, H, 0, D)},
    ],
    ids=["three axes", "fewer values", "k and v differ", "other heads", "empty"],
)
def test_another_layout_is_refused_with_the_shapes_found(tmp_path: Path, replaced: dict[str, Tensor]) -> None:
    path, content = stored(tmp_path, **replaced)
    message = fails(path)
    assert str(tuple(content["q"].shape)) in message
    assert "expected safetensors" in message


def test_whole_numbers_are_refused(tmp_path: Path) -> None:
    path, _ = stored(tmp_path, q=torch.ones(S, L, H, N, D, dtype=torch.int64))
    assert "dtype I64 is not one of F16, BF16, F32, F64" in fails(path)


def test_nan_is_refused(tmp_path: Path) -> None:
    path, _ = stored(tmp_path, v=torch.full((S, L, H, M, D), float("nan")))
    assert "holds NaN or infinity" in fails(path)


def test_a_layer_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path, _ = stored(tmp_path)
    assert "no layer 3, it has 3, counted from 0" in fails(path, layer=3)


def test_the_path_must_be_given() -> None:
    with pytest.raises(UsageError, match="Write file:path="):
        draw_qkv(parse_spec("file"), Shape(1, 1, 2, D), 0)


def test_the_shipped_weights_are_small_and_say_how_they_were_made() -> None:
    assert LISTOPS.stat().st_size <= 3 * 2**20
    with safe_open(LISTOPS, framework="pt") as content:
        about = json.loads(content.metadata()["attnbench"])
    assert about["made_by"] == "python -m attnbench.models.pretrained.listops.captured"
    assert len(about["tokens"]) == 2048
    # It learned something: the model knows more brackets than the best constant.
    assert about["test"]["brackets"] > about["test"]["brackets_majority"] + 0.1


def test_what_the_shipped_encoder_attends_to_is_computed_once_and_rounded_as_when_it_was_captured() -> None:
    with safe_open(LISTOPS, framework="pt") as content:
        tokens = torch.tensor([json.loads(content.metadata()["attnbench"])["tokens"]])
        weights = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  # not a dict
    model = ListOpsEncoder(vocab=16, classes=10, layers=4, heads=2, head_dim=64)
    model.load_state_dict(weights, strict=False)
    shape, captured = Shape(1, 2, 2048, 64), model.capture(tokens)  # in float32, as the files of older versions were
    for layer in range(4):
        for drawn, found in zip(draw_qkv(Spec.of("listops", {"layer": layer}), shape, 0), captured, strict=True):
            rounded = found[:, layer].half().float()
            assert (drawn == rounded).float().mean() > 0.99
            torch.testing.assert_close(drawn, rounded, rtol=2**-9, atol=1e-4)
    again = draw_qkv(Spec.of("listops", {"layer": 0}), shape, 0)
    assert all(map(torch.equal, again, draw_qkv(Spec.of("listops", {"layer": 0}), shape, 0)))


def test_the_shipped_attention_is_structured() -> None:
    for layer in range(4):
        q, k, v = draw_qkv(Spec.of("listops", {"layer": layer}), Shape(1, 2, 1024, 64), 0)
        exact = exact_attention(q[:, :, :256], k, v)
        mean = v.mean(2, keepdim=True).double()
        assert ((exact - mean).norm() / exact.norm()).item() > 0.3


def test_the_shipped_input_says_what_it_has() -> None:
    with pytest.raises(Unsupported, match="listops has 2048 positions, fewer than 4096"):
        draw_qkv(parse_spec("listops"), Shape(1, 2, 4096, 64), 0)


BITS = {
    "smollm2": ("aa1f39299830acad", "3a915b2a81ab0fbd", "7fa9596a1acdc540"),
    "minilm": ("5fb2266b21202bcb", "dbd17e1afab3ff53", "2b9bb08014a0fa11"),
}
"""The first sixteen hex digits of the SHA-256 of q, k and v: the bits on which published errors stand."""
SHIPPED = {
    "smollm2": (SMOLLM2, [1, 3, 9, 1024, 64], 3, True, [0, 15, 29]),
    "minilm": (MINILM, [1, 3, 12, 256, 32], 12, False, [0, 3, 5]),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_language_models_say_where_they_come_from(name: str) -> None:
    path, size, kv_heads, causal, layers = SHIPPED[name]
    with safe_open(path, framework="pt") as content:
        about = json.loads(content.metadata()["attnbench"])
        assert Halved(content, "q").get_shape() == size
        assert Halved(content, "k").get_shape() == [*size[:2], kv_heads, *size[3:]]
    assert (about["made_by"], about["causal"], about["layers"]) == ("attnbench capture", causal, layers)
    assert f"{name}.safetensors" in (path.parent / "NOTICE").read_text(encoding="utf-8")
    assert "Apache License" in (path.parent / "LICENSE-Apache-2.0.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", BITS)
def test_the_bits_of_the_shipped_language_models_are_those_that_errors_were_published_on(name: str) -> None:
    with safe_open(SHIPPED[name][0], framework="pt") as content:
        found = [Halved(content, tensor)[:].view(torch.uint8).numpy().tobytes() for tensor in "qkv"]
    assert tuple(hashlib.sha256(one).hexdigest()[:16] for one in found) == BITS[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_language_models_say_how_sharp_each_head_is(name: str) -> None:
    path, (_, layers, heads, _, width), _, causal, _ = SHIPPED[name]
    with safe_open(path, framework="pt") as content:
        about = json.loads(content.metadata()["attnbench"])
        q, k = (Halved(content, tensor)[:][0, -1].float() for tensor in "qk")
    assert (
        [len(of) for of in about["logit_std"]] == [len(of) for of in about["attention_perplexity"]] == [heads] * layers
    )
    logits = (q @ of_query_heads(k[None], heads)[0].mT * width**-0.5)[-1]
    seen = logits[torch.ones_like(logits, dtype=torch.bool).tril()] if causal else logits
    assert about["logit_std"][-1][-1] == pytest.approx(float(seen.std()), abs=1e-3)


def test_a_file_is_described_without_its_tensors(tmp_path: Path) -> None:
    path, content = stored(tmp_path)
    found = describe(Path(path))
    assert (found.sizes, found.about) == ({name: tensor.shape for name, tensor in content.items()}, {})
    assert describe(MINILM).about["layers"] == [0, 3, 5]
    save_file({"k": torch.zeros(1)}, path)
    with pytest.raises(UsageError, match="no tensor q"):
        describe(Path(path))


def test_the_shipped_language_models_are_small_together() -> None:
    assert SMOLLM2.stat().st_size + MINILM.stat().st_size <= 8 * 2**20


@pytest.mark.parametrize("name", SHIPPED)
def test_language_models_attend_to_a_few_of_their_keys(name: str) -> None:
    _, (_, _, heads, _, width), kv_heads, causal, _ = SHIPPED[name]
    shape = Shape(1, heads, 256, width, causal=causal, kv_heads=kv_heads)
    assert doubt(Spec(name), shape) == ""
    assert "captured from attention that is" in doubt(Spec(name), Shape(1, 3, 256, width, causal=not causal))
    for layer in range(3):
        q, k, v = draw_qkv(Spec.of(name, {"layer": layer}), shape, 0)
        exact = exact_attention(q, k, v, causal=causal)
        trivial = of_query_heads(mean_of_visible(v, 256, causal=causal), heads)
        assert 0.3 < relative_error(trivial, exact) < 2
    with pytest.raises(Unsupported, match=f"{name} has {heads} heads, fewer than 16"):
        draw_qkv(Spec(name), Shape(1, 16, 256, width), 0)
