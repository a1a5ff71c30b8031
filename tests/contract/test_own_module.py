"""A module of a user's file, measured as it is beside the variants that are shipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnbench.catalogue.build import build
from attnbench.cli.check import _verdict
from attnbench.contract.plugins import own_module
from attnbench.contract.plugins.discovery import load, provenance, with_modules
from attnbench.contract.plugins.module_source import ModuleSource
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.outside.visit import HoldSetting
from attnbench.laws import LAWS, check_variant
from attnbench.suite.cell import Cell
from tests.forked import forks

MODULES = """
import torch
from torch import nn


class Projected(nn.Module):
    def __init__(self, dim, seq_len, rank=4, causal=False):
        super().__init__()
        self.qkv, self.rows, self.causal = nn.Linear(dim, 3 * dim), nn.Linear(seq_len, rank), causal

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q @ self.rows(k.mT)).softmax(-1) @ self.rows(v.mT).mT, None)


class Fixed(nn.Module):
    def __init__(self, wide=32):
        super().__init__()
        self.linear = nn.Linear(wide, wide)

    def forward(self, x):
        return {"output": self.linear(x).cumsum(1)}


class Short(nn.Module):
    def forward(self, x):
        return x[:, 1:]


class Blocks(nn.Module):
    def __init__(self, dim, block_size=4, width=3, length=2, hidden_dim=8, channels=5):
        super().__init__()
        self.said = [block_size, width, length, hidden_dim, channels]

    def forward(self, x):
        return x


class Split(nn.Module):
    def __init__(self, dim, h=8):
        super().__init__()
        self.qkv, self.h = nn.Linear(dim, 3 * dim), h

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (self.h, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Weighted(nn.Module):
    def __init__(self, dim, first=True, only=0):
        super().__init__()
        self.qk, self.v, self.first, self.only = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim), first, only

    def forward(self, x):
        assert self.only in (0, x.shape[1])
        q, k = self.qk(x).chunk(2, -1)
        weights = (q @ k.mT).softmax(-1)
        return {"a": weights, "b": weights @ self.v(x)} if self.first else (weights @ self.v(x), weights)


class Insists(nn.Module):
    def __init__(self, steps, *, names=()):
        super().__init__()
        self.steps = steps

    def forward(self, x):
        return x * self.steps


class softmax(Fixed):
    pass
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(VARIANTS, "_entries", dict(VARIANTS._filled()))
    path = tmp_path / "mine.py"
    path.write_text(MODULES, encoding="utf-8")
    return str(path)


def test_sizes_of_the_problem_reach_its_constructor_and_the_first_tensor_comes_back(file: str) -> None:
    load(f"{file}:Projected:rank=3")
    module = build("Projected", Shape(heads=2, head_dim=8, seq_len=20))
    assert module.inner.rows.weight.shape == (3, 20)
    x = torch.randn(2, 20, 16)
    assert module(x).shape == x.shape
    assert torch.equal(module(x), build("Projected", Shape(heads=2, head_dim=8, seq_len=20))(x))
    assert not torch.equal(module(x), build("Projected", Shape(heads=2, head_dim=8, seq_len=20), seed=1)(x))
    assert build("Projected", Shape(heads=2, head_dim=8, seq_len=20, causal=True)).inner.causal


def test_options_of_its_constructor_are_its_options(file: str) -> None:
    load(f"{file}:Projected")
    shape = Shape(heads=2, head_dim=8, seq_len=20)
    assert build("Projected:rank=3", shape).inner.rows.weight.shape == (3, 20)
    assert build("Projected:seq_len=none", shape).inner.rows.weight.shape == (4, 20)
    with pytest.raises(Unsupported, match="16x100 and 300x4"):
        build("Projected:seq_len=300", replace(shape, seq_len=100))
    with pytest.raises(Unsupported, match=r"called with x \(1, 20, 16\) it raises RuntimeError"):
        build("Projected:seq_len=30", shape)
    with pytest.raises(UsageError, match="unknown option 'rnk'; did you mean 'rank'"):
        build("Projected:rnk=3", shape)
    with pytest.raises(UsageError, match="option rank=abc"):
        build("Projected:rank=abc", shape)
    with pytest.raises(UsageError, match="unknown option 'causal'"):
        build("Projected:causal=true", shape)
    load(f"{file}:Insists")
    with pytest.raises(Unsupported, match=r"Insists needs steps; write .*:Insists:steps=64"):
        build("Insists", shape)
    assert build("Insists:steps=2", shape)(torch.ones(1, 20, 16)).shape == (1, 20, 16)


