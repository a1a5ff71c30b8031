"""Where freed memory is kept, a call pays for page faults once."""

from __future__ import annotations

from tests.bare import in_bare_process

FAULTS = """
import ctypes, resource, torch
from attnbench.measure.allocator import freed_memory_kept

def faults() -> int:
    def before() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**20)
    start = before()
    for _ in range(10):
        torch.ones(2**20)  # 1,024 pages
    return before() - start

libc = ctypes.CDLL(None)
assert libc.mallopt(-1, 2**20) and libc.mallopt(-3, 2**20)  # tensors of more than a MiB are given back
"""


def test_memory_that_is_kept_is_taken_without_page_faults() -> None:
    done = in_bare_process(
        FAULTS + "returned = faults()\n"
        "with freed_memory_kept():\n    faults()\n    kept = faults()\n"
        "print(returned, kept, faults())"
    )
    returned, kept, afterwards = map(int, done.stdout.split())
    assert returned > 10_000
    assert kept < 2000
    assert afterwards < 2000  # a process of a user's is no slower than it was


def test_afterwards_a_large_tensor_is_given_back_whatever_was_made_after_it() -> None:
    done = in_bare_process(
        FAULTS
        + """
def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
with freed_memory_kept():
    pass
large = torch.ones(2**25)
after = [torch.ones(2**16) for _ in range(9)]
before = resident()
del large
print(before - resident() > 100 * 2**20)
"""
    )
    assert done.stdout == "True\n", done.stderr


SCORES = """
from attnbench import register
from attnbench.laws import check_variant
from attnbench.contract.variant import Traits
from torch import Tensor, nn

@register(
    "scores", family="kernel", source="-", formula="-", cost="O(n²·d)", traits=Traits(target="other", permutable=True)
)
class Scores(nn.Module):
    \"""All scores at once: 256 KiB for 256 tokens, 4 MiB for 1,024.\"""

    def __init__(self, shape: object) -> None: super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: None = None) -> Tensor:
        return (q @ k.mT).relu() @ v

(finding,) = check_variant("scores", laws=["time"]).of("time")
print(finding.held, finding.number)
"""


def test_a_law_does_not_take_page_faults_of_the_longer_call_for_its_time() -> None:
    done = in_bare_process(FAULTS + SCORES)
    assert done.stdout.startswith("True"), done.stdout + done.stderr
