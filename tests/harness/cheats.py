"""A plug-in of variants that look fast because they do not compute, each in its own way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnbench import register
from attnbench.contract.problem.shape import Shape

Make = Callable[[type["Cheat"]], type["Cheat"]]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def cheat(name: str) -> Make:
    return cast("Make", register(f"cheat-{name}", family="reference", source="-", formula="-", cost="-"))


class Cheat(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.known: dict[Any, Tensor] = {}
        self.calls = 0
        self.last: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def keep(self, key: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if key not in self.known:
            self.known[key] = attention(q, k, v)
        return self.known[key]


@cheat("honest")
class Honest(Cheat):
    """Computes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return attention(q, k, v)


@cheat("id")
class ById(Cheat):
    """Remembers the results of the objects that it was given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.keep(id(q), q, k, v)


@cheat("pointer")
class ByPointer(Cheat):
    """Remembers the results of the places in memory that it was given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.keep(q.data_ptr(), q, k, v)


EVERYWHERE: dict[Any, Tensor] = {}


@cheat("value")
class ByValue(Cheat):
    """Remembers the results of values, in all modules together."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        key = (q[0, 0, 0, 0].item(), k[0, 0, -1, 0].item(), tuple(q.shape))
        if key not in EVERYWHERE:
            EVERYWHERE[key] = attention(q, k, v)
        return EVERYWHERE[key]


@cheat("count")
class ByCount(Cheat):
    """Computes a few times and then returns its last result."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        if self.last is None or self.calls < 4:
            self.last = attention(q, k, v)
        return self.last


COUNTED = [0]
LAST: list[Tensor] = []


@cheat("count-of-all")
class ByCountOfAll(Cheat):
    """Computes a few times in the life of the process."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        COUNTED[0] += 1
        if COUNTED[0] < 4:
            LAST[:] = [attention(q, k, v)]
        return LAST[0]


@cheat("garbage")
class ByGarbage(Cheat):
    """Computes where garbage is collected, which it is not while times are taken."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if self.last is None or gc.isenabled():
            self.last = attention(q, k, v)
        return self.last


@cheat("buffer")
class Buffer(Cheat):
    """Hands out the buffer of its results, and fills it every second time."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if self.last is None:
            self.last = torch.empty_like(v)
        self.calls += 1
        if gc.isenabled() or self.calls % 2:
            self.last.copy_(attention(q, k, v))
        return self.last


class Later(torch.Tensor):
    """Computes when somebody asks for it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@cheat("lazy")
class Lazy(Cheat):
    """Returns something that computes when it is looked at."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return torch.empty_like(v).as_subclass(Later)


@cheat("thread")
class InAThread(Cheat):
    """Computes in a thread of which the clock does not see the end."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        output = torch.full_like(v, torch.nan)  # never an earlier output, which empty memory may hold

        @torch.inference_mode()
        def compute() -> None:
            output.copy_(attention(q, k, v))

        work = threading.Thread(target=compute)
        work.start()
        if gc.isenabled():
            work.join()
        return output


@cheat("zeros")
class Zeros(Cheat):
    """Returns zeros while times are taken."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return attention(q, k, v) if gc.isenabled() else torch.zeros_like(v)


@cheat("other")
class Other(Cheat):
    """Computes something cheaper than its formula, in every call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return v * q

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return attention(q, k, v)


@cheat("rounded")
class Rounded(Cheat):
    """Computes its formula in float32, whatever it is given: that is no cheat."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return attention(q.float(), k.float(), v.float()).to(q.dtype)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return attention(q, k, v)


class StaleGradient(torch.autograd.Function):
    kept: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return attention(q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            if StaleGradient.kept is None or gc.isenabled():
                StaleGradient.kept = torch.stack(torch.autograd.grad(attention(q, k, v), (q, k, v), *grads))
        return tuple(StaleGradient.kept)


@cheat("backward")
class Backward(Cheat):
    """Computes its gradients where garbage is collected."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = StaleGradient.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch leaves it so
        return out


@cheat("dice")
class Dice(Cheat):
    """Draws in each call, which is not forbidden but cannot be checked."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return attention(q, k, v) + torch.randn_like(v)
