"""``attnbench score A B --task recall``: train variants on one task, and say which of them learn it."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any, Unpack

from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import command, completed
from attnbench.errors import NothingMeasured, UsageError
from attnbench.text import quantity


@command(options.ScoreOptions)
def score(
    variants: options.Variants = None,
    *,
    as_json: options.AsJson = False,
    **given: Unpack[options.ScoreOptions],
) -> None:
    """Train variants on a task, each inside the same small encoder, and compare their scores.

    identity, which mixes no tokens, is trained as well. A variant that scores no better has not learnt to look at other
    tokens. The same command resumes a run that was stopped. The exit code is 1 if nothing could be trained.
    """
    if not variants:
        raise UsageError("score needs a variant; for example: attnbench score performer linear softmax --task recall")
    from attnbench.cli.screen.run import measured
    from attnbench.cli.screen.score import print_scores
    from attnbench.contract.plugins.discovery import with_modules
    from attnbench.contract.spec import parse_specs
    from attnbench.contract.variant import VARIANTS
    from attnbench.harness.plan import Options, make_plan
    from attnbench.harness.score.score_question import ScoreQuestion
    from attnbench.harness.trial import load_all

    of_run: dict[str, Any] = {**completed(options.ScoreOptions, given)}
    asked = ScoreQuestion(**{one.name: of_run.pop(one.name) for one in fields(ScoreQuestion)})
    names, plugins = with_modules(variants, of_run.pop("plugins") or ())
    load_all(plugins)
    specs = [VARIANTS.get(spec.name).normalise(spec).label for name in names for spec in parse_specs(name)]
    suite = asked.suite("score", list(dict.fromkeys([*specs, "identity"])))
    plan = make_plan(suite, Options(**of_run, plugins=tuple(plugins)))
    console.only_repeats()
    ((folder, records),) = measured(plan, what="trainings")
    if as_json:
        console.data([record.to_json() for record in records])
    else:
        size, shape = plan.cells[0].model, plan.cells[0].shape
        if size is not None:
            what = f"{quantity(size.layers, 'layer')}, {shape.H} × {shape.D}, feed-forward {size.ffn}"
            console.line(f"encoder: {what}, batches of {shape.B}, on {plan.settings.device}")
        print_scores(records)
        console.laws_note(records)
        console.line(f"results: {folder.path / 'results.csv'}")
    if not any(record.status == "ok" for record in records):
        raise NothingMeasured(f"nothing could be trained; reasons: {folder.path / 'results.csv'}")
    if not as_json:
        console.line(f"figures: {shlex.join(['attnbench', 'plot', str(folder.path)])}")
