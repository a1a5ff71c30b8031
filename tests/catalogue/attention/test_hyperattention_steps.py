from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.hyperattention.hyperattention import HyperAttention
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built


def draw(N: int) -> list[Tensor]:
    return [torch.randn(2, 2, N, 4, dtype=torch.float64) for _ in "qkv"]


def hyper(options: str, room: int) -> HyperAttention:
    return built(HyperAttention, f"hyperattention:{options}", Shape(2, 2, room, 4, causal=True)).double()


def test_a_state_holds_two_whole_numbers_of_each_key_before_the_current_block() -> None:
    module, (q, k, v) = hyper("block=4,samples=5", 40), draw(40)
    state = module.begin(q[:, :, :30], k[:, :, :30], v[:, :, :30])
    assert [span.tokens.shape for span in state.spans] == [(2, 2, 16), (2, 2, 8), (2, 2, 4)]
    assert sum(x.nbytes for span in state.spans for x in span) == 2 * 2 * 28 * 2 * 4
    for t in range(30, 32):
        _, state = module.step(state, *(x[:, :, t : t + 1] for x in (q, k, v)))
    (only,) = state.spans
    again = module.begin(q[:, :, :32], k[:, :, :32], v[:, :, :32]).spans[0]
    assert torch.equal(only.tokens, again.tokens)
    assert torch.equal(only.codes, again.codes)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.003)])
def test_a_step_in_lower_precision_stays_close(dtype: torch.dtype, bound: float) -> None:
    inputs = [x.to(dtype) for x in draw(40)]
    module = build("hyperattention:block=4,samples=5", Shape(2, 2, 40, 4, causal=True)).to(dtype)
    state = module.begin(*(x[:, :, :39] for x in inputs))
    out, _ = module.step(state, *(x[:, :, 39:] for x in inputs))
    assert out.dtype == dtype
    wanted = module.double()(*(x.double() for x in inputs))[:, :, 39:]
    assert relative_error(out, wanted) < bound
