"""The answers about bits: equal, or how far apart and where; and what hides in a batch or in a padded call is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.laws import bits
from attnbench.laws.bits import QUESTIONS, Answer, BitsSubject, ask
from attnbench.laws.laws import Case

FEW = Shape(1, 2, 32, 8)


def subject(name: str, dtype: torch.dtype = torch.float32) -> BitsSubject:
    entry = VARIANTS.get(name)
    one = BitsSubject.of(Case(entry, Spec(name), bool(entry.traits.causal)), dtype)
    return replace(one, shape=replace(FEW, causal=one.case.causal))


@pytest.fixture
def in_place_of_linear(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[nn.Module]], BitsSubject]:
    def put(make: type[nn.Module]) -> BitsSubject:
        monkeypatch.setitem(VARIANTS._entries, "linear", replace(VARIANTS.get("linear"), make=make))
        return subject("linear")

    return put


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_unit_in_the_last_place_is_one_and_has_a_place(dtype: torch.dtype) -> None:
    one = torch.tensor([[1.0, 0.25], [1.5, 3.0]], dtype=dtype)
    other = one.clone()
    other[1, 1] = torch.nextafter(one[1, 1].double().to(dtype), torch.tensor(4.0, dtype=dtype))
    found = bits._worse(Answer("", ""), ("here", one, other))
    assert (found.equal, found.ulps, found.where, found.case, found.share) == (False, 1.0, (1, 1), "here", 0.25)


def test_a_number_near_0_is_measured_in_the_unit_of_its_row() -> None:
    one = torch.tensor([1.0, 1e-9])
    found = bits._worse(Answer("", ""), ("", one, torch.tensor([1.0, 2e-9])))
    assert 0 < found.ulps < 0.1


def test_the_sign_of_0_is_a_bit_and_the_larger_difference_stays() -> None:
    found = bits._worse(Answer("", ""), ("sign", torch.tensor([0.0]), torch.tensor([-0.0])))
    assert (found.equal, found.ulps) == (False, 0.0)
    found = bits._worse(Answer("", ""), ("far", torch.tensor([1.0]), torch.tensor([1.5])))
    after = bits._worse(found, ("near", torch.tensor([1.0]), torch.tensor([1.25])))
    assert after == found
    assert bits._worse(found, ("equal", torch.ones(1), torch.ones(1))).equal is False


def test_every_question_has_an_answer_or_a_reason() -> None:
    found = {question: ask(question, subject("linear")) for question in QUESTIONS}
    assert [name for name, one in found.items() if one.equal is None] == ["deterministic form"]
    assert found["the same call twice"].equal
    assert found["gradients twice"].equal
    assert all(bool(one.why) == (one.equal is None) for one in found.values())
    assert all(one.ulps < 1000 for one in found.values()), "rounding, and no other numbers"


def test_what_is_not_causal_or_takes_no_mask_is_not_asked() -> None:
    assert "not causal" in ask("its first half alone", subject("linformer")).why
    assert "decode" in ask("token by token", subject("linformer")).why
    assert "key padding" in ask("padded", subject("nystrom")).why or VARIANTS.get("nystrom").traits.key_padding


class Wrong(nn.Module):
    """Causal means, off by what ``fault`` says."""

    fault = ""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        out = v.cumsum(2) / torch.arange(1, v.shape[2] + 1)[:, None]
        off = {
            "call": self.calls > 1,
            "batch": v.shape[0] > 3,
            "length": v.shape[2] < FEW.N,
            "mask": key_mask is not None,
            "threads": torch.get_num_threads() == 2,
        }
        return out * (1 + 2**-20 * off.get(self.fault, False))


@pytest.mark.parametrize(
    ("fault", "question", "case"),
    [
        ("call", "the same call twice", "the output"),
        ("batch", "first in a batch", "the first of"),
        ("batch", "last in a batch", "the last of"),
        ("length", "its first half alone", "the first half"),
        ("mask", "padded", "with a mask that hides nothing"),
        ("threads", "one thread or two", "the output"),
    ],
)
def test_a_difference_of_a_few_units_is_found_in_the_question_about_it(
    fault: str, question: str, case: str, in_place_of_linear: Callable[[type[nn.Module]], BitsSubject]
) -> None:
    assert ask(question, in_place_of_linear(Wrong)).equal, "without the fault"
    found = ask(question, in_place_of_linear(type("Wrong", (Wrong,), {"fault": fault})))
    assert found.equal is False
    assert case in found.case
    assert 4 <= found.ulps <= 16
    assert found.share > 0.5


def test_a_call_that_raises_is_a_reason_and_no_end(
    in_place_of_linear: Callable[[type[nn.Module]], BitsSubject],
) -> None:
    class Raises(Wrong):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            if v.shape[0] > 2:
                raise ValueError("one or two")
            return v

    found = ask("first in a batch", in_place_of_linear(Raises))
    assert (found.equal, found.why) == (None, "it raises ValueError: one or two")
    assert ask("the same call twice", in_place_of_linear(Raises)).equal


def test_the_gradients_of_gates_have_the_names_of_the_gates() -> None:
    core = Case(VARIANTS.get("gla").at("operator"), Spec("gla"), causal=True)
    one = replace(BitsSubject.of(core, torch.float32), shape=replace(FEW, causal=True))
    assert [name for name, _ in bits._training(one)()] == [
        "the output",
        *(f"the gradient of {name}" for name in ("q", "k", "v", "log2_decay")),
    ]


def test_threads_and_the_deterministic_mode_are_as_before() -> None:
    before = torch.get_num_threads()
    ask("one thread or two", subject("linear"))
    assert torch.get_num_threads() == before
    with bits._deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