def test_what_may_be_the_size_of_a_block_or_a_window_is_left_alone(file: str) -> None:
    load(f"{file}:Blocks")
    shape = Shape(heads=2, head_dim=8, seq_len=20)
    assert build("Blocks", shape).inner.said == [4, 3, 2, 8, 5]
    assert build("Blocks:block_size=6", shape).inner.said == [6, 3, 2, 8, 5]


def test_weights_of_the_shape_of_x_are_not_its_output(file: str) -> None:
    load(f"{file}:Weighted")
    shape, x = Shape(heads=2, head_dim=8, seq_len=16), torch.randn(2, 16, 16)
    first, last = build("Weighted", shape), build("Weighted:first=false", shape)
    assert torch.equal(first(x), first.inner(x)["b"])
    assert torch.equal(last(x), last.inner(x)[0])
    assert torch.equal(first(x), last(x))
    alone = r"2 outputs of the shape of x, \(2, 16, 16\), .*; return the output alone, or choose a length"
    with pytest.raises(Unsupported, match=alone):
        build("Weighted:only=16", shape)(x)
    longer = torch.randn(2, 20, 16)
    assert build("Weighted:only=20", replace(shape, seq_len=20))(longer).shape == longer.shape


def test_what_has_no_signature_may_be_called_with_anything(tmp_path: Path) -> None:
    """As functions that are written in C."""
    path = tmp_path / "written_in_c.py"
    path.write_text(
        "from torch import nn\ndef make(**sizes): return nn.Linear(sizes['wide'], 3)\nmake.__signature__ = 'none'\n"
    )
    load(str(path))
    assert isinstance(ModuleSource(f"{path}:make:wide=2").make(), torch.nn.Linear)


def test_what_it_cannot_do_is_a_reason(file: str) -> None:
    load(f"{file}:Fixed")
    with pytest.raises(Unsupported, match=r"x of width 32: 2 heads of 8 have 16; choose --heads and --head-dim"):
        build("Fixed", Shape(heads=2, head_dim=8))
    with pytest.raises(Unsupported, match="causal: its constructor has no option causal"):
        build("Fixed", Shape(heads=4, head_dim=8, causal=True))
    load(f"{file}:Short")
    with pytest.raises(Unsupported, match=r"no output of the shape of x, \(1, 3, 16\)"):
        build("Short", Shape(heads=2, head_dim=8))(torch.ones(1, 3, 16))


def test_an_example_with_padding_is_called_alone_without_it(file: str) -> None:
    load(f"{file}:Projected")
    x, real = torch.randn(2, 20, 16), torch.arange(20) < torch.tensor([[20], [13]])
    fixed = build("Projected", Shape(heads=2, head_dim=8, seq_len=20))
    with pytest.raises(Unsupported, match=r"the 13 tokens of an example alone it raises RuntimeError: .*any length"):
        fixed(x, key_mask=real)
    load(f"{file}:Fixed:wide=16")
    summed = build("Fixed", Shape(heads=2, head_dim=8))
    out = summed(x.requires_grad_(), key_mask=real)
    assert torch.allclose(out[:1], summed(x[:1]))
    assert torch.allclose(out[1:, :13], summed(x[1:, :13]))
    assert not out[1, 13:].any()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert not grad[1, 13:].any()
    assert grad[0].all()


def test_it_is_registered_once_and_by_a_name_of_its_own(file: str) -> None:
    load(f"{file}:Fixed")
    entry = VARIANTS.get("Fixed")
    load(f"{file}:Fixed")
    assert VARIANTS.get("Fixed") is entry
    for taken in (f"{file}:softmax", f"{file}:Fixed:wide=64"):
        with pytest.raises(UsageError, match="is registered already; choose another name"):
            load(taken)
    with pytest.raises(UsageError, match="no class 'Fixd'; did you mean 'Fixed'"):
        load(f"{file}:Fixd")


