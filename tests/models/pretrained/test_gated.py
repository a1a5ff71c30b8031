"""Layers with gates: what their kernel got and gave is what an operator gets from the file and gives."""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")

import transformers

from attnbench.catalogue.build import build
from attnbench.cli.app import main
from attnbench.contract.inputs import doubt, draw_gates, draw_qkv, draw_sizes
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import BETA, CHANNEL_DECAY, CORRECTION, DECAY, SLOT_DECAY, Read, draw_reads
from attnbench.contract.spec import Spec
from attnbench.errors import Exit, Unsupported, UsageError
from attnbench.laws.exact_error import measure_error
from attnbench.models.pretrained.capture import Captured, Wish, capture
from attnbench.models.pretrained.gated_model import GatedModel
from attnbench.models.pretrained.loading import Around, TokenText
from attnbench.suite.cell import Cell
from tests.models.pretrained.families import LLAMA, SMALL, TEXT, make, save

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own making

N = 24
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
RULE = {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_value_heads": 4}
KINDS = ["linear_attention", "full_attention", "linear_attention"]

MADE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "Qwen3-Next": (
        lambda: transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(
                **LLAMA, **EXPERTS, **RULE, head_dim=16, num_experts=2, linear_num_key_heads=2, layer_types=KINDS
            )
        ),
        "gated-delta",
        "torch_chunk_gated_delta_rule",
    ),
    "OLMo hybrid": (
        lambda: transformers.OlmoHybridForCausalLM(
            transformers.OlmoHybridConfig(**LLAMA, **RULE, linear_num_key_heads=4, layer_types=KINDS)
        ),
        "gated-delta",
        "torch_chunk_gated_delta_rule",
    ),
    "Kimi Linear": (
        lambda: transformers.KimiLinearForCausalLM(
            transformers.KimiLinearConfig(
                **SMALL, num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
                v_head_dim=16, num_local_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
                linear_head_dim=16, linear_num_heads=4, layer_types=KINDS, mlp_layer_types=["dense"] * 3,
            )
        ),
        "kda",
        "chunk_kimi_delta_attention",
    ),
    "Mamba-2": (
        lambda: transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                **TEXT, hidden_size=32, num_hidden_layers=2, state_size=16, num_heads=8, head_dim=8, n_groups=2,
                chunk_size=8,
            )
        ),
        "ssd",
        "mamba2_chunk_scan",
    ),
}  # fmt: skip
"""Model -> how to make a tiny one, the operator in it, and the function of the library that is its kernel."""

each = pytest.mark.parametrize("name", MADE)


