"""A run as one run of MLflow: its machine as parameters, its numbers over n as metrics, its files as artifacts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from attnbench.errors import UsageError
from attnbench.files import stored
from attnbench.measure.status import Status
from attnbench.results.key import NAMES, key_of
from attnbench.results.record import Record
from attnbench.results.store import ENVIRONMENT, SUITE, TABLE, RunFolder
from attnbench.text import one_line

_METRICS = {"time_s": "time_median_s", "peak_bytes": "peak_bytes", "rel_error": "rel_error", "score": "score"}
_SPELLED = {"=": "-", ",": " "}
"""Characters that MLflow refuses in names -> their replacements."""
_REMEDY = "set MLFLOW_TRACKING_URI to a server, or to file:///FOLDER with MLFLOW_ALLOW_FILE_STORE=true"
"""For mlflow-skinny 3.17, which refuses sqlite:/// and, without that variable, folders."""
_PARAMETERS = (
    *("attnbench", "method_version", "machine_id", "machine_class", "threads", "process", "started_at", "noise_floor"),
    *("suite_digest", "shard"),
)


def log_run(folder: RunFolder, report: Callable[[], str]) -> str:
    """Log the run to ``MLFLOW_TRACKING_URI`` as one MLflow run, with the page that ``report`` makes; return its id.

    The experiment is that of ``MLFLOW_EXPERIMENT_NAME``, else MLflow's default. One MLflow run for each cell would be
    too many for a server. Raises UsageError if mlflow is not installed, or refuses.
    """
    try:
        mlflow: Any = import_module("mlflow")
    except ImportError:
        raise UsageError("--mlflow needs mlflow; install it with: pip install 'attnbench[mlflow]'") from None
    records = folder.in_order()
    try:
        with mlflow.start_run(run_name=folder.path.resolve().name) as run:
            mlflow.log_params(parameters(folder.environment, records))
            for n, numbers in metrics(records).items():
                mlflow.log_metrics(numbers, step=n)
            rows = [record.to_json() for record in records]
            mlflow.log_table({name: [row[name] for row in rows] for name in rows[0]} if rows else {}, "results.json")
            mlflow.log_text(report(), "report.html")
            for name in (TABLE, ENVIRONMENT, SUITE):
                if (file := stored(folder.path / name)).is_file():
                    mlflow.log_artifact(str(file))
        return str(run.info.run_id)
    except mlflow.exceptions.MlflowException as error:
        raise UsageError(f"--mlflow: {one_line(str(error))}; {_REMEDY}") from None


def parameters(environment: dict[str, Any], records: Sequence[Record]) -> dict[str, str]:
    """Facts that decide the numbers of the whole run: suite, machine, versions."""
    suites = ", ".join(dict.fromkeys(record.suite for record in records))
    machine = environment.get("environment")
    facts = {"suite": suites, **(machine if isinstance(machine, dict) else {})}
    facts |= {name: environment[name] for name in _PARAMETERS if name in environment}
    return {name: str(value)[:500] for name, value in facts.items() if value is not None}


def metrics(records: Iterable[Record]) -> dict[int, dict[str, float]]:
    """Length n -> metric -> number, such as ``time_s/performer:features-64``.

    A name also has the axes in which the rows with this number differ, and the cell's id if two names are still equal.
    """
    ok = [record for record in records if record.status is Status.OK]
    found: dict[int, dict[str, float]] = {}
    for metric, column in _METRICS.items():
        rows = [record for record in ok if getattr(record, column) is not None]
        for record, name in zip(rows, _names(rows), strict=True):
            at, spelled = found.setdefault(record.seq_len, {}), f"{metric}/{_spelled(name)}"[:240]
            at[spelled if spelled not in at else f"{spelled}/{record.cell_id[:8]}"] = float(getattr(record, column))
    return found


def _names(rows: Sequence[Record]) -> list[str]:
    """Each row's label, with the values of the axes in which the rows differ."""
    keys = [{"sweep": row.sweep, **dict(zip(NAMES, key_of(row).values, strict=True))} for row in rows]
    ignored = ("variant", "options", "seq_len", "kv_len")
    axes = [name for name in (keys[0] if keys else ()) if name not in ignored and len({str(k[name]) for k in keys}) > 1]
    told = [[f"{axis.rstrip('_')}={key[axis]}" for axis in axes if key[axis] is not None] for key in keys]
    return ["/".join([row.label, *values]) for row, values in zip(rows, told, strict=True)]


def _spelled(name: str) -> str:
    for character, instead in _SPELLED.items():
        name = name.replace(character, instead)
    return re.sub(r"[^\w\-.:/ ]", "_", name, flags=re.ASCII)
