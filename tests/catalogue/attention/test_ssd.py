from __future__ import annotations

from functools import partial

import pytest
import torch

from attnbench.catalogue.attention.recurrence.ssd import SSD
from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.recurrent.decayed_sums import decayed_attention, last_state
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL, close, peak_of, tokens


def make(shape: Shape, *, state: int = 5, chunk: int = 7) -> SSD:
    module = SSD(shape, state=state, chunk=chunk).double()
    with torch.no_grad():
        module.step_size.bias.add_(3)  # decays that matter over some tokens
    return module


@pytest.mark.parametrize("groups", [2, 3])
def test_a_group_of_heads_is_a_layer_with_a_b_and_a_c_of_its_own(groups: int) -> None:
    six = Shape(batch=2, heads=6, seq_len=23, head_dim=4, causal=True)
    module, u = SSD(six, state=5, groups=groups, chunk=7).double(), tokens(six)
    part, heads = SSD(six, state=5, chunk=7).double(), 6 // groups
    read = torch.unflatten(module._mix(*module._parts(u)).detach(), 1, (groups, heads))
    for g in range(groups):
        with torch.no_grad():
            own = module.key_query.weight.view(2, groups, 5, 24)[:, g].flatten(0, 1)
            for name, value in {**module.state_dict(), "key_query.weight": own}.items():
                part.get_parameter(name).copy_(value)
        close(read[:, g], part._mix(*part._parts(u))[:, g * heads : (g + 1) * heads])
    close(module(u), module.dense(u))


def test_equals_the_recurrence_of_the_paper() -> None:
    module, u = make(CAUSAL), tokens(CAUSAL)
    weight = {name: parameter.detach() for name, parameter in module.named_parameters()}
    key, query = torch.split(u @ weight["key_query.weight"].T, 5, dim=2)
    size = torch.log1p(torch.exp(u @ weight["step_size.weight"].T + weight["step_size.bias"]))
    values = (u @ weight["value.weight"].T).view(2, 23, 3, 4)
    state, rows = torch.zeros(2, 3, 5, 4, dtype=torch.float64), []
    for t in range(23):
        for h in range(3):
            decay = torch.exp(-size[:, t, h] * weight["log_A"][h].exp())[:, None, None]
            write = key[:, t, :, None] * size[:, t, h, None, None] * values[:, t, None, h]
            state[:, h] = decay * state[:, h] + write
        rows.append(torch.einsum("bs,bhsd->bhd", query[:, t], state).flatten(1))
    close(module(u), torch.stack(rows, 1) @ weight["out.weight"].T)


def test_the_last_state_of_a_long_prompt_keeps_its_digits() -> None:
    k, v = torch.randn(1, 1, 4000, 2), torch.randn(1, 1, 4000, 2)
    decay = torch.full((1, 1, 4000, 1), -0.37)
    state = last_state(k, v, decay)
    exact = last_state(k.double(), v.double(), decay.double())
    torch.testing.assert_close(state.double(), exact, rtol=1e-4, atol=1e-4)


def test_training_holds_the_intermediate_results_of_few_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(1, 8, 4096, 16, requires_grad=True) for _ in range(3)]
    log_decay = -torch.rand(1, 8, 4096)

    def peak(limit: int) -> int:
        monkeypatch.setitem(tiling.TUNED, "linear.features", tiling.Tuned(limit, 2))
        compute = partial(decayed_attention, causal=True, chunk=64)
        return peak_of(lambda: torch.autograd.grad(by_heads(compute, *inputs, log_decay).sum(), inputs))

    one_at_a_time = peak(2**14)
    assert one_at_a_time < 0.4 * peak(2**24)
    assert one_at_a_time < 12 * inputs[0].nbytes
