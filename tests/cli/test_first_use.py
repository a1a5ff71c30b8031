"""What a user writes first, in whatever order, in a process that has imported nothing else but torch."""

from __future__ import annotations

import json
import subprocess
import sys

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
SCRIPTS = {**FIRST, "own": OWN.format(name="own"), "taken": OWN.format(name="linear")}
IN_FORKS = """
import json, os, sys, traceback
import torch

for number, script in enumerate(json.loads(sys.argv[1])):
    assert not any(name.startswith("attnbench") for name in sys.modules)
    if os.fork() == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{number}.{stream}", os.O_CREAT | os.O_WRONLY), stream)
        code = 1
        try:
            exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)  # or the next fork prints it as well
"""


Ended = dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """How each script ended, in a fork of one process."""
    folder = tmp_path_factory.mktemp("first")
    scripts = [sys.executable, "-c", IN_FORKS, json.dumps(list(SCRIPTS.values()))]
    done = subprocess.run(scripts, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    codes = map(int, done.stdout.split())
    said = ([(folder / f"{number}.{stream}").read_text() for stream in (1, 2)] for number in range(len(SCRIPTS)))
    return {
        name: subprocess.CompletedProcess([], code, *texts)
        for name, code, texts in zip(SCRIPTS, codes, said, strict=True)
    }


@pytest.mark.parametrize("first", FIRST)
def test_any_first_call_finds_what_is_shipped(first: str, ended: Ended) -> None:
    assert ended[first].returncode == 0, ended[first].stderr


def test_a_variant_of_ones_own_that_is_registered_first_stands_last(ended: Ended) -> None:
    assert ended["own"].stdout.split() == ["softmax", "own"], ended["own"].stderr


def test_a_shipped_name_is_taken_from_the_start(ended: Ended) -> None:
    assert "variant 'linear' is registered already" in ended["taken"].stderr
    assert "own" not in ended["taken"].stdout
