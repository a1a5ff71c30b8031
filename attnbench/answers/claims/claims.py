"""Claims of papers and articles, each with the rows that would decide it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

Value = str | int | float | bool | None


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _RowTest(_StrictModel):
    where: Mapping[str, Value] = Field(default_factory=dict)
    """Column -> the value that rows must have."""


class RatioTest(_RowTest):
    """A column of one variant over the same column of another, wherever both were measured alike."""

    kind: Literal["ratio"]
    of: str
    top: str
    """A variant, with as many options as matter: ``performer:kernel=positive``."""
    bottom: str | None = None
    """The other variant; None if the column itself is tested and no ratio."""
    bottom_where: Mapping[str, Value] = Field(default_factory=dict)
    """Column -> the value that the bottom has there instead of that of ``where``: another pass, say."""
    above: float | None = None
    below: float | None = None
    about: float | None = None
    within: float = 0.1
    """The largest difference from ``about``, as a share of it or of the ratio."""

    @model_validator(mode="after")
    def _one_limit(self) -> RatioTest:
        if [self.above, self.below, self.about].count(None) != 2:
            raise ValueError("a ratio has one limit: above, below or about")
        if self.bottom is None and self.bottom_where:
            raise ValueError("bottom_where belongs to a ratio with a bottom")
        named = self.where.keys() | self.bottom_where.keys()
        if "threads" in named and not {"threads", "sweep"} <= self.where.keys():
            raise ValueError("rows of a number of threads are a run of a sweep: where names both")
        return self


class GrowthTest(_RowTest):
    """The power with which a column grows with n, between the longest length and one at most a quarter of it."""

    kind: Literal["growth"]
    of: str
    top: str
    over: Literal["seq_len", "heads"] = "seq_len"
    """The axis in place of n: with ``heads`` the width of a head may differ as well, so that the model's stays."""
    at_most: float | None = None
    at_least: float | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> GrowthTest:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("a growth has one limit: at_most or at_least")
        return self


class CrossoverTest(_RowTest):
    """The length from which on one variant takes less of a column than another."""

    kind: Literal["crossover"]
    of: str
    top: str
    bottom: str
    lowest: int
    highest: int


class ScoreTest(_RowTest):
    """The difference of two scores on a task, paired by seed."""

    kind: Literal["score"]
    top: str
    bottom: str
    bottom_where: Mapping[str, Value] = Field(default_factory=dict)
    """Column -> the value that the bottom has there instead of that of ``where``: another number of heads, say."""
    task: str | list[str]
    """The task's name, with as many options as matter; or several tasks, each a point."""
    above: float
    """The least difference that the claim allows: 0 for "better", -0.02 for "as good"."""

    @property
    def tasks(self) -> list[str]:
        return [self.task] if isinstance(self.task, str) else self.task


class Ability(_StrictModel):
    """An ability of a variant by its traits, which ``attnbench check`` tests. It needs no row."""

    kind: Literal["ability"]
    top: str
    trait: Literal["causal", "cross", "key_padding", "decode", "bias", "permutable", "longer"]


Test = Annotated[RatioTest | GrowthTest | CrossoverTest | ScoreTest | Ability, Field(discriminator="kind")]


class ClaimRun(NamedTuple):
    """One run that measures rows of claims."""

    suite: str
    select: str | None = None
    threads: int | None = None
    """None for as many as a run has of itself."""

    @property
    def command(self) -> str:
        select = f" -k {self.select}" if self.select else ""
        return f"attnbench run {self.suite}{select}" + (f" --threads {self.threads}" if self.threads else "")


class Claim(_StrictModel):
    """One published sentence, in our words."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    says: str
    source: str
    suite: str | None = None
    """The shipped suite that measures the rows; None if the claim needs no rows or is not tested."""
    test: Test | None = None
    missing: str = ""
    """The reason why there is no test."""
    table: str = ""
    """The published table that it is a number of; rows of any suite decide it."""
    note: str = ""
    """A caveat to the verdict."""

    @model_validator(mode="after")
    def _is_tested_or_says_why(self) -> Claim:
        by_rows = self.test is not None and not isinstance(self.test, Ability)
        if (self.test is None) == (not self.missing) or by_rows == (
            self.suite is None and not (by_rows and self.table)
        ):
            raise ValueError("a claim has a suite and a test, or says why it has none")
        return self

    @property
    def command(self) -> str:
        test = self.test
        if isinstance(test, Ability):
            return f"attnbench check {test.top}"
        if self.table and test:
            return f"attnbench claims {self.table} --run"
        return "; ".join(run.command for run in self.runs)

    @property
    def runs(self) -> tuple[ClaimRun, ...]:
        if self.suite is None:
            return ()
        if not isinstance(self.test, RatioTest) or "threads" not in self.test.where:
            return (ClaimRun(self.suite),)
        where = self.test.where
        counts = dict.fromkeys(int(at["threads"] or 0) for at in (where, {**where, **self.test.bottom_where}))
        return tuple(ClaimRun(self.suite, str(where["sweep"]), count) for count in counts)

    @property
    def sweeps(self) -> tuple[str, ...]:
        """The sweeps whose rows it reads; empty if rows of any sweep will do."""
        if self.test is None or isinstance(self.test, Ability):
            return ()
        top = self.test.where.get("sweep")
        bottom = getattr(self.test, "bottom_where", {}).get("sweep", top)
        return tuple(dict.fromkeys((str(top), str(bottom)))) if top and bottom else ()


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order in which they are shown."""
    text = files("attnbench.answers.claims").joinpath("claims.yaml").read_text(encoding="utf-8")
    return tuple(Claim.model_validate(one) for one in yaml.safe_load(text))