def test_laws_hold_a_module_to_what_any_module_promises(file: str) -> None:
    load(f"{file}:Projected")
    report = check_variant("Projected", time=False)
    asked = {finding.law for finding in report.findings}
    assert asked == {name for name, law in LAWS.items() if law.of_any}
    assert {"batch", "strides", "causality"} <= asked
    assert not asked & {"permutation", "seed", "gradients reach", "large inputs"}
    assert {finding.case for finding in report.faults} == {"causal"}  # it has the option, and mixes all tokens
    assert "causality" in {finding.law for finding in report.faults}


INNOCENT = """
import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Mixing(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return self.linear(x).cumsum(1)


class Frozen(Mixing):
    def __init__(self, dim):
        super().__init__(dim)
        self.requires_grad_(False)


class Frozen1(Mixing):
    def __init__(self, dim):
        super().__init__(dim)
        self.linear.bias.requires_grad_(False)


class NoHalves(Mixing):
    def forward(self, x):
        if x.dtype in (torch.bfloat16, torch.float16):
            raise TypeError("no kernel for halves")
        return super().forward(x)


class SingleOnly(Mixing):
    def forward(self, x):
        return x + torch.ones(x.shape[-1]) @ self.linear.weight


class SingleInside(Mixing):
    def forward(self, x):
        return super().forward(x).float().softmax(-1).to(x.dtype)


class Draws(Mixing):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


class DrawsElsewhere(Mixing):
    def forward(self, x):
        return super().forward(x) + numpy.random.rand()


class FirstCall(Mixing):
    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() * self.linear.weight.sum()
        return self.kept @ self.linear(x)


class Counts(Mixing):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Lazy(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.LazyLinear(dim)

    def forward(self, x):
        return self.linear(x).cumsum(1)


class Checkpointed(Mixing):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class Multiples(Mixing):
    def forward(self, x):
        return super().forward(x).unflatten(1, (-1, 16)).flatten(1, 2)


class Wide(Mixing):
    def __init__(self):
        super().__init__(256)


class TokensFirst(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lstm = nn.LSTM(dim, dim)

    def forward(self, x):
        return self.lstm(x)


class Masked(Mixing):
    def forward(self, x, mask):
        return super().forward(x * mask[..., None])


class OfPairs(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x, attn_mask):
        assert attn_mask.ndim == 2
        return self.inner(x, x, x, attn_mask=attn_mask)


class MaskOrNone(Mixing):
    def forward(self, x, key_padding_mask):
        assert key_padding_mask is None
        return super().forward(x)


class Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.fft2(x).real


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x):
        return x + self.linear(x.mean(-1, keepdim=True))


class Dead(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
        self.inner[0].bias.data[0] = -99

    def forward(self, x):
        return self.inner(x)


class StraightThrough(Mixing):
    def forward(self, x):
        return super().forward(x + (x.round() - x).detach())


class Overflows(Mixing):
    def forward(self, x):
        return super().forward((4 * x).exp())


class OfBlocks(Mixing):
    def forward(self, x):
        return super().forward(x.unflatten(1, (-1, 48)).flatten(1, 2))


class HalvesInside(Mixing):
    def forward(self, x):
        return nn.functional.linear(x.half(), self.linear.weight.half()).softmax(1).to(x.dtype)


class WeightsInHalves(Mixing):
    def __init__(self, dim):
        super().__init__(dim)
        self.linear.half()

    def forward(self, x):
        return self.linear(x.half()).cumsum(1).to(x.dtype)


class Compiled(nn.Module):
    shapes = []

    def __init__(self, dim):
        super().__init__()
        self.inner = torch.compile(Mixing(dim), backend=self.compile)

    def compile(self, graph, inputs):
        self.shapes.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)])
        return graph.forward

    def forward(self, x):
        return self.inner(x)


class Leaks(nn.Module):
    def __init__(self, causal=False):
        super().__init__()

    def forward(self, x):
        return x + x.mean(1, keepdim=True)


class LeaksInTraining(nn.Module):
    def __init__(self, causal=False):
        super().__init__()

    def forward(self, x):
        return x + x.mean(1, keepdim=True) if self.training else x.cumsum(1)


class LeaksFromTheBatch(nn.Module):
    def forward(self, x):
        return x.cumsum(1) + x[:1].cumsum(1)


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)
"""


