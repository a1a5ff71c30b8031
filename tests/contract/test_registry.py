from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field
from torch import nn

from attnbench.catalogue.build import build
from attnbench.contract import variant as variant_module
from attnbench.contract.inputs import INPUTS
from attnbench.contract.problem.shape import Shape
from attnbench.contract.registry import Entry, Registry
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.task import TASKS
from attnbench.contract.variant import FAMILIES, VARIANTS, No, Traits, Variant, register
from attnbench.errors import Unsupported, UsageError


def make(
    shape: Shape,
    *,
    features: Annotated[int, Field(ge=1, le=4096, description="random features")] = 256,
    kernel: Annotated[Literal["relu", "exp"], Field(description="feature map")] = "exp",
    epsilon: Annotated[float, Field(ge=0, description="added to the features")] = 0.0,
    redraw: bool = False,
    window: int | None = None,
) -> dict[str, Any]:
    return {"features": features, "kernel": kernel, "epsilon": epsilon, "redraw": redraw, "window": window}


def read(*, path: str, layer: int = 0) -> tuple[str, int]:
    return path, layer


ENTRY = Entry("performer", make, "Random features.")
FILE = Entry("file", read, "Reads.")
BARE = Entry("softmax", lambda shape: shape, "No options.")


# Entry


def test_options_are_the_keyword_only_parameters_in_their_order() -> None:
    assert list(ENTRY.options) == ["features", "kernel", "epsilon", "redraw", "window"]
    assert ENTRY.options["features"].default == 256
    assert ENTRY.options["features"].description == "random features"
    assert ENTRY.options["epsilon"].annotation is float
    assert not BARE.options


def test_only_what_was_given_is_passed_on() -> None:
    assert ENTRY.check({}) == {}
    assert ENTRY.check({"features": 256, "window": None}) == {"features": 256, "window": None}


