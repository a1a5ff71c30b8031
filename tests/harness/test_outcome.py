"""Which outcome stands for what a cell raised, in words that need no knowledge of torch."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnbench.errors import BrokenContract, Unsupported, UsageError
from attnbench.harness.inside.execute import Nonfinite, status_of
from attnbench.measure import memory
from attnbench.measure.status import Status

OF_TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 536870912 bytes. Error code 12 (Cannot allocate memory)"
)
OF_CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.06 GiB is free."
)
OF_NUMPY = "Unable to allocate 8.00 GiB for an array with shape (32768, 32768) and data type float64"


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def in_the_midst_of(error: Exception, other: Exception) -> Exception:
    error.__context__ = other
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(OF_TORCH), "needs another 512 MiB; limit 300 MiB"),
        (torch.OutOfMemoryError(OF_CUDA), "needs another 2.00 GiB; limit 300 MiB"),
        (MemoryError(OF_NUMPY), "needs another 8.00 GiB; limit 300 MiB"),
        (MemoryError(), "ran out of memory; limit 300 MiB"),
        (RuntimeError("std::bad_alloc"), "ran out of memory; limit 300 MiB"),
        (OSError(12, "Cannot allocate memory"), "ran out of memory; limit 300 MiB"),
        (in_the_midst_of(TypeError("unsupported operand"), MemoryError()), "ran out of memory; limit 300 MiB"),
        (caused_by(SystemError("bad call"), RuntimeError(OF_TORCH)), "needs another 512 MiB; limit 300 MiB"),
    ],
)
def test_want_of_memory_is_told_in_plain_words_with_the_limit(error: Exception, reason: str) -> None:
    assert status_of(error, 300 * 2**20) == (Status.OOM, reason)


def test_whatever_a_library_says_near_the_limit_is_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = TypeError("unsupported operand type(s) for +: 'NoneType' and 'int'")
    assert status_of(odd)[0] is Status.ERROR
    monkeypatch.setattr(memory, "_near_the_limit", lambda: True)
    assert status_of(odd) == (Status.OOM, "ran out of memory (TypeError)")
    assert status_of(ValueError("3 is not even"))[0] is Status.ERROR
    assert status_of(BrokenContract("no"))[0] is Status.ERROR


def test_an_error_that_quotes_itself_comes_to_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert status_of(one) == (Status.ERROR, "ValueError: one")


def test_only_the_measuring_calls_a_result_nonfinite() -> None:
    assert status_of(Nonfinite("the output holds NaN or infinity"))[0] is Status.NONFINITE
    raised = status_of(FloatingPointError("of the variant's own"))
    assert raised == (Status.ERROR, "FloatingPointError: of the variant's own")


def test_other_errors_keep_their_names() -> None:
    assert status_of(Unsupported("not causal")) == (Status.UNSUPPORTED, "not causal")
    assert status_of(UsageError("no such option")) == (Status.ERROR, "no such option")
    assert status_of(KeyError("x")) == (Status.ERROR, "KeyError: 'x'")


GREEDY = """
import numpy, torch
from attnbench import register


class Base(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()


def greedy(name):
    return register(name, family="reference", source="-", formula="-", cost="-")


@greedy("half-a-gibibyte")
class Half(Base):
    def forward(self, q, k, v, *, key_mask=None):
        return v + torch.empty(2**27).sum()


@greedy("wrapped")
class Wrapped(Base):
    def forward(self, q, k, v, *, key_mask=None):
        try:
            return v + torch.empty(2**27).sum()
        except RuntimeError:
            return v + None


@greedy("floating")
class Floating(Base):
    def forward(self, q, k, v, *, key_mask=None):
        raise FloatingPointError("of its own")


@greedy("misshapen")
class Misshapen(Base):
    def forward(self, q, k, v, *, key_mask=None):
        return v[..., :1]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
@pytest.mark.usefixtures("forks")
def test_a_user_reads_what_was_wanted_and_what_there_was(tmp_path: Path) -> None:
    plugin, suite = tmp_path / "greedy.py", tmp_path / "s.yaml"
    plugin.write_text(GREEDY)
    suite.write_text(
        "name: s\nsweeps: [{name: w, matrix: {variant: [half-a-gibibyte, wrapped, floating, misshapen, softmax],"
        " seq_len: 64, heads: 2, head_dim: 8}}]\n"
    )
    options = ["--plugin", str(plugin), "--out", str(tmp_path / "out"), "--memory-limit", "300MiB", "--quick"]
    command = [sys.executable, "-m", "attnbench", "run", str(suite), "--threads", "1", "--unchecked", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (table,) = (tmp_path / "out").rglob("results.csv")
    with table.open(newline="") as file:
        rows = {row["variant"]: (row["status"], row["reason"].partition(" (twice")[0]) for row in csv.DictReader(file)}
    assert rows == {
        "half-a-gibibyte": ("oom", "needs another 512 MiB; limit 300 MiB"),
        "wrapped": ("oom", "needs another 512 MiB; limit 300 MiB"),
        "floating": ("error", "FloatingPointError: of its own"),
        "misshapen": (
            "error",
            "it breaks the contract: the output is (1, 2, 64, 1) float32, not (1, 2, 64, 8) float32",
        ),
        "softmax": ("ok", ""),
    }, done.stderr
