"""What a user writes first, in whatever order, in a process that has imported nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FIRST = {
    "load_suite": "import attnbench; assert attnbench.load_suite('quick').name == 'quick'",
    "build": "import attnbench; attnbench.build('performer', attnbench.Shape(seq_len=8), features=4)",
    "draw": "from attnbench.qkv import draw_qkv; from attnbench.spec import Spec; from attnbench import Shape; "
    "draw_qkv(Spec('gaussian'), Shape(seq_len=8), 0)",
    "one variant": "from attnbench.attention.linear import Linear; from attnbench.variant import VARIANTS; "
    "assert 'softmax' in VARIANTS",
    "check": "from attnbench.testing import check_variant; check_variant('mean-value', laws=['causality'])",
}
OWN = """
import torch
from attnbench import register

@register("{name}", family="reference", source="me", formula="mean(V)", cost="O(n)")
class Own(torch.nn.Module):
    '''Mine.'''
    def __init__(self, shape): ...
    def forward(self, q, k, v, *, key_mask=None): ...

from attnbench.variant import VARIANTS
print(VARIANTS.names()[0], VARIANTS.names()[-1])
"""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.parametrize("first", FIRST)
def test_any_first_call_finds_what_is_shipped(first: str, tmp_path: Path) -> None:
    done = python(FIRST[first], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_variant_of_ones_own_that_is_registered_first_stands_last(tmp_path: Path) -> None:
    done = python(OWN.format(name="own"), tmp_path)
    assert done.stdout.split() == ["softmax", "own"], done.stderr


def test_a_shipped_name_is_taken_from_the_start(tmp_path: Path) -> None:
    done = python(OWN.format(name="linear"), tmp_path)
    assert "variant 'linear' is registered already" in done.stderr
    assert "own" not in done.stdout
