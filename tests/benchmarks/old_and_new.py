"""Times of every variant, as it was at a commit and as it is now, in turns in one process.

    python -m tests.benchmarks.old_and_new COMMIT [--variants softmax,local] [--n 1024,4096] [--seconds 2]

The package of that commit is unpacked under another name, so that both are loaded at once. Both get the same inputs,
seeds and libraries. Prints, for each variant, pass and length, the ratio of the new time to the old one with its 95 %
interval, the cases whose whole interval lies above ``--limit``, and the geometric mean over all cases. The interval is
that of this process: a case above the limit is measured once more in another one before anybody believes it. Needs a
machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import random
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS
from attnbench.harness.wire.process import apply, window_library
from attnbench.measure.statistics import LOOKS, Ratio, paired_ratio

HERE = Path(__file__).parents[2]
OLD = "attnbench_old"
FEWEST, MOST = 8, 200
"""Turns of each side."""


def unpacked(commit: str) -> Path:
    """The folder in which the package of a commit lies as :data:`OLD`."""
    name = subprocess.run(["git", "rev-parse", commit], cwd=HERE, capture_output=True, text=True, check=True).stdout
    folder = HERE / "build/old" / name.strip()
    if not folder.exists():
        packed = subprocess.run(
            ["git", "archive", commit, "attnbench", "suites"], cwd=HERE, capture_output=True, check=True
        )
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        (folder / "attnbench").rename(folder / OLD)
        for file in (folder / OLD).rglob("*.py"):
            file.write_text(re.sub(r"\battnbench\b", OLD, file.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def old(*places: str) -> ModuleType:
    """The first module of the old package that exists: a layout has moved most of them."""
    for place in places[:-1]:
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{OLD}.{place}")
    return importlib.import_module(f"{OLD}.{places[-1]}")


def windows_as_here(wanted: bool) -> AbstractContextManager[None]:
    """Inside, the old package multiplies windows by the library that the new one takes; once that was a global."""
    with contextlib.suppress(ImportError):
        products = old("catalogue.engines.products", "engines.products")
        inside: AbstractContextManager[None] = products.windows_in_place(wanted)
        return inside
    with contextlib.suppress(ImportError):
        importlib.import_module(f"{OLD}.attention.default_library").read_in_place(wanted)
    return contextlib.nullcontext()


def calls(module: nn.Module, inputs: list[torch.Tensor], training: bool) -> Callable[[], object]:
    """What is timed: one forward call, or one with its gradients."""
    if not training:

        def forward() -> object:
            with torch.inference_mode():
                return module(*inputs)

        return forward

    leaves = [*(x.requires_grad_() for x in inputs), *module.parameters()]

    def train() -> object:
        output = module(*inputs)
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        for leaf in leaves:
            leaf.grad = None
        return output

    return train


def in_turns(new: Callable[[], object], old: Callable[[], object], seconds: float) -> Ratio:
    """Time both in turns of random order."""
    took: tuple[list[float], list[float]] = ([], [])
    order = random.Random(0)
    for one in (new, old, new, old):
        one()
    until = time.perf_counter() + seconds
    while len(took[0]) < FEWEST or (time.perf_counter() < until and len(took[0]) < MOST):
        for side in order.sample((0, 1), 2):
            began = time.perf_counter()
            (new, old)[side]()
            took[side].append(time.perf_counter() - began)
    share = math.ceil(len(took[0]) / LOOKS[0])  # no processes, but stretches of this one
    return paired_ratio(*([side[at : at + share] for at in range(0, len(side), share)] for side in took))


def cases(names: list[str], lengths: list[int]) -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """Name of each case, and what makes both sides of it."""
    old_shape = old("contract.problem.shape", "shape").Shape
    old_build = old("catalogue.build", "variant").build
    for name in names:
        for n in lengths:
            for training in (False, True):

                def made(name: str = name, n: int = n, training: bool = training) -> tuple[Any, Any]:
                    sides = []
                    for shape, make in ((Shape, build), (old_shape, old_build)):
                        draws = torch.Generator().manual_seed(0)
                        sizes = [(1, n, 512)] if VARIANTS.get(name).kind == "mixer" else 3 * [(1, 8, n, 64)]
                        inputs = [torch.randn(size, generator=draws) for size in sizes]
                        sides.append(calls(make(name, shape(1, 8, n, 64), seed=0), inputs, training))
                    return sides[0], sides[1]

                yield f"{name:<22} {'training' if training else 'forward':<8} {n:>6}", made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--variants", default="")
    parser.add_argument("--n", default="1024,4096")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")
    parser.add_argument("--limit", type=float, default=1.03)
    asked = parser.parse_args()
    sys.path.insert(0, str(unpacked(asked.commit)))
    there = {entry.name for entry in old("contract.variant", "variant").VARIANTS}
    names = asked.variants.split(",") if asked.variants else [one.name for one in VARIANTS if one.name in there]
    _, products, notes = apply("tuned", threads=torch.get_num_threads(), device="cpu")
    print(*notes, f"libraries: {products}", sep="\n")
    found: dict[str, Ratio] = {}
    with window_library("tuned", products), windows_as_here(products.window_products == "default"):
        for name, made in cases(names, [int(n) for n in asked.n.split(",")]):
            try:
                found[name] = ratio = in_turns(*made(), asked.seconds)
            except Exception as problem:
                print(f"{name}  not measured: {type(problem).__name__}: {str(problem).splitlines()[0]}", flush=True)
                continue
            print(f"{name}  {ratio.estimate:.3f}  {ratio.low:.3f} to {ratio.high:.3f}  {ratio.pairs} turns", flush=True)
    above = [name for name, ratio in found.items() if ratio.low is not None and ratio.low > asked.limit]
    mean = math.exp(sum(math.log(ratio.estimate) for ratio in found.values()) / len(found))
    print(f"geometric mean of {len(found)} ratios: {mean:.4f}")
    print(f"whole interval above {asked.limit}: {len(above)}", *above, sep="\n  ")


if __name__ == "__main__":
    main()
