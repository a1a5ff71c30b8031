"""What a cell runs again and again: one pass of a variant at one level, on inputs of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config

from attnbench.cell import Cell, ModelSize
from attnbench.compiled import whole
from attnbench.errors import Unsupported
from attnbench.measure.memory import state_bytes
from attnbench.model import Encoder, as_layer
from attnbench.qkv import draw_qkv
from attnbench.run.process import choose_products
from attnbench.shape import Shape
from attnbench.spec import Spec
from attnbench.variant import VARIANTS, build

_KEPT_ELEMENTS = 2**22
"""Draws with at most as many elements in q (48 MiB for q, k and v) are kept for the next variant."""
Draw = Callable[[Spec, Shape, int], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Call:
    """One thing to run again and again, with the sizes of what it was built from."""

    run: Callable[[], Any]
    input_bytes: int
    param_bytes: int
    state_bytes: int | None = None
    """Of a decoding step."""
    like: Tensor | None = None
    """What the output must have the shape and dtype of."""
    uncompiled: Callable[[], Callable[[], Any]] | None = None
    """Makes the same call without ``torch.compile``, where ``run`` is compiled and therefore cannot be looked into."""


def kept_draw(inputs: Spec, shape: Shape, seed: int) -> Sequence[Tensor]:
    """:func:`draw_qkv`, the last of which is kept where it is small: the next cell often differs by its variant alone.

    Each gets a copy, since nothing keeps a variant from writing into its inputs.
    """
    if shape.B * shape.H * max(shape.N, shape.M) * shape.D > _KEPT_ELEMENTS:
        return draw_qkv(inputs, shape, seed)
    return [tensor.clone() for tensor in _last_draw(inputs, shape, seed)]


_last_draw = lru_cache(maxsize=1)(draw_qkv)


def prepare(
    cell: Cell,
    move: Callable[[nn.Module, torch.device, torch.dtype], nn.Module] = nn.Module.to,
    draw: Draw = kept_draw,
) -> Call:
    """Build the variant and its inputs; nothing of this is ever timed.

    Args:
        move: brings a module to a device and type.
        draw: gives q, k and v of an input, a shape and a seed.

    Raises:
        Unsupported: the mathematics or the input does not allow this cell.
        UsageError: unknown names or options.
    """
    device, dtype = torch.device(cell.device), getattr(torch, cell.dtype)
    choose_products(of_one_row=cell.pass_ == "decode")
    module: nn.Module
    if cell.pass_ == "decode":
        if cell.level == "model":
            raise Unsupported("the encoder reads whole sequences; decode at level operator or layer")
        reason = VARIANTS.get(cell.variant.name).unsupported_reason(cell.shape, decode=True)
        if reason:
            raise Unsupported(reason)
    if cell.level == "operator":
        if VARIANTS.get(cell.variant.name).kind == "mixer":
            raise Unsupported("a mixer replaces the whole layer and has no q, k, v; use --level layer or model")
        module = build(cell.variant, cell.shape, seed=cell.seed)
        inputs = [t.to(device, dtype) for t in draw(cell.inputs, cell.shape, cell.seed)]
    elif cell.level == "layer":
        module = as_layer(cell.variant, cell.shape, seed=cell.seed)
        generator = torch.Generator().manual_seed(cell.seed)
        shape = (cell.shape.B, cell.shape.N, cell.shape.C)
        inputs = [torch.randn(shape, generator=generator).to(device, dtype)]
    else:
        size = cell.model or ModelSize()
        module = Encoder(cell.variant, cell.shape, size, seed=cell.seed)
        generator = torch.Generator().manual_seed(cell.seed)
        inputs = [torch.randint(size.vocab, (cell.shape.B, cell.shape.N), generator=generator).to(device)]
    module = move(module, device, dtype)
    own = cell.compile and not always_compiled(cell)
    run, state = _run_and_state(cell, module, inputs, compiled=own)
    return Call(
        run=run,
        uncompiled=(lambda: _run_and_state(cell, module, inputs, compiled=False)[0]) if own else None,
        like=inputs[0] if cell.pass_ == "forward" and cell.level != "model" else None,
        state_bytes=None if state is None else state_bytes(state),
        input_bytes=sum(t.nbytes for t in inputs),
        param_bytes=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
    )


def always_compiled(cell: Cell) -> bool:
    """The call is one of a variant that compiles itself; around it a layer or a model is not compiled by that."""
    return cell.level == "operator" and VARIANTS.get(cell.variant.name).claims(cell.variant).compiled


def _run_and_state(
    cell: Cell, module: nn.Module, inputs: Sequence[Tensor], *, compiled: bool
) -> tuple[Callable[[], Any], Any]:
    """What to run again and again, and the state against which it decodes."""
    if cell.pass_ == "decode":
        return _decode(cell, module, inputs, compiled=compiled)
    return _pass(cell, whole(module) if compiled else module, inputs), None


def _pass(cell: Cell, module: nn.Module, inputs: Sequence[Tensor]) -> Callable[[], Any]:
    if cell.pass_ == "forward":
        module.requires_grad_(False)

        @torch.inference_mode()
        def forward() -> Tensor:
            output: Tensor = module(*inputs)
            return output

        return forward

    module.train()
    wanted = [t.requires_grad_() for t in (*inputs, *module.parameters()) if t.is_floating_point()]
    loss = _loss(cell, module, inputs)
    if cell.pass_ == "training":
        return lambda: torch.autograd.grad(loss(), wanted, allow_unused=True)
    with config.patch(donated_buffer=False):  # compiled code must not reuse what the next walk needs again
        value = loss()  # the graph is built once; only walking it backward is timed
    return lambda: torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)


def _decode(cell: Cell, module: Any, inputs: Sequence[Tensor], *, compiled: bool) -> tuple[Callable[[], Any], Any]:
    """One step, and the state of all tokens but the last against which it is taken, always the same."""
    module.requires_grad_(False)
    token = [x[..., -1:, :] for x in inputs]
    with torch.inference_mode():
        state = module.begin(*(x[..., :-1, :] for x in inputs))

    step = whole(module.step) if compiled else module.step

    @torch.inference_mode()
    def run() -> Tensor:
        output: Tensor = step(state, *token)[0]
        return output

    return run, state


def _loss(cell: Cell, module: nn.Module, inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A scalar to differentiate: cross-entropy for the model, a fixed random projection of the output otherwise."""
    generator = torch.Generator().manual_seed(cell.seed + 1)
    device = torch.device(cell.device)
    if cell.level == "model":
        labels = torch.randint(2, (cell.shape.B,), generator=generator).to(device)
        return lambda: nn.functional.cross_entropy(module(*inputs).float(), labels)
    like = inputs[0]
    direction = torch.randn(like.shape, generator=generator).to(device, like.dtype)
    return lambda: torch.sum(module(*inputs) * direction)
