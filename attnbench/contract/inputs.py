"""Sources of q, k and v: the contract of an input and the table of all inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import Read, draw_reads
from attnbench.contract.registry import Entry, Registry
from attnbench.contract.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Input(Entry):
    """A registered input."""

    look_at: Callable[..., None] | None = None
    """Called with the options before anything is measured; raises UsageError if it cannot read the data they name."""
    doubt: Callable[..., str] | None = None
    """Called with a shape and the options; returns differences between the shape and the input's source, or nothing."""
    refuse: Callable[..., None] | None = None
    """Called with a shape and the options; raises Unsupported if the input cannot give it. None: only a draw tells."""
    gates: Callable[..., list[Tensor] | None] | None = None
    """Called with the gates to read, a shape, a seed (None: only to refuse) and the options; returns the gates of the
    tokens that a draw takes, or None if the input has none. Raises Unsupported if it has others."""


INPUTS: Registry[Input] = Registry(
    "input", home="attnbench.catalogue.inputs", own="'attnbench list inputs' shows the names"
)

Draw = TypeVar("Draw", bound=Callable[..., "tuple[Tensor, Tensor, Tensor]"])


def register_input(
    name: str,
    *,
    look_at: Callable[..., None] | None = None,
    doubt: Callable[..., str] | None = None,
    refuse: Callable[..., None] | None = None,
    gates: Callable[..., list[Tensor] | None] | None = None,
) -> Callable[[Draw], Draw]:
    """Decorator for ``draw(shape, generator, **options) -> (q, k, v)``, float32 on the CPU; see :class:`Input`."""

    def add(draw: Draw) -> Draw:
        summary = (draw.__doc__ or "").strip().partition("\n")[0]
        INPUTS.add(Input(name, draw, summary=summary, look_at=look_at, doubt=doubt, refuse=refuse, gates=gates))
        return draw

    return add


def look_at(inputs: Spec) -> None:
    """Make sure that whatever an input's options name can be read. Raises UsageError: it cannot, or there is no such
    input or option."""
    entry = INPUTS.get(inputs.name)
    options = entry.check(dict(inputs.options))
    if entry.look_at:
        entry.look_at(**options)


def doubt(inputs: Spec, shape: Shape, reads: Sequence[Read] = ()) -> str:
    """A caveat to errors on this input at this shape, such as a causal source; empty if there is none. Raises
    UsageError: there is no such input or option, or it cannot be read. ``reads``: the gates that the variants read."""
    entry = INPUTS.get(inputs.name)
    options = entry.check(dict(inputs.options))
    said = [entry.doubt(shape, **options)] if entry.doubt else []
    if reads and entry.gates and entry.gates((), shape, None, **options) is None:
        said.append(f"{inputs} has no gates: {', '.join(read.name for read in reads)} are drawn")
    return "; ".join(filter(None, said))


def draw_sizes(inputs: Spec, shape: Shape, seed: int, reads: Sequence[Read] = ()) -> tuple[Tensor, ...]:
    """q, k, v and the gates, with random numbers in place of a file's content, for callers that need only sizes.
    Raises UsageError, Unsupported: as for :func:`draw_qkv` and :func:`draw_gates`."""
    entry = INPUTS.get(inputs.name)
    options = entry.check(dict(inputs.options))
    if entry.refuse is not None:
        entry.refuse(shape, **options)
        if reads and entry.gates:
            entry.gates(reads, shape, None, **options)
        inputs = Spec("gaussian")
    return *draw_qkv(inputs, shape, seed), *draw_gates(inputs, reads, shape, seed)


def draw_qkv(inputs: Spec, shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q ``(B, H, N, D)``, k and v ``(B, K, M, D)`` in float32 on the CPU; the same seed gives the same tensors.

    With ``qk_heads`` q and k are those of every (H / Q)-th head. Raises UsageError for an unknown input or option, and
    Unsupported if the input cannot give this shape: a captured file that is too short, say.
    """
    import torch

    entry = INPUTS.get(inputs.name)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = entry.make(shape, generator, **entry.check(dict(inputs.options)))
    if shape.Q < shape.H:
        q, k = (x[:, :: shape.H // shape.Q].contiguous() for x in (q, k))
    return q, k, v


def draw_gates(inputs: Spec, reads: Sequence[Read], shape: Shape, seed: int) -> list[Tensor]:
    """The gates of the tokens of :func:`draw_qkv`, each ``(B, K, M, width)`` in float32 on the CPU.

    They are the input's own if it has gates, and else drawn (:func:`~attnbench.contract.reads.draw_reads`). Raises as
    :func:`draw_qkv`; Unsupported also if the input has gates and not those.
    """
    entry = INPUTS.get(inputs.name)
    held = entry.gates(reads, shape, seed, **entry.check(dict(inputs.options))) if reads and entry.gates else None
    return draw_reads(reads, shape, seed) if held is None else held
