"""What a user writes first, in whatever order, in a process that has imported nothing else but torch."""

from __future__ import annotations

import subprocess

import pytest

from tests.bare import in_bare_process

FIRST = {
    "load_suite": "import attnbench; assert attnbench.load_suite('quick').name == 'quick'",
    "build": "import attnbench; attnbench.build('performer', attnbench.Shape(seq_len=8), features=4)",
    "draw": "from attnbench.contract.inputs import draw_qkv; from attnbench.contract.spec import Spec; "
    "from attnbench import Shape; "
    "draw_qkv(Spec('gaussian'), Shape(seq_len=8), 0)",
    "one variant": "from attnbench.catalogue.attention.kernel.linear import Linear; "
    "from attnbench.contract.variant import VARIANTS; "
    "assert 'softmax' in VARIANTS",
    "check": "from attnbench.laws import check_variant; check_variant('mean-value', laws=['causality'])",
}
OWN = """
import torch
from attnbench import register

@register("{name}", family="reference", source="me", formula="mean(V)", cost="O(n)")
class Own(torch.nn.Module):
    '''Mine.'''
    def __init__(self, shape): ...
    def forward(self, q, k, v, *, key_mask=None): ...

from attnbench.contract.variant import VARIANTS
print(VARIANTS.names()[0], VARIANTS.names()[-1])
"""
SCRIPTS = {**FIRST, "own": OWN.format(name="own"), "taken": OWN.format(name="linear")}
Ended = dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def ended() -> Ended:
    """How each script ended, in a process of its own."""
    nothing = "import sys; assert not any(name.startswith('attnbench') for name in sys.modules)\n"
    return {name: in_bare_process(nothing + script) for name, script in SCRIPTS.items()}


@pytest.mark.parametrize("first", FIRST)
def test_any_first_call_finds_what_is_shipped(first: str, ended: Ended) -> None:
    assert ended[first].returncode == 0, ended[first].stderr


def test_a_variant_of_ones_own_that_is_registered_first_stands_last(ended: Ended) -> None:
    assert ended["own"].stdout.split() == ["softmax", "own"], ended["own"].stderr


def test_a_shipped_name_is_taken_from_the_start(ended: Ended) -> None:
    assert "variant 'linear' is registered already" in ended["taken"].stderr
    assert "own" not in ended["taken"].stdout
