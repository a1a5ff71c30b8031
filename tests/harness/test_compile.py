"""The axis ``compile``: all of a call is compiled, or the row says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.compiled import compiling, why_not_compiled
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS, No, Traits, register
from attnbench.errors import AttnbenchError, Unsupported
from attnbench.harness.forecast import estimate
from attnbench.harness.inside.call import prepare
from attnbench.harness.inside.execute import _hold_to, run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.laws import LAWS, Case
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import REPLACED, Record
from attnbench.suite.cell import Cell, ModelSize
from tests.compilers import compiles, needs_compiler

# Loading the compiler imports a part of torch that uses another, deprecated one.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def measure(variant: str, **changes: Any) -> Record:
    heads, n = changes.pop("heads", 1), changes.pop("n", 16)
    causal = changes.pop("causal", changes.get("pass_") == "decode")
    shape = Shape(heads=heads, seq_len=n, head_dim=8, causal=causal)
    asked = Cell("s", "w", parse_spec(variant), shape, **{"compile": True, "measure": ("time",), **changes})
    record, _ = run_cell(VisitCell(asked, TimingRules(quick=True)))
    assert record.compile is asked.compile
    return record


@pytest.fixture
def _branching() -> Iterator[None]:
    """A variant that asks the data which way to go, which compiled code cannot."""

    @register("branching", family="reference", source="here", formula="v", cost="O(1)", traits=Traits(target="other"))
    class Branching(nn.Module):
        """Values, or their doubles."""

        def __init__(self, shape: Shape) -> None:
            super().__init__()

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            return 2 * v if q.sum() > 0 else v + 0

    yield
    del VARIANTS._entries["branching"]


@pytest.mark.usefixtures("_branching")
def test_a_graph_break_is_unsupported_and_its_line_is_named() -> None:
    record = measure("branching")
    assert (record.status, record.compiled, record.time_median_s) == (Status.UNSUPPORTED, False, None)
    assert record.reason.startswith("torch.compile: ")
    assert "branching" in record.reason
    assert "(test_compile.py:" in record.reason
    assert measure("branching", compile=False).status is Status.OK


def test_the_reason_is_what_the_compiler_said_and_not_that_it_said_something() -> None:
    failed = type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})
    error = failed("backend='inductor' raised:\nRuntimeError: it writes where it reads\n\nWhile executing copy_")
    assert why_not_compiled(error) == "torch.compile: RuntimeError: it writes where it reads"


def test_a_machine_without_a_compiler_gets_a_row_that_says_so() -> None:
    import torch._inductor.config as settings

    with settings.patch({"cpp.cxx": ("there-is-no-such-compiler",)}):
        record = measure("softmax")
    assert (record.status, record.compiled) == (Status.UNSUPPORTED, False)
    assert "No working C++ compiler" in record.reason


def test_what_runs_because_the_compiler_is_switched_off_is_not_called_compiled() -> None:
    import torch._dynamo.config as settings

    with settings.patch(disable=True):
        record = measure("softmax")
    assert (record.status, record.compiled) == (Status.UNSUPPORTED, False)
    assert ("made nothing" if torch.__version__ < "2.10" else "found no compiled frames") in record.reason


def test_what_the_compiler_finds_out_about_the_processor_it_keeps_for_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo.config as settings
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import cache_dir

    folders: list[str] = []
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: folders.append(cache_dir()))
    with settings.patch(disable=True):
        measure("softmax")
    assert folders == [cache_dir()]


def test_compiling_in_which_nothing_was_compiled_is_no_success() -> None:
    with pytest.raises(Unsupported, match="it is switched off, or there is nothing to compile"), compiling():
        pass


@needs_compiler
@pytest.mark.parametrize("pass_", [pytest.param("training", marks=pytest.mark.slow), "decode"])
def test_compiled_code_has_the_products_of_the_variant_and_its_compiling_apart(pass_: str) -> None:
    if pass_ == "decode" and torch.__version__ < "2.10":
        pytest.skip("torch 2.9 does not compile what asks a named tuple for a property; the row says so")
    record, plain = (measure("softmax", pass_=pass_, compile=compile_) for compile_ in (True, False))
    assert record.status is Status.OK, record.reason
    assert (record.compiled, plain.compiled) == (True, False)
    assert (record.matmul_flops, record.output_bytes) == (plain.matmul_flops, plain.output_bytes)
    assert record.cell_id != plain.cell_id
    assert record.first_call_s is not None
    assert record.time_median_s is not None
    assert record.first_call_s > 20 * record.time_median_s


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what the compiler itself does
@pytest.mark.parametrize(
    ("variant", "pass_"),
    [
        pytest.param("linear:chunk=8", "training", marks=pytest.mark.slow),
        pytest.param("performer:features=8,chunk=8", "training", marks=pytest.mark.slow),
        pytest.param("linear:chunk=8", "forward", marks=pytest.mark.slow),
        pytest.param("performer:features=8,kernel=hyperbolic,chunk=8", "forward", marks=pytest.mark.slow),
        pytest.param("rfa:features=8,chunk=8", "forward", marks=pytest.mark.slow),
        pytest.param("hedgehog:chunk=8", "training", marks=pytest.mark.slow),
    ],
)
def test_variants_of_several_tiles_compile_as_a_whole(variant: str, pass_: str) -> None:
    record = measure(variant, pass_=pass_)
    assert (record.status, record.compiled) == (Status.OK, True), record.reason


@compiles
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what the compiler itself does
def test_windows_of_several_heads_compile_as_a_whole() -> None:
    record = measure("local:window=3", heads=4, n=128)
    assert (record.status, record.compiled) == (Status.OK, True), record.reason


@needs_compiler
def test_the_error_is_that_of_the_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: compiled.append(model) or real(model, **how))
    record = measure("softmax", measure=("error",), error_draws=1)
    assert len(compiled) == 1
    assert record.rel_error is not None
    assert record.rel_error < 1e-6


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what the compiler itself does
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("softmax", {}),
        *(
            pytest.param(variant, changes, marks=pytest.mark.slow)
            for variant, changes in (
                ("softmax", {"causal": True}),
                ("softmax", {"pass_": "training"}),
                ("softmax", {"level": "layer"}),
                ("softmax", {"level": "model", "model": ModelSize(layers=1, ffn=8)}),
                ("chunked:query_chunk=8,key_chunk=8", {}),
                ("chunked:query_chunk=8,key_chunk=8", {"causal": True}),
                ("chunked:query_chunk=8,key_chunk=8", {"pass_": "training"}),
                ("linformer:rank=4", {}),
                ("linformer:rank=4", {"pass_": "training"}),
                ("memory-compressed", {}),
                ("memory-compressed", {"pass_": "training"}),
                ("sdpa", {}),
                ("sdpa", {"causal": True}),
            )
        ),
    ],
)
def test_the_kernel_is_the_one_in_the_code_that_the_compiler_wrote(variant: str, changes: dict[str, Any]) -> None:
    from torch._inductor.utils import run_and_get_code

    record, code = run_and_get_code(lambda: measure(variant, **changes))
    assert record.status is Status.OK, record.reason
    fused = any("._scaled_dot_product_" in one for one in code)
    assert record.kernel == ("flash_cpu" if fused else None)
    replaced = fused and variant != "sdpa"
    assert (REPLACED in record.warnings) is replaced
    counted = not replaced or (not changes.get("causal") and changes.get("pass_") != "training")
    plain = measure(variant, **{**changes, "compile": False})
    products = (plain.matmul_flops, plain.exponentials)
    assert (record.matmul_flops, record.exponentials) == (products if counted else (None, None))


@compiles
def test_what_the_compiler_leaves_alone_is_not_said_to_be_replaced() -> None:
    import torch._inductor.config as settings

    with settings.patch(pattern_matcher=False):
        record = measure("softmax")
    assert (record.status, record.kernel, record.warnings) == (Status.OK, None, "")


@pytest.fixture
def _another_when_compiled() -> Iterator[None]:
    """A variant of which the compiler makes something else; random ones differ from call to call in any case."""

    @register("another", family="reference", source="here", formula="v", cost="O(1)", traits=Traits(target="other"))
    class Another(nn.Module):
        """Values, and when compiled one more."""

        def __init__(self, shape: Shape, *, random: bool = False) -> None:
            super().__init__()
            self.random = random

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            return v + (torch.rand_like(v) if self.random else float(torch.compiler.is_compiling()))

    yield
    del VARIANTS._entries["another"]


@needs_compiler
@pytest.mark.usefixtures("_another_when_compiled")
def test_compiled_code_that_gives_other_numbers_is_an_error_and_not_a_time() -> None:
    record = measure("another")
    assert (record.status, record.compiled, record.time_median_s) == (Status.ERROR, False, None)
    assert record.reason.startswith("torch.compile made something else of it: a result is off by ")
    assert measure("another:random=true").status is Status.OK
    assert measure("another", compile=False).status is Status.OK


@compiles
@pytest.mark.parametrize(("got", "wanted", "off"), [(1.0, 0.0, True), (0.0, 0.0, False), (0.0, 1.0, True)])
def test_compiled_code_is_held_to_a_source_that_gives_0(got: float, wanted: float, off: bool) -> None:
    with pytest.raises(AttnbenchError, match="made something else of it") if off else nullcontext():
        _hold_to(torch.full((4,), got), lambda: torch.full((4,), wanted))


def test_what_always_compiles_itself_says_so_where_nobody_asked() -> None:
    record = measure("flex", compile=False)
    assert record.status is Status.OK, record.reason
    assert record.compiled
    assert record.first_call_s is not None
    assert record.time_median_s is not None
    assert record.first_call_s > 20 * record.time_median_s


def test_what_always_compiles_itself_is_not_compiled_once_more() -> None:
    asked = Cell("s", "w", Spec("flex"), Shape(heads=1, seq_len=16, head_dim=8), compile=True)
    assert prepare(asked).uncompiled is None
    assert prepare(replace(asked, variant=Spec("softmax"))).uncompiled is not None


@pytest.fixture(params=["at import", "at its first call"])
def own_graphs(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Lengths for which a variant that calls torch.compile itself was called as compiled code."""
    lengths: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            lengths.append(max(x.shape[2] for x in inputs if isinstance(x, Tensor)))
            return graph.forward(*inputs)

        return run

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

    ready = [torch.compile(exact, backend=backend)] if request.param == "at import" else []
    claims = {"target": "other", "causal": No("no"), "key_padding": No("no")}

    def own(name: str, traits: Traits) -> None:
        @register(name, family="reference", source="here", formula="softmax(qk)v", cost="O(n²·d)", traits=traits)
        class CompilesItself(nn.Module):
            """Exact attention, compiled by itself."""

            def __init__(self, shape: Shape) -> None:
                super().__init__()

            def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
                return exact(q, k, v)

            def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
                if not ready:
                    ready.append(torch.compile(exact, backend=backend))
                out: Tensor = ready[0](q, k, v)
                return out

    own("compiles-itself", Traits(**claims))
    own("says-so", Traits(**claims, compiled=True))
    torch.compiler.reset()
    yield lengths
    torch.compiler.reset()
    for name in ("compiles-itself", "says-so"):
        del VARIANTS._entries[name]


