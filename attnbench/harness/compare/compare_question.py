"""A ``compare`` question as cells and settings, for the command and for :func:`attnbench.compare`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from typing import Any, Self

from attnbench.contract.inputs import INPUTS, look_at
from attnbench.contract.plugins.discovery import with_modules
from attnbench.contract.problem.mask import mask_of
from attnbench.contract.problem.padding import checked
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec, parse_specs
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError
from attnbench.harness.compare.compare import Contest
from attnbench.harness.outside.interpreter import Interpreter
from attnbench.harness.outside.isolation import Settings
from attnbench.harness.trial import load_all
from attnbench.harness.wire.process import Process
from attnbench.harness.wire.process import memory_limit as limit_for
from attnbench.measure.machine import default_threads, refuse_graph, resolve_device
from attnbench.measure.time import TimingRules
from attnbench.suite.axes import AXES, defaults, names_of, shortened
from attnbench.suite.cell import STEPS, Cell, Level, Measure, Pass
from attnbench.suite.named_shapes import spelled_out
from attnbench.suite.ranges import parse_range


@dataclass(frozen=True, slots=True)
class CompareQuestion:
    """A question as it was written; :func:`attnbench.compare` explains each field."""

    variants: Sequence[str]
    lengths: str | int | Sequence[int] = (1024, 2048, 4096)
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> value; axes that are left out have their defaults."""
    device: str = "auto"
    level: Level = "operator"
    pass_: Pass = "forward"
    error: bool = True
    threads: int | None = None
    timeout: float = 120.0
    first_call_timeout: float = 600.0
    min_time: float = 1.0
    memory_limit: int | None = None
    process: Process = "tuned"
    plugins: Sequence[str] = ()
    unchecked: bool = False
    rates: bool = False

    @classmethod
    def of(cls, variants: Sequence[str], given: Mapping[str, Any]) -> Self:
        """The question in the arguments of a function or a command; raise UsageError for an unknown shape.

        ``given`` includes the axes: one that is None or missing has the named ``shape``'s value, else its default.
        """
        own = {axis: given[axis] for axis in AXES if given.get(axis) is not None}
        axes = spelled_out({"shape": given.get("shape"), **own})
        return cls(variants, axes=axes, **{one.name: given[one.name] for one in fields(cls) if one.name in given})

    def prepare(self, *, alone: bool = False) -> Contest:
        """Load the plug-ins, look up every name, check every value.

        ``alone``: one variant stands for others, which may support settings that it does not. Raises UsageError for a
        variant, an option, the same variant twice, or too few that support the question.
        """
        lengths = tuple(sorted(set(parse_range(self.lengths))))
        if not lengths[0]:
            raise UsageError("--n 0: a length is at least 1; write --n 1024..4096")
        at = defaults() | dict(self.axes)
        checked(at["padding"])
        for n in lengths:
            mask_of(str(at["mask"])).check(at["q_start"] + n)
        if self.level == "pretrained":
            raise UsageError("--level pretrained: only a suite names a trained model; 'attnbench init' begins one")
        if at["architecture"] != "encoder" and self.level != "model":
            raise UsageError(f"--architecture {at['architecture']}: only a model has one; add --level model")
        new, kept, of_state = at["new_tokens"], at["kept_prefix"], at["state_dtype"]
        if new and self.pass_ not in ("generate", "decode"):
            raise UsageError(f"--new-tokens {new}: only a generation has some; add --pass generate or decode")
        if new > lengths[0] and self.pass_ == "decode":
            raise UsageError(f"--new-tokens {new}: more than n = {lengths[0]}; write fewer, or a larger --n")
        if kept and self.pass_ != "generate":
            raise UsageError(f"--kept-prefix {kept}: only a generation has a prompt; add --pass generate")
        if kept >= lengths[0]:
            raise UsageError(f"--kept-prefix {kept}: a prompt of n = {lengths[0]} has no rest; write fewer")
        if of_state != "auto" and self.pass_ not in STEPS:
            raise UsageError(f"--state-dtype {of_state}: only decoding keeps a state; add --pass decode")
        for axis in ("added_tokens", "query_stride", "positions"):
            if at[axis] != AXES[axis].default and self.level == "operator":
                option = f"--{axis.replace('_', '-')} {at[axis]}"
                raise UsageError(f"{option}: that is a matter of layers; add --level layer or model")
        names, plugins = with_modules(self.variants, self.plugins)
        load_all(plugins)
        if self.level == "operator" and (modules := plugins[len(self.plugins) :]):
            raise UsageError(f"{modules[0]}: it takes x, and not q, k and v; add --level layer")
        device = resolve_device(self.device)
        refuse_graph(at["launch"], device)
        parted = (name.partition("@") for name in names)
        written = [(spec, at + home) for text, at, home in parted for spec in parse_specs(text)]
        specs = [VARIANTS.get(spec.name).at(self.level).normalise(spec) for spec, _ in written]
        sides = list(zip(specs, (where for _, where in written), strict=True))
        # The same variant in the same environment again is a side of its own.
        again = [sides[:place].count(side) for place, side in enumerate(sides)]
        pythons = [Interpreter.of(at[1:], n) if at else None for (_, at), n in zip(sides, again, strict=True)]
        labels = [f"{spec}{python or ''}" for spec, python in zip(specs, pythons, strict=True)]
        _refuse_equal(labels, [f"{spec}{where}" for spec, where in written])
        inputs = parse_spec(str(at["inputs"]))
        at["inputs"] = INPUTS.get(inputs.name).normalise(inputs)
        look_at(at["inputs"])
        settings = Settings(
            device=device,
            threads=self.threads or default_threads(),
            process=self.process,
            # Cells of several environments are in memory together.
            memory_limit=(limit := limit_for(device, self.memory_limit))
            and (self.memory_limit or limit // len(set(pythons))),
            plugins=tuple(plugins),
            dtypes=(at["dtype"],),
            rates=self.rates or device.startswith("cuda"),
            first_call_timeout=self.first_call_timeout,
        )
        cells = tuple(self._cell({**at, "variant": spec, "seq_len": lengths[0]}, device) for spec in specs)
        if not alone:
            _refuse_unsupported(cells, {source.rpartition(":")[2] for source in plugins})
        rules = TimingRules.lasting(self.min_time, 10)
        return Contest(cells, lengths, settings, rules, self.timeout, self.unchecked, pythons=pythons)

    def _cell(self, at: Mapping[str, Any], device: str) -> Cell:
        measure: tuple[Measure, ...] = ("time", "memory")
        if self.error and self.level == "operator":
            other = VARIANTS.get(at["variant"].name).target(at["variant"]) == "other"
            own = other or at["dtype"] in ("bfloat16", "float16")
            measure += ("error", "own_error") if own else ("error",)
        at = shortened(at)
        return Cell(
            suite="compare",
            sweep="compare",
            shape=Shape(**{axis: at[axis] for axis in names_of("shape")}),
            level=self.level,
            pass_=self.pass_,
            device=device,
            measure=measure,
            error_draws=2,
            **{axis: at[axis] for axis in names_of("cell")},
        )


def _refuse_equal(labels: Sequence[str], written: Sequence[str]) -> None:
    """Raise UsageError for the same variant twice; ``labels`` leave out default options, ``written`` is the user's."""
    for (label, one), (other_label, other) in combinations(zip(labels, written, strict=True), 2):
        if label == other_label:
            also = "" if label in (one, other) else f", {label}"
            remedy = "name different ones: attnbench compare softmax linear --n 1024..4096"
            raise UsageError(f"{one} and {other} are the same variant{also}; {remedy}")


def _refuse_unsupported(cells: Sequence[Cell], modules: Collection[str]) -> None:
    reasons = {}
    for cell in cells:
        decodes = cell.pass_ in STEPS
        padded = cell.padding > 0 and not decodes
        if reason := cell.entry.unsupported_reason(cell.shape, key_mask=padded, decode=decodes, spec=cell.variant):
            reasons[cell.variant.name] = f"{cell.variant.label}: unsupported: {reason}"
    if len(reasons) > max(0, len(cells) - 2) or modules & reasons.keys():
        raise UsageError(f"{'; '.join(reasons.values())}; leave it out, or ask for what it takes")