def test_a_whole_number_will_do_where_a_fraction_may_stand() -> None:
    checked = ENTRY.check({"epsilon": 1})
    assert checked == {"epsilon": 1.0}
    assert type(checked["epsilon"]) is float


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "performer: option features=0 must be at least 1"),
        ({"features": 5000}, "performer: option features=5000 must be at most 4096"),
        ({"features": 64.5}, "performer: option features=64.5 must be a whole number"),
        ({"features": True}, "performer: option features=true must be a whole number"),
        ({"features": "64"}, "performer: option features=64 must be a whole number"),
        ({"features": None}, "performer: option features=none must be a whole number"),
        ({"kernel": "tanh"}, "performer: option kernel=tanh must be 'relu' or 'exp'"),
        ({"redraw": 1}, "performer: option redraw=1 must be true or false"),
        ({"window": "wide"}, "performer: option window=wide must be a whole number"),
        ({"epsilon": -1e-6}, "performer: option epsilon=-1e-06 must be at least 0"),
        ({"feature": 64}, "performer: unknown option 'feature'; did you mean 'features'?"),
        (
            {"qqq": 64},
            "performer: unknown option 'qqq'; it has features, kernel, epsilon, redraw, window",
        ),
    ],
)
def test_a_bad_option_is_one_line_that_says_what_to_change(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ENTRY.check(options)
    assert str(caught.value) == message


def test_an_option_of_something_without_options() -> None:
    with pytest.raises(UsageError, match="softmax: unknown option 'x'; it has no options"):
        BARE.check({"x": 1})
    with pytest.raises(UsageError, match="softmax has no options"):
        BARE.check(dict(parse_spec("softmax:1").options))


def test_an_option_without_a_default_is_required() -> None:
    with pytest.raises(UsageError, match="file: option 'path' is required"):
        FILE.check({})
    with pytest.raises(UsageError, match="file: option 'path' is required"):
        FILE.check({"layer": 2})


def test_a_value_without_a_name_is_the_first_option() -> None:
    assert FILE.check(dict(parse_spec("file:qkv.safetensors,layer=2").options)) == {
        "path": "qkv.safetensors",
        "layer": 2,
    }
    with pytest.raises(UsageError, match="file: option 'path' is given twice"):
        FILE.check(dict(parse_spec("file:a,path=b").options))


def test_normalising_names_positions_and_drops_what_repeats_the_default() -> None:
    assert ENTRY.normalise(parse_spec("performer:128")) == Spec.of("performer", {"features": 128})
    assert ENTRY.normalise(parse_spec("performer:features=256,epsilon=0,kernel=relu")).label == "performer:kernel=relu"
    assert FILE.normalise(parse_spec("file:x,layer=0")).label == "file:path=x"


# Registry


def test_a_registry_keeps_the_order_and_refuses_a_name_that_is_taken() -> None:
    table: Registry[Entry] = Registry("variant")
    for entry in (ENTRY, BARE, FILE):
        table.add(entry)
    assert table.names() == ["performer", "softmax", "file"]
    assert [entry.name for entry in table] == table.names()
    assert "softmax" in table
    assert "sparse" not in table
    assert table.get("file") is FILE
    with pytest.raises(UsageError, match="variant 'file' is registered already"):
        table.add(FILE)


@pytest.mark.parametrize(("name", "hint"), [("perfomer", "; did you mean 'performer'?"), ("xyz", "")])
def test_an_unknown_name_is_told_with_the_nearest_one(name: str, hint: str) -> None:
    table: Registry[Entry] = Registry("variant")
    table.add(ENTRY)
    with pytest.raises(UsageError) as caught:
        table.get(name)
    assert str(caught.value) == f"unknown variant {name!r}{hint}"


def test_an_option_without_its_value_is_not_taken_for_a_value() -> None:
    with pytest.raises(UsageError, match="option 'kernel' has no value; write performer:kernel=VALUE"):
        ENTRY.normalise(parse_spec("performer:kernel"))


def test_a_look_up_imports_one_variant_and_no_plug_in_takes_the_name_of_another(tmp_path: Path) -> None:
    """All 104 took each process of a run a tenth of a second."""
    code = """
import sys
from torch import nn
from attnbench import register
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError

VARIANTS.get("linear")
assert "attnbench.catalogue.attention.kernel.linear" in sys.modules
assert "attnbench.catalogue.attention.recurrence.gla" not in sys.modules
try:
    @register("gla", family="reference", source="-", formula="-", cost="-")
    class Taker(nn.Module):
        def __init__(self, shape):
            super().__init__()

        def forward(self, q, k, v, *, key_mask=None):
            return v
except UsageError as error:
    print(error)
assert "attnbench.catalogue.attention.recurrence.gla" not in sys.modules
print(*VARIANTS.names()[:3])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "ATTNBENCH_PLUGINS": ""}
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "variant 'gla' is registered already; choose another name",
        "softmax chunked sdpa",
    ]


@pytest.mark.parametrize("table", [VARIANTS, INPUTS, TASKS], ids=lambda table: table.kind)
def test_each_shipped_name_is_registered_by_the_module_that_the_table_names(table: Registry[Any]) -> None:
    shipped = import_module(str(table.home)).SHIPPED
    for name, module in shipped.items():
        assert table.get(name).make.__module__.startswith(f"{table.home}.{module}"), name
    own = [
        entry.name
        for entry in [*table, *table.compounds.values()]
        if entry.make.__module__.startswith(f"{table.home}.")
    ]
    assert own == list(shipped)


def test_a_registry_may_grow_while_it_is_gone_through() -> None:
    table: Registry[Entry] = Registry("variant")
    table.add(ENTRY)
    for _ in table:
        table.add(BARE)
    assert len(table.names()) == 2


# Variants


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Registry[Variant]:
    """A table of its own with one random variant."""
    table: Registry[Variant] = Registry("variant")
    monkeypatch.setattr(variant_module, "VARIANTS", table)
    monkeypatch.setattr("attnbench.catalogue.build.VARIANTS", table)

    @register(
        "noise",
        family="reference",
        source="here",
        formula="O = W",
        cost="O(1)",
        traits=Traits(causal=No("noise has no direction"), cross=False, key_padding=True, stochastic=True),
    )
    class Noise(nn.Module):
        """Gaussian noise.

        More about it.
        """

        def __init__(self, shape: Shape, *, size: Annotated[int, Field(ge=1)] = 3) -> None:
            super().__init__()
            if size > shape.N:
                raise Unsupported(f"size {size} exceeds N = {shape.N}")
            self.register_buffer("noise", torch.randn(size))

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, key_mask: torch.Tensor | None = None
        ) -> torch.Tensor:
            return v

    return table


def noise(module: nn.Module) -> torch.Tensor:
    return module.get_buffer("noise")


def test_the_first_line_of_the_docstring_is_the_summary(table: Registry[Variant]) -> None:
    assert table.get("noise").summary == "Gaussian noise."
    assert (table.get("noise").time_exponent, table.get("noise").kind) == (0.0, "operator")


class Whole(nn.Module):
    """Nothing wrong."""

    def __init__(self, shape: Shape, *, size: int = 1) -> None:
        super().__init__()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, key_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return v


class Positional(Whole):
    def __init__(self, shape: Shape, size: int = 1) -> None:
        super().__init__(shape)


class Required(Whole):
    def __init__(self, shape: Shape, *, size: int) -> None:
        super().__init__(shape)


class NoForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()


class NoMask(Whole):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return v


class NoQueries(Whole):
    def begin(self, k: torch.Tensor, v: torch.Tensor) -> tuple[()]:
        return ()

    def step(self, state: tuple[()], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return v, state


@pytest.mark.parametrize(
    ("cls", "more", "rule"),
    [
        (Whole, {"family": "exakt"}, f"family 'exakt' is not one of {FAMILIES[0]}, "),
        (Positional, {}, "option 'size' must be keyword-only: write a * before it in __init__"),
        (Required, {}, "option 'size' needs a default"),
        (NoForward, {}, "it has no forward"),
        (NoMask, {}, "forward must take key_mask=None"),
        (Whole, {"traits": Traits(decode=True)}, "it claims to decode and lacks begin or step"),
        (
            NoQueries,
            {"traits": Traits(decode=True)},
            "begin must take the inputs of forward, of a prompt: begin(self, q, k, v)",
        ),
    ],
)
def test_a_class_that_breaks_the_contract_is_told_which_rule(
    cls: type, more: dict[str, Any], rule: str, table: Registry[Variant]
) -> None:
    facts: dict[str, Any] = {"family": "exact", "source": "", "formula": "", "cost": "", **more}
    with pytest.raises(UsageError, match=re.escape(f"variant 'x': {rule}")):
        register("x", **facts)(cls)
    assert "x" not in table


def test_building_draws_from_the_seed_and_leaves_the_generator_alone(table: Registry[Variant]) -> None:
    state = torch.get_rng_state()
    first, again, other = (noise(build("noise", Shape(), seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert not build("noise", Shape()).training


def test_building_leaves_the_generators_of_other_devices_alone(
    table: Registry[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", pytest.fail)
    build("noise", Shape(), seed=1)


def test_options_of_the_call_override_those_in_the_text(table: Registry[Variant]) -> None:
    assert noise(build("noise:size=5", Shape())).shape == (5,)
    assert noise(build("noise:size=5", Shape(), size=7)).shape == (7,)
    assert noise(build(Spec.of("noise", {"size": 4}), Shape())).shape == (4,)


@pytest.mark.parametrize(
    ("text", "shape", "reason"),
    [
        ("noise", Shape(causal=True), "causal: noise has no direction"),
        ("noise", Shape(kv_len=7), "cross-attention: not defined for this variant"),
        ("noise:size=9", Shape(seq_len=8), "size 9 exceeds N = 8"),
    ],
)
def test_what_the_mathematics_rules_out_is_unsupported(
    table: Registry[Variant], text: str, shape: Shape, reason: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        build(text, shape)
    assert str(caught.value) == reason


def test_keys_as_many_as_queries_are_no_cross_attention(table: Registry[Variant]) -> None:
    assert table.get("noise").unsupported_reason(Shape(seq_len=8, kv_len=8), key_mask=True) is None


def test_a_bad_option_comes_before_an_unsupported_shape(table: Registry[Variant]) -> None:
    with pytest.raises(UsageError, match="unknown option"):
        build("noise:sise=3", Shape(causal=True))


def test_an_option_may_change_what_an_error_means() -> None:
    def make(shape: Shape, *, kernel: str = "exp", conv: int | None = None) -> None: ...

    traits = Traits(given=(("kernel=relu", {"target": "other"}), ("conv", {"target": "learned"})))
    entry = Variant("performer", make, "", family="kernel", source="", formula="", cost="", traits=traits)
    assert entry.target(parse_spec("performer")) == "softmax"
    assert entry.target(parse_spec("performer:kernel=exp")) == "softmax"
    assert entry.target(parse_spec("performer:kernel=relu,conv=none")) == "other"
    assert entry.target(parse_spec("performer:kernel=relu,conv=3")) == "learned"


def test_a_claim_may_depend_on_causality_and_on_several_options_at_once() -> None:
    def make(shape: Shape, *, kernel: str = "exp", conv: int | None = None) -> None: ...

    both = "causal=true,kernel=relu"
    traits = Traits(given=(("causal=true", {"own_form": "a"}), (both, {"own_form": "b"}), ("conv", {"own_form": ""})))
    entry = Variant("performer", make, "", family="kernel", source="", formula="", cost="", traits=traits)

    def form(text: str, *, causal: bool) -> str:
        return entry.claims(parse_spec(text), causal=causal).own_form

    assert form("performer", causal=False) == form("performer:kernel=relu", causal=False) == ""
    assert form("performer", causal=True) == "a"
    assert form("performer:kernel=relu", causal=True) == "b"
    assert form("performer:kernel=relu,conv=3", causal=True) == ""


def test_no_is_false_and_carries_its_reason() -> None:
    assert not No("because")
    assert not No("")
    assert No("because") == "because"
