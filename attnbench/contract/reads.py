"""Numbers that an operator reads of each token beside q, k and v: the gates of a recurrence.

A gate is a tensor ``(B, K, M, width)``: K heads of values, each with a state of its own, and tokens along the
axis that they have in k and v. Its width is 1, that of a key (D), that of a value (E), or what an option says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

from attnbench.contract.problem.shape import Shape
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from torch import Generator, Tensor

How = (
    Literal["fading", "forgetting", "slow", "less slow", "bounded", "sigmoid", "twice sigmoid", "near one", "softplus"]
    | Literal["normal", "uniform"]
)
DRAWN: Mapping[How, str] = {
    "fading": "-A·softplus(x + b)·log2(e), x from N(0, 1), A from U(0, 16] by head, "
    "softplus(b) log-uniform in [0.001, 0.1]",
    "forgetting": "-A·softplus(x + b), as for a fading state",
    "slow": "log2(σ(x)) / 16, x from N(0, 1)",
    "less slow": "log2(σ(x)) / 8, x from N(0, 1)",
    "bounded": "-σ(x)·log2(e)/√e, x from N(0, 1)",
    "sigmoid": "σ(x), x from N(0, 1)",
    "twice sigmoid": "2σ(x), x from N(0, 1)",
    "near one": "σ(1 + x/4), x from N(0, 1)",
    "softplus": "softplus(x), x from N(0, 1)",
    "normal": "N(0, 1)",
    "uniform": "U[0, 1]",
}
"""The distributions of gates, as a trained layer has them."""
_WIDTHS = {"one": "1", "key": "D", "value": "E"}


@dataclass(frozen=True)
class Read:
    """A gate, its unit, and its distribution in a trained layer."""

    name: str
    width: str
    """``one``, ``key``, ``value``, or the name of an option that counts it."""
    meaning: str
    how: How
    """Its distribution, a key of :data:`DRAWN`."""
    least: float = -math.inf
    most: float = math.inf
    count: Any = None
    """The value of that option; where it is none, M tokens have as many as M - 1 has bits, and one more."""

    def columns(self, D: int, E: int, free: int) -> int:
        """The width; ``free`` where neither shape nor options say it."""
        return {"one": 1, "key": D, "value": E}.get(self.width) or self.count or free

    @property
    def size(self) -> str:
        """``(B, K, N, D)``, say."""
        return f"(B, K, N, {_WIDTHS.get(self.width, self.width)})"

    @property
    def range(self) -> str:
        """``at most 0`` or ``0 to 2``; empty if any number will do."""
        if self.least > -math.inf:
            return f"{self.least:g} to {self.most:g}" if self.most < math.inf else f"at least {self.least:g}"
        return f"at most {self.most:g}" if self.most < math.inf else ""


def counted(reads: Sequence[Read], options: Mapping[str, Any]) -> tuple[Read, ...]:
    """The gates, with the widths that options count."""
    return tuple(replace(read, count=options[read.width]) if read.width in options else read for read in reads)


def draw_reads(reads: Sequence[Read], shape: Shape, seed: int) -> list[Tensor]:
    """Each gate ``(B, K, M, width)`` in float32 on the CPU, from the distribution that its :class:`Read` states.

    They go with the q, k and v of any input. A gate is drawn by its name and ``seed``: two operators that read the same
    gate get the same numbers.
    """
    import torch

    free = 1 + (shape.M - 1).bit_length()
    sizes = ((shape.B, shape.K, shape.M, read.columns(shape.D, shape.E, free)) for read in reads)
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
        raise UsageError(
            f"{name} reads {wanted} after q, k and v, and got {len(inputs) - 3} tensors there; give these by place"
        )
    _, k, v, *gates = inputs
    for read, gate in zip(reads, gates, strict=True):
        size = (*v.shape[:3], read.columns(k.shape[3], v.shape[3], gate.shape[-1]))
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
    if how in ("fading", "forgetting"):
        A = 16 * (1 - torch.rand(size[1], 1, 1, generator=generator))
        step = torch.rand(size[1], 1, size[3], generator=generator).mul(math.log(100)).add(math.log(0.001)).exp()
        bias = step + torch.log(-torch.expm1(-step))  # its softplus is the step
        return torch.nn.functional.softplus(x + bias) * (A / -(math.log(2) if how == "fading" else 1))
    if how in ("slow", "less slow"):
        return torch.nn.functional.logsigmoid(x) / ((16 if how == "slow" else 8) * math.log(2))
    if how == "bounded":
        return torch.sigmoid(x) * (-math.exp(-0.5) / math.log(2))
    if how == "softplus":
        return torch.nn.functional.softplus(x)
    share = torch.sigmoid(1 + x / 4 if how == "near one" else x)
    return x if how == "normal" else 2 * share if how == "twice sigmoid" else share


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
LOG_FORGET = Read("log_forget", "one", "the logarithm to the base e of what earlier keys keep", "forgetting", most=0)
SLOT_DECAY = Read("log2_decay", "slots", f"{_LEFT}, for a slot", "less slow", most=0)
CONTROL = Read("control", "slots", "the logarithm of a token's weight in a slot", "normal")
LEVEL_WEIGHT = Read("level_weight", "levels", "the weight of what is read at a level of distance", "softplus", least=0)
DIRECTION = Read("direction", "key", "the vector along which earlier keys are reflected, of any length", "normal")
REFLECTION = Read("reflection", "one", "the share taken along that vector, 2 to reflect", "twice sigmoid", 0, 2)
TAKEN = Read("taken", "one", "the share of its finds that a token takes off its value", "sigmoid", 0, 1)

NAMES = frozenset(read.name for read in list(globals().values()) if isinstance(read, Read))
"""The names of all gates."""
