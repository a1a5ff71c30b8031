"""Results of the functions of :mod:`attnbench.api`, which a terminal and a notebook can show."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

    from attnbench.answers.best import Best
    from attnbench.answers.history import History
    from attnbench.answers.match.result import Match
    from attnbench.harness.compare.compare import Comparison
    from attnbench.results.record import Record


class ReportPage(str):
    """An HTML page; a notebook shows it in a frame of its own, isolated from the notebook."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self, quote=True)}" sandbox="allow-scripts" title="report" '
            'style="width: 100%; height: 60em; border: 0"></iframe>'
        )


class Figures(dict[str, "Figure"]):
    """Figures by name; a notebook shows them one below the other."""

    def _repr_html_(self) -> str:
        from attnbench.figures.kit.style import notes_of

        images = []
        for figure in self.values():
            file = BytesIO()
            figure.savefig(file, format="png")
            images.append(f'<img src="data:image/png;base64,{b64encode(file.getvalue()).decode()}">')
            images += [f"<small>{escape(note)}</small><br>" for note in notes_of(figure)]
        return "\n".join(images)


class _ShownTable:
    _SHOWN: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        raise NotImplementedError

    def _words(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        table = self.to_frame()[list(self._SHOWN)].to_string(index=False, float_format="{:.3g}".format)
        return "\n".join([table, *self._words()])

    def _repr_html_(self) -> str:
        table = self.to_frame()[list(self._SHOWN)].to_html(index=False, float_format="{:.3g}".format)
        return "\n".join([table, *(f"<p>{escape(line)}</p>" for line in self._words())])


class Compared(_ShownTable):
    """The result of :func:`attnbench.compare`: a row for each pair of variants at each length, and crossovers."""

    _SHOWN = ("a", "b", "seq_len", "ratio", "ratio_ci_low", "ratio_ci_high", "verdict")

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        """Everything that was measured: sides, ratios, crossovers, environment."""

    def to_frame(self) -> pd.DataFrame:
        """The rows of ``attnbench compare --csv``: ``ratio`` is the time of ``a`` over that of ``b``."""
        import pandas as pd

        return pd.DataFrame(self.comparison.to_rows())

    @property
    def crossovers(self) -> dict[tuple[str, str], Any]:
        """Pair -> the length from which the other one is faster, with its 95 % interval, or why it is unknown."""
        return dict(self.comparison.crossovers)

    def _words(self) -> list[str]:
        lines = []
        for (a, b), found in self.comparison.crossovers.items():
            where = ""
            if found.n is not None:
                where = f"cross near n = {found.n:.0f}, between {found.low} and {found.high} (95 %); "
            lines.append(f"{a} and {b}: {where}{found.note}")
        return [*lines, *(f"warning: {text}" for text in self.comparison.warnings)]


class Chosen(_ShownTable):
    """The result of :func:`attnbench.best`: a row for each shape and length, with the fastest form."""

    _SHOWN = ("shape", "seq_len", "fastest", "verdict", "time_median_s", "next", "margin", "peak_bytes", "rel_error")

    def __init__(self, best: Best) -> None:
        self.best = best
        """Everything that was measured: all forms at each shape, the environment."""

    def to_frame(self) -> pd.DataFrame:
        """A row for each shape and length; ``margin`` is the time of ``next`` over that of the fastest one."""
        import pandas as pd

        return pd.DataFrame([one.to_json() for one in self.best.choices]).drop(columns=["tied", "left_out"])

    @property
    def fastest(self) -> dict[tuple[str, int], str | None]:
        """Name of a shape and length -> the fastest form, as :func:`attnbench.compare` takes it; None for none."""
        found = [(one.asked.name, one.n, one.fastest) for one in self.best.choices]
        return {(name, n): first.record.label if first else None for name, n, first in found}

    def _words(self) -> list[str]:
        return [f"warning: {text}" for text in self.best.warnings]


class Followed(_ShownTable):
    """The result of :func:`attnbench.history`: a row for each cell and run."""

    _SHOWN = ("cell", "run", "change", "ratio", "low", "high")

    def __init__(self, history: History) -> None:
        self.history = history
        """The runs, those that are left out with the reason, the cells and their changes."""

    def to_frame(self) -> pd.DataFrame:
        """A row for each cell and run; ``change`` is empty if the cell is as it was."""
        import pandas as pd

        return pd.DataFrame(self.history.to_rows())

    def figures(self) -> Figures:
        """The figure that ``attnbench history --plot`` draws."""
        from attnbench.figures.history import draw_history

        found = self.history
        return Figures({"history": draw_history(self.to_frame(), found.metric, unit=found.unit, about=found.how)})

    def _words(self) -> list[str]:
        return [f"left out: {run}: {why}" for run, why in self.history.left_out.items()]


class Matched:
    """The result of :func:`attnbench.match`: a sentence for each variant, a row for each setting, paired times."""

    def __init__(self, found: Match) -> None:
        self.match = found
        """Everything that was measured: the answer for each variant, the paired comparison, the environment."""

    def to_frame(self) -> pd.DataFrame:
        """The rows of ``attnbench match --csv``: every setting that was measured; ``chosen`` marks the answers."""
        import pandas as pd

        return pd.DataFrame(self.match.to_rows())

    @property
    def chosen(self) -> dict[str, str | None]:
        """Variant as it was given -> the setting that meets the budget, or None."""
        return {one.variant: one.chosen.label if one.chosen else None for one in self.match.found}

    def __repr__(self) -> str:
        return "\n".join([*self.match.sentences(), *(f"warning: {text}" for text in self.match.warnings)])

    def _repr_html_(self) -> str:
        return "\n".join(f"<p>{escape(line)}</p>" for line in repr(self).splitlines())


class Replaced(_ShownTable):
    """The result of :func:`attnbench.swap`: a row for each variant, in some layers, after some steps of training."""

    _SHOWN = ("label", "replaced", "tuned", "status", "loss", "loss_delta", "accuracy", "kl", "attention_error")

    def __init__(self, folder: Path, rows: list[Record]) -> None:
        self.folder, self.rows = folder, rows

    def to_frame(self) -> pd.DataFrame:
        """The rows of ``attnbench swap --csv``; losses are in nats."""
        import pandas as pd

        return pd.DataFrame([row.to_json() for row in self.rows])

    def figures(self) -> Figures:
        """Loss over the steps of training, and the damage of each layer, as ``attnbench swap --plot`` draws them.
        Raises NothingToDraw: there was neither training nor a layer replaced alone."""
        from attnbench.figures.swap import draw_swap
        from attnbench.results.read import read_results

        return Figures({"swap": draw_swap(read_results(self.folder))})
