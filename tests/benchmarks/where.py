"""Where the time of a variant goes, by kind of operation: `python tests/benchmarks/where.py local --n 4096`.

Beside products and exponentials stands what they would take at this machine's full rates, and beside each shape of
product how far torch's library gets with it. Beside tests/benchmarks/bare.py, which says what a variant's products and
exponentials would take by themselves.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import AttnbenchError
from attnbench.harness.inside.call import prepare
from attnbench.harness.wire.process import Process, apply, window_library
from attnbench.measure.flops import count
from attnbench.measure.limits import exp_rate, matmul_rate
from attnbench.suite.cell import Cell, Pass

KINDS = {
    "matrix products": ("mm", "bmm", "addmm", "baddbmm", "baddbmm_", "_scaled_dot_product_flash_attention_for_cpu"),
    "exponentials": ("exp", "exp_", "exp2", "exp2_", "_softmax", "softmax", "elu_backward"),
    "copies": ("copy_", "clone", "cat", "index_select", "index_copy_", "index_add_", "gather", "scatter_add_"),
    "search": ("topk", "sort", "amax", "max", "argmax", "cummax", "eq"),
}
"""What stands in no list is other arithmetic, if it computes, or a view."""

VIEWS = ("view", "as_strided", "slice", "select", "transpose", "t", "expand", "unflatten", "narrow", "empty", "unbind")
LEAST_SECONDS = 2.0


def main(
    variant: str,
    n: Annotated[int, typer.Option(help="Tokens.")] = 4096,
    heads: int = 8,
    causal: bool = False,
    training: bool = False,
    inputs: str = "gaussian",
    process: Process = "tuned",
) -> None:
    """Time of one call by kind of operation, without and with torch's profiler around it."""
    process, libraries, _ = apply(process, threads=len(os.sched_getaffinity(0)), device="cpu")
    window_library(process, libraries).__enter__()  # for the life of this process
    shape = Shape(heads=heads, seq_len=n, head_dim=64, causal=causal)
    passed: Pass = "training" if training else "forward"
    try:
        call = prepare(Cell("where", "where", parse_spec(variant), shape, pass_=passed, inputs=parse_spec(inputs))).run
    except AttnbenchError as error:
        raise typer.BadParameter(str(error)) from error
    plain, counted = _median(call), count(call)
    peak = matmul_rate("cpu", torch.float32)
    at_full_rate = {
        "matrix products": counted.matmul_flops / peak * 1e3,
        "exponentials": counted.exponentials / exp_rate("cpu", torch.float32) * 1e3,
    }
    spent, calls, products = Counter[str](), Counter[str](), Counter[tuple[int, ...]]()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        rounds = _repeat(call)
    for event in seen.key_averages():
        kind = _kind(event.key)
        spent[kind] += event.self_cpu_time_total / rounds / 1e3
        calls[kind] += event.count // rounds
    # Apart, since writing down shapes takes longer than most calls.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        rounds = _repeat(call)
    for event in seen.key_averages(group_by_input_shape=True):
        if size := _product(event.key, event.input_shapes):
            products[(*size, event.count // rounds)] += event.self_cpu_time_total / rounds / 1e3
    print(f"{variant} at {n} tokens, {passed}, {process}: {plain:.2f} ms")
    print(f"products by {libraries.float32_products}, with windows by {libraries.window_products}")
    for kind, ms in spent.most_common():
        full = f", {at_full_rate[kind]:.2f} ms at full rate" if kind in at_full_rate else ""
        print(f"{kind:20}{ms:8.2f} ms {ms / spent.total():6.0%} in {calls[kind]} calls{full}")
    print(f"{'sum, while profiled':20}{spent.total():8.2f} ms")
    print(f"products by shape; full rate {peak / 1e9:.0f} GFLOP/s")
    for (batch, rows, inner, columns, times), ms in products.most_common(5):
        done = 2 * batch * rows * inner * columns * times / ms / 1e6
        print(f"{ms:8.2f} ms {done:6.0f} GFLOP/s in {times} calls of {batch} x ({rows}, {inner}) ({inner}, {columns})")


def _product(name: str, shapes: list[list[int]]) -> tuple[int, int, int, int] | None:
    """Matrices, rows, inner size and columns, if the operation is a product."""
    if name.removeprefix("aten::") not in KINDS["matrix products"] or name.endswith("for_cpu"):
        return None
    left, right = (shapes[1], shapes[2]) if "add" in name else (shapes[0], shapes[1])
    return (left[0] if len(left) == 3 else 1), left[-2], left[-1], right[-1]


def _kind(name: str) -> str:
    bare = name.removeprefix("aten::")
    for kind, names in KINDS.items():
        if bare in names:
            return kind
    return "views, allocations" if bare.startswith(VIEWS) or not name.startswith("aten::") else "other arithmetic"


def _repeat(call: Callable[[], object]) -> int:
    rounds, start = 0, time.perf_counter()
    while time.perf_counter() < start + LEAST_SECONDS:
        call()
        rounds += 1
    return rounds


def _median(call: Callable[[], object]) -> float:
    """Milliseconds."""
    times: list[float] = []
    _repeat(call)
    while sum(times) < LEAST_SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e3


if __name__ == "__main__":
    typer.run(main)