def test_code_that_a_variant_compiles_itself_is_timed_as_it_is_compiled(own_graphs: list[int]) -> None:
    assert measure("compiles-itself", compile=False).status is Status.OK
    assert len(own_graphs) > 2
    assert measure("says-so", compile=False).compiled  # although its code has been compiled already


def test_no_law_makes_torch_give_up_the_code_of_a_variant(own_graphs: list[int]) -> None:
    case = Case(VARIANTS.get("compiles-itself"), Spec("compiles-itself"))
    for one in ("unwritten memory", "memory"):
        assert all(finding.held for finding in LAWS[one].examine(case))
    own_graphs.clear()
    for length in (40, 41):
        build(Spec("compiles-itself"), Shape(seq_len=length))(*(torch.randn(1, 1, length, 8) for _ in range(3)))
    assert own_graphs == [40, 41]


def test_a_prediction_compiles_nothing() -> None:
    asked = Cell("s", "w", Spec("softmax"), Shape(heads=1, seq_len=16, head_dim=8))
    (_, compiled), (_, plain) = estimate([replace(asked, compile=True), asked], 1)
    assert compiled == plain


def test_a_cache_that_cannot_be_written_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/cache")
    for measured in ("time", "error"):
        record = measure("softmax", measure=(measured,))
        assert record.status is Status.UNSUPPORTED
        assert record.reason == (
            "torch.compile cannot write its cache: Not a directory: /dev/null/cache; "
            "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        )