def made(name: str) -> Any:
    """A tiny model, with q and k so long that the 1e-6 which a kernel adds to their squares is nothing."""
    model = make(MADE[name][0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(100.0 if parameter.ndim == 3 and parameter.shape[1] == 1 else 1.0)
    return model


def text() -> TokenText:
    return TokenText("t", [4 + (7 * i + i * i) % 57 for i in range(40 * N)], N, Around("next"))


def taken(name: str, file: Path, wish: Wish | None = None) -> Captured:
    one = GatedModel(name, made(name), N)
    return capture(one, text(), wish or Wish((), 2, None, "float32", every=True, gates=True), file, "cpu")


def drawn(file: Path, found: Captured, layer: int, reads: tuple[Read, ...], seed: int) -> tuple[Shape, list[Tensor]]:
    inputs = Spec.of("file", {"path": str(file), "layer": layer})
    (_, _, H, N, D), E = found.shape, found.v_shape[4]
    shape = Shape(1, H, N, D, v_dim=E, causal=True)
    return shape, [*draw_qkv(inputs, shape, seed), *draw_gates(inputs, reads, shape, seed)]


@each
def test_the_operator_gives_on_the_captured_tokens_what_the_kernel_gave_in_the_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (_, operator, kernel) = made(name), MADE[name]
    code = sys.modules[type(model).__module__]
    own, answers = getattr(code, kernel), list[Tensor]()

    def recorded(*args: Any, **named: Any) -> Any:
        answer = own(*args, **named)
        out = answer[0] if isinstance(answer, tuple) else answer
        answers.append(out - args[0] * named["D"][:, None] if "D" in named else out)
        return answer

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(code, kernel, recorded)
        for window in text().held_out(2).each():
            model(input_ids=window.tokens, use_cache=False)
    file = tmp_path / "g.safetensors"
    found = taken(name, file)
    assert getattr(code, kernel) is own
    assert found.about["kinds"] == [operator] * 2
    assert found.left_out == ()
    assert len(answers) == 4
    reads = {"gated-delta": (BETA, DECAY), "kda": (BETA, CHANNEL_DECAY), "ssd": (DECAY,)}[operator]
    for layer in range(2):
        for window in range(2):
            shape, inputs = drawn(file, found, layer, reads, window)
            expected = answers[2 * window + layer].transpose(1, 2)
            assert relative_error(build(operator, shape, level="operator")(*inputs), expected) < 1e-5
            other = draw_reads(reads, shape, 0)
            assert relative_error(build(operator, shape, level="operator")(*inputs[:3], *other), expected) > 1e-2


def test_each_head_of_values_has_the_query_and_key_that_it_reads_and_the_file_says_its_gates(tmp_path: Path) -> None:
    file = tmp_path / "g.safetensors"
    found = taken("Qwen3-Next", file)
    assert (found.shape, found.v_shape) == ((2, 2, 4, N, 16), (2, 2, 4, N, 8))
    _, (q, k, *_, beta, decay) = drawn(file, found, 1, (BETA, DECAY), 1)
    for x in (q, k):
        assert torch.equal(x[:, 0], x[:, 1])
        assert not torch.equal(x[:, 1], x[:, 2])
    assert beta.shape == decay.shape == (1, 4, N, 1)
    assert found.about["gates"]["beta"][1] == pytest.approx(
        torch.stack([drawn(file, found, 1, (BETA,), seed)[1][3] for seed in (0, 1)]).mean((0, 1, 3, 4)).tolist()
    )
    assert found.about["logit_std"] == []
    few = taken("Qwen3-Next", file, Wish((1,), 1, 3, "float16", gates=True))
    _, (_, _, _, first) = drawn(file, few, 0, (BETA,), 0)
    assert torch.equal(first, drawn(file, few, 0, (BETA, DECAY), 0)[1][3])
    assert (few.about["layers"], few.shape, first.shape) == ([1], (1, 1, 3, N, 16), (1, 3, N, 1))


def test_a_kernel_that_is_not_the_operator_is_not_captured_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = sys.modules[transformers.Qwen3NextForCausalLM.__module__]
    own = code.torch_chunk_gated_delta_rule

    def unnormed(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **named: Any) -> Any:
        return own(query, key, value, g, beta, **{**named, "use_qk_l2norm_in_kernel": False})

    monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", unnormed)
    with pytest.raises(Unsupported, match=r"layer 0: its kernel's output differs by \S+ from that of gated-delta"):
        taken("Qwen3-Next", tmp_path / "g.safetensors")


class Toy(nn.Module):
    """A model whose layer holds its kernel, as those of older releases do."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.kernel = kernel
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=61))

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        x = self.embedding(input_ids).unflatten(-1, (2, 8))
        y, _ = self.kernel(x, x, v=x, g=-x[..., 0].abs(), beta=x[..., 1].sigmoid())
        return SimpleNamespace(hidden_states=[y])


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, None]:
    q, k = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (q, k))
    state, outputs = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], state))
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t], state) / math.sqrt(q.shape[3]))
    return torch.stack(outputs, 1), None


def test_a_kernel_that_the_layer_holds_is_found_by_its_arguments_and_put_back() -> None:
    toy = Toy(token_by_token)
    one = GatedModel("toy", toy, N)
    assert [(layer.kind, layer.kept, layer.shape) for layer in one.layers] == [
        ("gated-delta", "", Shape(1, 2, N, 8, causal=True, v_dim=8))
    ]
    assert toy.kernel is token_by_token
    with pytest.raises(Unsupported, match="no layer of it calls a function that takes q, k, v, g, beta or x, dt, A"):
        GatedModel("toy", Toy(lambda x, _, **more: (x * more["beta"][..., None], None)), N)


def test_a_variant_gets_the_gates_that_it_reads_and_is_refused_if_they_are_others(tmp_path: Path) -> None:
    file = tmp_path / "g.safetensors"
    found = taken("Qwen3-Next", file)
    inputs, shape = Spec.of("file", {"path": str(file)}), Shape(1, 4, N, 16, v_dim=8, causal=True)
    for reads, said in (
        ((BETA, CORRECTION), f"file:path={file} has the gates beta, log2_decay and no correction, which this variant"),
        ((CHANNEL_DECAY,), r"a log2_decay of width 1, and this variant reads \(B, K, N, D\), log2 of the share of the"),
        ((SLOT_DECAY,), r"a log2_decay of width 1, and this variant reads \(B, K, N, slots\)"),
    ):
        for draw in (draw_gates, draw_sizes_of):
            with pytest.raises(Unsupported, match=said):
                draw(inputs, reads, shape, 0)
    assert [x.shape[-1] for x in draw_sizes(inputs, shape, 0, (BETA, DECAY))] == [16, 16, 8, 1, 1]
    cell = Cell("s", "w", Spec("gated-delta"), shape, measure=("error",), inputs=inputs, error_draws=8)
    assert measure_error(cell).draws == math.prod(found.shape[:2])
    assert measure_error(Cell("s", "w", Spec("delta"), shape, measure=("error",), inputs=inputs)).rel_error


def draw_sizes_of(inputs: Spec, reads: tuple[Read, ...], shape: Shape, seed: int) -> object:
    return draw_sizes(inputs, shape, seed, reads)


def test_a_command_captures_gates_and_a_suite_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(made("Qwen3-Next"), "model")
    few = ["--text", "t.txt", "--length", str(N), "--windows", "2", "--device", "cpu", "--threads", "1"]
    assert main(["capture", "model", "--gates", *few, "--out", "g.safetensors"]) == Exit.OK
    told = capsys.readouterr().out
    assert re.search(r"layer +operator +beta +log2_decay\n +0 +gated-delta +0\.\d+ \(0\.\d+ to 0\.\d+\) +-\d+\.", told)
    sizes = f"seq_len: {N}, heads: 4, head_dim: 16, v_dim: 8, causal: true"
    assert f"in a suite: inputs: file:path=g.safetensors, {sizes}" in told
    assert main(["list", "inputs", "--file", "g.safetensors"]) == Exit.OK
    assert "of width 16, beta of width 1, log2_decay of width 1" in " ".join(capsys.readouterr().out.split())
    matrix = f"{{variant: [gated-delta, kda], inputs: 'file:path=g.safetensors', {sizes}}}"
    Path("s.yaml").write_text(f"name: s\nsweeps:\n  - {{name: e, measure: [error], matrix: {matrix}}}\n")
    assert main(["run", "s.yaml", "--quick", "--threads", "1", "--device", "cpu", "--out", "o"]) == Exit.OK
    (rows,) = Path("o").rglob("results.csv")
    with rows.open() as file:
        found = {row["variant"]: row for row in csv.DictReader(file)}
    assert (found["gated-delta"]["status"], found["gated-delta"]["warnings"]) == ("ok", "")
    assert "has a log2_decay of width 1, and this variant reads (B, K, N, D)" in found["kda"]["reason"]


def test_a_captured_input_without_gates_says_that_they_are_drawn() -> None:
    shape = Shape(1, 9, 16, 64, kv_heads=3, causal=True)
    assert doubt(Spec("smollm2"), shape, (BETA, DECAY)) == "smollm2 has no gates: beta, log2_decay are drawn"
    assert doubt(Spec("smollm2"), shape) == doubt(Spec("gaussian"), shape, (BETA,)) == ""
    assert torch.equal(draw_gates(Spec("smollm2"), (BETA,), shape, 3)[0], draw_reads((BETA,), shape, 3)[0])


def test_gates_that_are_not_laid_out_as_keys_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "own.safetensors"
    qkv = {name: torch.ones(1, 1, 2, 6, 4) for name in "qkv"}
    save_file({**qkv, "beta": torch.ones(1, 1, 2, 6)}, file)
    with pytest.raises(UsageError, match=r"beta has the shape \(1, 1, 2, 6\); expected \(1, 1, 2, 6, 'width'\)"):
        draw_qkv(Spec.of("file", {"path": str(file)}), Shape(1, 2, 6, 4), 0)
