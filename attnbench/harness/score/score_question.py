"""A ``score`` question as a suite, for the command and for ``match --score``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.contract.spec import Scalar, comma_separated, parse_scalar, parse_specs
from attnbench.contract.task import TASKS
from attnbench.errors import UsageError
from attnbench.suite.messages import CommandLine
from attnbench.suite.schema import Suite

_OPTIONS = {
    "name": "--task",
    "task": "--task",
    "seq_len": "--n",
    "test_len": "--test-n",
    "steps": "--steps",
    "batch": "--batch",
    "seed": "--seeds",
    "learning_rate": "--rates",
    "layers": "--layers",
    "heads": "--heads",
    "head_dim": "--head-dim",
    "ffn": "--ffn",
}


@dataclass(frozen=True, slots=True)
class ScoreQuestion:
    """A question as it was written; ``attnbench score --help`` says what each field means."""

    task: str = "recall"
    n: int = 64
    test_n: str | None = None
    steps: int = 400
    batch: int = 32
    seeds: int = 3
    rates: str = "0.004,0.008"
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    ffn: int = 128
    causal: bool = False
    pretrain: bool = False

    def suite(self, command: str, variants: Sequence[str]) -> Suite:
        """A suite with one sweep of each variant with every seed and rate; ``command`` begins its name.

        Raises UsageError for an impossible task or number, with its option.
        """
        _check_task(self.task)
        data: dict[str, Any] = {
            "name": f"{command}-{self.task.partition(':')[0]}",
            "sweeps": [
                {
                    "name": "score",
                    "level": "model",
                    "pass": "training",
                    "measure": "score",
                    "model": {"layers": self.layers, "ffn": self.ffn, "positions": "sinusoid"},
                    "training": {"steps": self.steps, "pretrain": "masked" if self.pretrain else "none"},
                    "matrix": {
                        "variant": list(variants),
                        "task": self.task,
                        "seq_len": self.n,
                        **({} if self.test_n is None else {"test_len": _several(self.test_n)}),
                        "heads": self.heads,
                        "head_dim": self.head_dim,
                        "batch": self.batch,
                        "causal": self.causal,
                        "learning_rate": _several(self.rates),
                        "seed": list(range(self.seeds)),
                    },
                }
            ],
        }
        return Suite.of(data, CommandLine(options=_OPTIONS))


def _check_task(text: str) -> None:
    try:
        for spec in parse_specs(text):
            TASKS.get(spec.name).check(dict(spec.options))
    except UsageError as error:
        raise UsageError(f"--task: {error}") from None


def _several(text: str) -> list[Scalar]:
    return [parse_scalar(part) for part in comma_separated(text)]
