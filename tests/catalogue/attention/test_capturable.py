"""A call that waits for its device or copies something to it cannot be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.measure.flops import move_fake
from attnbench.models.encoder import as_layer

WAITS = {
    **dict.fromkeys(
        ("flexprefill", "minference", "moba", "msa", "oracle-blocks", "radial", "sparge", "sta", "xattention"),
        "the pairs of blocks are sorted into tiles, of which there are as many as the pairs make",
    ),
    "perceiver": "how steep the logits of a chunk are decides how it is computed",
    "flex": "compiles itself",
}
"""Variants whose calls wait for the device, and why."""
ALSO = ("retnet:decay=lightning", "skyformer:inverse=exact", "mesa:steps=3")
NOTED = {"_local_scalar_dense", "_linalg_check_errors", "nonzero", "lift_fresh", "equal", "is_nonzero"}
"""Operations that wait for the device or make a tensor from numbers of the host."""


class Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in NOTED or name.startswith(("rand", "normal", "bernoulli", "multinomial", "unique")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def made(label: str, tokens: int, device: str) -> Callable[[], Tensor]:
    spec = parse_spec(label)
    variant = VARIANTS.get(spec.name)
    causal = bool(variant.claims(spec, causal=True).causal)
    shape = Shape(heads=2, head_dim=16, seq_len=tokens, causal=causal)
    module: nn.Module
    given: Sequence[Tensor]
    if variant.kind == "operator":
        module, given = build(spec, shape, seed=0), [torch.randn(1, 2, tokens, 16) for _ in range(3)]
    else:
        module, given = as_layer(spec, shape, seed=0), [torch.randn(1, tokens, 32)]
    module = move_fake(module, torch.device(device), torch.float32).requires_grad_(False)
    given = [x.to(device) for x in given]
    return lambda: module(*given)


@pytest.mark.parametrize("label", [*sorted(one.name for one in VARIANTS if one.name not in WAITS), *ALSO])
def test_a_call_neither_waits_for_its_device_nor_draws_nor_copies_anything_to_it(label: str) -> None:
    call = made(label, 260, "meta")  # where no number can be read
    call()  # the first one may keep tables
    with Noting() as noting:
        call()
    assert noting.seen == []


@pytest.mark.cuda
@pytest.mark.parametrize("label", ["mesa", "retnet:decay=lightning", "skyformer:inverse=exact"])
def test_on_a_gpu_such_a_call_is_captured_and_gives_the_same_numbers(label: str) -> None:
    call = made(label, 130, "cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            wanted = [call() for _ in range(3)][-1]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
    graph.replay()
    torch.testing.assert_close(output, wanted)
