"""Numbers that an operator reads of each token beside q, k and v: the gates of a recurrence.

A gate is a tensor ``(B, K, M, width)``: K heads of keys and values, each with a state of its own, and tokens along the
axis that they have in k and v. Its width is 1, that of a key (D) or that of a value (E).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

from attnbench.contract.problem.shape import Shape
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from torch import Generator, Tensor

Width = Literal["one", "key", "value"]
How = Literal["fading", "slow", "bounded", "sigmoid", "near one", "normal", "uniform"]
DRAWN: Mapping[How, str] = {
    "fading": "-A·softplus(x + b)·log2(e), x from N(0, 1), A from U(0, 16] by head, "
    "softplus(b) log-uniform in [0.001, 0.1]",
    "slow": "log2(σ(x)) / 16, x from N(0, 1)",
    "bounded": "-σ(x)·log2(e)/√e, x from N(0, 1)",
    "sigmoid": "σ(x), x from N(0, 1)",
    "near one": "σ(1 + x/4), x from N(0, 1)",
    "normal": "N(0, 1)",
    "uniform": "U[0, 1]",
}
"""The distributions of gates, as a trained layer has them."""


@dataclass(frozen=True)
class Read:
    """A gate, its unit, and its distribution in a trained layer."""

    name: str
    width: Width
    meaning: str
    how: How
    """Its distribution, a key of :data:`DRAWN`."""
    least: float = -math.inf
    most: float = math.inf

    def columns(self, D: int, E: int) -> int:
        return {"one": 1, "key": D, "value": E}[self.width]

    @property
    def size(self) -> str:
        """``(B, K, N, D)``, say."""
        return f"(B, K, N, {({'one': '1', 'key': 'D', 'value': 'E'})[self.width]})"

    @property
    def range(self) -> str:
        """``at most 0`` or ``0 to 2``; empty if any number will do."""
        if self.least > -math.inf:
            return f"{self.least:g} to {self.most:g}" if self.most < math.inf else f"at least {self.least:g}"
        return f"at most {self.most:g}" if self.most < math.inf else ""


def draw_reads(reads: Sequence[Read], shape: Shape, seed: int) -> list[Tensor]:
    """Each gate ``(B, K, M, width)`` in float32 on the CPU, from the distribution that its :class:`Read` states.

    They go with the q, k and v of any input. A gate is drawn by its name and ``seed``: two operators that read the same
    gate get the same numbers.
    """
    import torch

    sizes = ((shape.B, shape.K, shape.M, read.columns(shape.D, shape.E)) for read in reads)
    return [
        _numbers(read.how, size, torch.Generator().manual_seed(seed + crc32(f"{read.name} {read.how}".encode())))
        for read, size in zip(reads, sizes, strict=True)
    ]


class Checked:
    """A hook for a module's first call: refuses gates of a wrong number, shape or range, and leaves."""

    def __init__(self, name: str, reads: Sequence[Read]) -> None:
        self.name, self.reads = name, tuple(reads)

    def __call__(self, module: Any, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        """Raise UsageError: the gates do not fit k and v, or leave their ranges at a real token."""
        for place, hook in list(module._forward_pre_hooks.items()):
            if hook is self:
                del module._forward_pre_hooks[place], module._forward_pre_hooks_with_kwargs[place]
        check_reads(self.name, self.reads, inputs, named.get("key_mask"))


def check_reads(name: str, reads: Sequence[Read], inputs: Sequence[Tensor], key_mask: Tensor | None = None) -> None:
    """Raise UsageError unless the gates behind q, k and v are those that the operator reads."""
    if len(inputs) != 3 + len(reads):
        wanted = ", ".join(f"{read.name} {read.size}" for read in reads)
        raise UsageError(f"{name} reads {wanted} after q, k and v, and got {len(inputs) - 3} tensors there; give these")
    _, k, v, *gates = inputs
    for read, gate in zip(reads, gates, strict=True):
        size = (*k.shape[:3], read.columns(k.shape[3], v.shape[3]))
        if tuple(gate.shape) != size:
            raise UsageError(f"{name}: {read.name} is {read.size}, here {size}, and not {tuple(gate.shape)}")
        if _unknown(gate):
            continue
        outside = (gate < read.least) | (gate > read.most)
        if key_mask is not None:
            outside = outside & key_mask[:, None, :, None]
        if bool(outside.any()):
            raise UsageError(f"{name}: {read.name} is {read.range}, {read.meaning}; {float(gate[outside][0]):g} is not")


def _unknown(gate: Tensor) -> bool:
    """True where nobody may look at the numbers: traced, compiled or captured."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(gate, FakeTensor) or gate.is_meta or torch.compiler.is_compiling():
        return True
    return gate.is_cuda and torch.cuda.is_current_stream_capturing()


def _numbers(how: How, size: tuple[int, int, int, int], generator: Generator) -> Tensor:
    import torch

    if how == "uniform":
        return torch.rand(size, generator=generator)
    x = torch.randn(size, generator=generator)
    if how == "fading":
        A = 16 * (1 - torch.rand(size[1], 1, 1, generator=generator))
        step = torch.rand(size[1], 1, size[3], generator=generator).mul(math.log(100)).add(math.log(0.001)).exp()
        bias = step + torch.log(-torch.expm1(-step))  # its softplus is the step
        return torch.nn.functional.softplus(x + bias) * (A / -math.log(2))
    if how == "slow":
        return torch.nn.functional.logsigmoid(x) / (16 * math.log(2))
    if how == "bounded":
        return torch.sigmoid(x) * (-math.exp(-0.5) / math.log(2))
    return x if how == "normal" else torch.sigmoid(1 + x / 4 if how == "near one" else x)


_LEFT = "log2 of the share of the state that is left"
_BY_CHANNEL = f"{_LEFT}, for a channel of the keys"

DECAY = Read("log2_decay", "one", f"{_LEFT}, for a head", "fading", most=0)
CHANNEL_DECAY = Read("log2_decay", "key", _BY_CHANNEL, "fading", most=0)
SLOW_DECAY = Read("log2_decay", "key", _BY_CHANNEL, "slow", most=0)
BOUNDED_DECAY = Read("log2_decay", "key", _BY_CHANNEL, "bounded", least=-1, most=0)
BETA = Read("beta", "one", "the share of the step towards v", "sigmoid", least=0, most=2)
ERASE = Read("erase", "key", "the share of each channel of k that is erased", "sigmoid", least=0, most=2)
WRITE = Read("write", "value", "the share of each channel of v that is written", "sigmoid", least=0, most=1)
FEEDBACK = Read("feedback", "one", "the share of what stood for k that is taken out", "near one", least=0, most=2)
CORRECTION = Read("correction", "one", "the share of k that is taken off q", "uniform")
REMOVAL = Read("removal", "key", "the key along which is taken out, of any length", "normal")
SHARE = Read("share", "key", "the share that is taken out of each channel", "sigmoid", least=0, most=1)
