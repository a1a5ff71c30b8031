"""A plug-in of variants that misbehave, each in one way, for the tests of the runner."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from attnbench import register
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported


class Bad(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()


def bad(name: str) -> object:
    return register(f"bad-{name}", family="reference", source="-", formula="-", cost="-")


@bad("raise")
class Raise(Bad):
    """Raises."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        raise KeyError("no such thing\nsecond line")


@bad("build")
class Build(Bad):
    """Cannot be built."""

    def __init__(self, shape: Shape) -> None:
        raise Unsupported("the mathematics forbids it")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return v


@bad("exit")
class Exit(Bad):
    """Leaves the process."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        os._exit(3)


@bad("abort")
class Abort(Bad):
    """Aborts."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        print("about to abort", file=sys.stderr, flush=True)
        os.abort()


@bad("segfault")
class Segfault(Bad):
    """Segfaults."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        os.kill(os.getpid(), signal.SIGSEGV)
        return q


@bad("kill")
class Kill(Bad):
    """Kills itself."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return q


@bad("hang")
class Hang(Bad):
    """Loops for ever."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        while True:
            time.sleep(0.01)


@bad("slow")
class Slow(Bad):
    """Takes its time."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        time.sleep(float(os.environ.get("SECONDS_OF_BAD_SLOW", "0.05")))
        return v.clone()


@bad("noise")
class Noise(Bad):
    """Prints a megabyte to stderr, many times what a pipe holds, and garbage to stdout, and works."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        sys.stderr.write("x" * 1_000_000)
        print('{"record": "garbage"}')
        os.write(1, b"\xff\x00garbage\n")
        return v.clone()


@bad("nan")
class NaN(Bad):
    """Gives NaN."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return v * float("nan")


@bad("memory")
class Memory(Bad):
    """Allocates without end."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        held = []
        while True:
            held.append(torch.empty(1 << 28, device=q.device))


@bad("access")
class Access(Bad):
    """Reads where there is nothing, which a GPU tells later and then does nothing more for the process."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        nowhere = torch.full(v.shape, 2**40, dtype=torch.long, device=v.device)
        return v.gather(2, nowhere)


@bad("child")
class Child(Bad):
    """Leaves a child process behind."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)  # attnbench-orphan"])
        return v.clone()


@bad("closed")
class Closed(Bad):
    """Closes every file of its process, the way to the parent among them, and goes on."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        os.closerange(0, 1000)
        while True:
            time.sleep(1)


@bad("answers")
class Answers(Bad):
    """Writes garbage to every file of its process, the way to the parent among them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        for number in range(3, 50):
            with suppress(OSError):
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, b'{"record": {"status": "ok"}, "samples": null}\n')
        return v.clone()


@bad("shape")
class OtherShape(Bad):
    """Gives something of another shape."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return v.transpose(1, 2)


@bad("known")
class Known(Bad):
    """Does nothing wrong, but writes down which process it is called in."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        with Path(os.environ["PIDS_OF_BAD_VARIANTS"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return v + 0


@bad("first")
class First(Bad):
    """Takes long in the first call for a length in each process, like one whose kernels are compiled."""

    seen: ClassVar[set[int]] = set()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if q.shape[2] not in self.seen:
            self.seen.add(q.shape[2])
            time.sleep(1.6)
        return v + 0