@pytest.fixture
def innocent(file: str) -> str:
    Path(file).write_text(INNOCENT, encoding="utf-8")
    return file


def found_by_a_run(name: str, causal: bool = False) -> dict[str, Any]:
    cell = Cell("s", "w", Spec(name), Shape(heads=2, head_dim=4, seq_len=23, causal=causal))
    return HoldSetting(cell).found(lambda done, of: None)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a checkpoint says so without gradients
@pytest.mark.parametrize("name", re.findall(r"class (\w+)", INNOCENT.partition("class Leaks")[0]))
def test_no_module_is_accused_of_what_could_not_be_asked(name: str, innocent: str) -> None:
    load(f"{innocent}:{name}")
    report = check_variant(name, time=False)
    assert report.held, [f"{one.law}: {one.fault}" for one in report.faults]
    assert {one.law for one in report.findings if not one.skipped} >= {"build", "shape and type"}
    assert found_by_a_run(name)["fault"] is None


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a checkpoint says so without gradients
@pytest.mark.parametrize(
    "name",
    [
        *("Frozen", "Frozen1", "FirstCall", "Lazy", "Checkpointed", "Multiples", "Wide", "TokensFirst", "Masked"),
        *("OfBlocks", "HalvesInside", "WeightsInHalves", "Compiled"),
    ],
)
def test_what_a_module_is_made_of_keeps_no_law_from_being_asked(name: str, innocent: str) -> None:
    load(f"{innocent}:{name}")
    report = check_variant(name, time=False)
    assert not report.skipped, report.skipped
    assert {"batch", "strides", "unwritten memory"} <= {finding.law for finding in report.findings}


@pytest.mark.parametrize(
    ("name", "causal", "law"),
    [
        ("LeaksFromTheBatch", False, "batch"),
        ("Leaks", True, "causality"),
        ("LeaksInTraining", True, "causality"),
        ("InPlace", False, "inputs untouched"),
    ],
)
def test_check_and_a_run_agree_on_what_a_module_breaks(name: str, causal: bool, law: str, innocent: str) -> None:
    load(f"{innocent}:{name}")
    report = check_variant(name, time=False)
    assert law in {finding.law for finding in report.faults}
    assert _verdict(report).startswith(f"{name} breaks what any module keeps: ")
    fault = found_by_a_run(name, causal)["fault"]
    assert fault["law"] in {finding.law for finding in report.faults}
    assert fault["fault"]
    if causal:
        assert found_by_a_run(name)["fault"] is None


def test_laws_leave_what_an_author_compiles_to_the_calls_that_are_measured(innocent: str) -> None:
    load(f"{innocent}:Compiled")
    assert found_by_a_run("Compiled")["fault"] is None
    module = build("Compiled", Shape(heads=2, head_dim=4, seq_len=200))
    assert module.inner.shapes == []
    module(torch.randn(1, 200, 8))
    assert [(1, 200, 8)] in [[x for x in one if len(x) == 3] for one in module.inner.shapes]


def test_what_takes_halves_alone_says_so_in_another_type(file: str) -> None:
    Path(file).write_text(
        f"{MODULES}\n\nclass Halves(Fixed):\n    def forward(self, x):\n        assert x.dtype == "
        "torch.float16\n        return super().forward(x)\n",
        encoding="utf-8",
    )
    load(f"{file}:Halves")
    module = build("Halves", Shape(heads=2, head_dim=16))
    with pytest.raises(Unsupported, match="in float32 it raises AssertionError; it takes float16: --dtype float16"):
        module(torch.ones(1, 3, 32))
    assert module.half()(torch.ones(1, 3, 32).half()).dtype == torch.float16


def test_a_module_that_takes_tokens_first_is_called_so(innocent: str) -> None:
    load(f"{innocent}:TokensFirst")
    module, x = build("TokensFirst", Shape(heads=2, head_dim=4, seq_len=100)), torch.randn(3, 100, 8)
    assert module.tokens_first
    assert torch.equal(module(x), module.inner.lstm(x.transpose(0, 1))[0].transpose(0, 1))
    with FakeTensorMode():
        assert build("TokensFirst", Shape(heads=2, head_dim=4, seq_len=100)).tokens_first
    load(f"{innocent}:LeaksFromTheBatch")
    assert not build("LeaksFromTheBatch", Shape(heads=2, head_dim=4, seq_len=20)).tokens_first


