"""The laws that an attention variant is held to, for anybody's variant: what ``attnbench check`` runs.

from attnbench.laws import check_variant

report = check_variant("performer")            # or your own, once @register has run
assert report.held, report.faults
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from time import process_time

from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import Unsupported, UsageError, did_you_mean, shell_word
from attnbench.laws.laws import LAWS, Case, Finding, Law, cases

from attnbench.laws import form, influence, values, chance, gradients, rounding  # isort: skip  # noqa: F401
from attnbench.laws import unwritten, growth  # isort: skip  # noqa: F401
# ^ each fills the table of laws, in the order shown

__all__ = [
    "LAWS",
    "Finding",
    "Law",
    "Report",
    "check_variant",
    "examine",
    "first_fault",
    "gating_laws",
    "laws_of",
    "setting_of",
]

_LONGER = 257
"""Tokens at which a setting is held to its formula as well: a prime again, and more than most blocks hold."""
_ENOUGH = 2.0
"""Seconds of processor time for one setting; most settings take a few tenths of one."""


@dataclass(frozen=True)
class Report:
    """Everything that was found about one variant."""

    variant: str
    findings: tuple[Finding, ...]

    @property
    def held(self) -> bool:
        """True if every law that applies holds in every case."""
        return all(finding.held for finding in self.findings)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.held]

    @property
    def skipped(self) -> dict[str, str]:
        """Laws that could not be asked in any setting, or had nothing to hold the variant to, and why."""
        asked = {finding.law for finding in self.findings if not finding.skipped}
        return {finding.law: finding.skipped for finding in self.findings if finding.law not in asked}

    def of(self, law: str) -> list[Finding]:
        """Findings of one law; empty if it does not apply."""
        return [finding for finding in self.findings if finding.law == law]


def check_variant(variant: str | Variant, *, laws: Collection[str] | None = None, time: bool = True) -> Report:
    """Hold a variant to the laws that its traits claim, in each of its settings, causal and not.

    Args:
        variant: a registered name; with options, only that setting is checked: ``local:window=3``.
        laws: names from :data:`LAWS`; all if None.
        time: also measure with which power of n the time grows, which takes seconds and a quiet machine.

    Raises:
        UsageError: an unknown variant, option or law.
        Unsupported: the class refuses the small shapes of the laws, or its options, in each setting; the message is
            the reason.
    """
    if isinstance(variant, str):
        variant = variant_named(variant)
    _build_once(variant)
    findings: list[Finding] = []
    for name in laws_named(laws, time=time):
        findings += examine(name, variant)
        if findings and findings[-1].final:
            break
    return Report(variant.name, tuple(findings))


def variant_named(text: str) -> Variant:
    """A registered variant; with options in the text, they are its only setting. Raises UsageError for unknown ones."""
    spec = parse_spec(text)
    entry = VARIANTS.get(spec.name)
    entry.check(dict(spec.options))
    setting, core = spec.label.partition(":")[2], entry.core
    if not setting:
        return entry
    if core is not None:
        core = None if {*dict(spec.options)} & {*core.around} else replace(core, settings=(setting,))
    return replace(entry, settings=(setting,), core=core)


def _build_once(variant: Variant) -> None:
    """Raise Unsupported if every case of the variant refuses its shape or options; laws report other errors."""
    refusal = None
    for case in cases(variant):
        try:
            case.module()
            return
        except (Unsupported, UsageError) as error:
            refusal = str(error).removeprefix(f"{variant.name}: ")
        except (Exception, SystemExit):
            return
    if refusal is not None:
        raise Unsupported(f"{variant.name}: {refusal}") from None


def laws_named(names: Collection[str] | None, *, time: bool = True) -> list[str]:
    """The named laws, as one word each if you like, else all, or all that need no ``time``; raise UsageError for
    others."""
    if names is None:
        return [name for name in LAWS if time or not LAWS[name].needs_time]
    known = {shell_word(name): name for name in LAWS}
    for name in names:
        if shell_word(name) not in known:
            hint = did_you_mean(name, LAWS) or f"; laws are {', '.join(LAWS)}"
            raise UsageError(f"unknown law {name!r}{hint}")
    return [known[shell_word(name)] for name in names]


def laws_of(variant: Variant) -> list[str]:
    """Names of the laws that a variant is held to, by its claims and settings, in the order shown."""
    known = list(cases(variant))
    return [name for name, law in LAWS.items() if any(map(law.concerns, known))]


def gating_laws() -> list[str]:
    """Names of the laws to which a run holds a setting before it measures it: the formula first, and last the one that
    lets a setting be measured although NaN breaks it."""
    names = (name for name, law in LAWS.items() if law.gates and not law.needs_time)
    return sorted(names, key=lambda name: (name == influence.PADDED) - (name == "formula"))


def setting_of(spec: Spec, *, causal: bool, level: str = "") -> Case:
    """A variant with these options alone, or its core at level operator, not asked what only its first setting is."""
    return Case(VARIANTS.get(spec.name).at(level), spec, causal, first=False).fitted()


def first_fault(case: Case, tell: Callable[[int, int], None]) -> tuple[int, Finding | None]:
    """The number of measurements of the gating laws in a case, and the first fault; None if all hold or none applies.

    Laws are tried in order until one is broken or :data:`_ENOUGH` is spent; ``tell`` is called before each with its
    place and their number.
    """
    tried, names, start = 0, gating_laws(), process_time()
    for place, name in enumerate(names if case.allowed else ()):
        if process_time() - start > _ENOUGH:
            break
        tell(place, len(names))
        for finding in _at_lengths(name, case) if LAWS[name].concerns(case) else ():
            if not finding.held:
                return tried, finding
            tried += not finding.skipped
    return tried, None


def _at_lengths(law: str, case: Case) -> Iterator[Finding]:
    """The findings of a law, of some at two lengths: blocks and windows show only if there are several of them."""
    yield from LAWS[law].examine(case)
    if law == ("causality" if case.foreign else "formula"):
        yield from LAWS[law].examine(replace(case, length=_LONGER))


def examine(law: str, variant: Variant) -> Iterator[Finding]:
    """The findings of one law of :data:`LAWS` in each case of a variant."""
    one, applied, seen, claimed = LAWS[law], False, False, False
    for case in cases(variant):
        claimed = claimed or one.claimed(case.traits)
        if one.concerns(case):
            applied = True
            for finding in _at_lengths(law, case):
                seen = seen or not finding.skipped
                yield finding
                if finding.final:
                    return
    if applied and not seen and claimed and not case.foreign:
        yield Finding(law, "every setting", False, fault=f"claimed, and refused in every setting: {one.sentence}")