def test_parameters_that_a_first_call_makes_are_there_before_it_is_measured(innocent: str) -> None:
    load(f"{innocent}:Lazy")
    for n in (20, 200):
        module = build("Lazy", Shape(heads=2, head_dim=4, seq_len=n))
        assert sum(x.numel() for x in module.parameters()) == 72


def test_the_file_is_part_of_what_a_run_is(file: str) -> None:
    source = f"{file}:Projected"
    before = provenance([source])["mine.py"]
    Path(file).write_text(MODULES + "\n", encoding="utf-8")
    assert provenance([source])["mine.py"] != before


def test_a_module_among_variants_is_a_plug_in() -> None:
    names, sources = with_modules(["a/m.py:Mine:dim=4", "local:window=3"], ["other.py"])
    assert names == ["Mine:dim=4", "local:window=3"]
    assert sources == ["other.py", "a/m.py:Mine"]
    assert with_modules(["m.py:Mine", "m.py:Mine"], ["m.py:Mine"])[1] == ["m.py:Mine"]


def attnbench(file: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnbench", *arguments]
    with forks():
        return subprocess.run(command, cwd=Path(file).parent, capture_output=True, text=True, check=False)


def test_what_cannot_have_the_shapes_of_laws_is_measured_and_not_accused(file: str) -> None:
    load(f"{file}:Split")
    with pytest.raises(Unsupported, match=r"called with x \(1, 20, 6\) it raises RuntimeError"):
        build("Split", Shape(heads=3, head_dim=2, seq_len=20))
    quick = ("--n", "64", "--heads", "2", "--head-dim", "8", "--min-time", "0.02", "--threads", "1", "--level", "layer")
    done = attnbench(file, "compare", "mine.py:Split", "softmax", *quick, "--json")
    (row,) = json.loads(done.stdout)["rows"]
    assert row["a_status"] == "ok", row
    assert row["a_laws"] in ("held", "not tried")


def test_the_page_names_every_option_that_follows_the_cell() -> None:
    page = (Path(__file__).parents[2] / "docs/foreign-modules.md").read_text(encoding="utf-8")
    for names in own_module._SIZES.values():
        assert f" | {', '.join(f'`{name}`' for name in names)} |" in page


def test_compare_times_it_beside_a_variant(file: str) -> None:
    quick = ("--n", "64", "--heads", "2", "--head-dim", "8", "--min-time", "0.02", "--threads", "1")
    done = attnbench(file, "compare", "mine.py:Projected", "softmax", "--level", "layer", *quick, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["a"], row["b"]) == ("Projected", "softmax")
    assert row["a_time_median_s"] > 0, row
    assert row["a_laws"] == "held"
    done = attnbench(file, "compare", "mine.py:Projected", "softmax", *quick)
    assert done.returncode == 2
    assert done.stderr == "error: mine.py:Projected: it takes x, and not q, k and v; add --level layer\n"


def test_score_trains_it(file: str) -> None:
    quick = ("--task", "recall", "--n", "32", "--steps", "2", "--quick", "--json", "--threads", "1")
    done = attnbench(file, "score", "mine.py:Projected", *quick)
    assert done.returncode == 0, [row["reason"] for row in json.loads(done.stdout)]
    assert {row["variant"] for row in json.loads(done.stdout)} == {"Projected", "identity"}


def test_score_trains_it_on_a_task_with_padding(file: str) -> None:
    quick = ("--n", "64", "--steps", "2", "--batch", "4", "--quick", "--json", "--threads", "1")
    task = "listops:min_length=20,max_length=64,test=8"
    done = attnbench(file, "score", "mine.py:Blocks", "--task", task, *quick)
    rows = {row["variant"]: row for row in json.loads(done.stdout)}
    assert rows["Blocks"]["status"] == "ok", (rows["Blocks"]["reason"], done.stderr)
