"""Another attention in a trained model: ``attnbench.swap``."""

from __future__ import annotations

from typing import Unpack

from attnbench.api.arguments import check_importable
from attnbench.api.shown import Replaced
from attnbench.cli import options
from attnbench.cli.screen import console
from attnbench.cli.signature import completed, in_python
from attnbench.errors import UsageError


@in_python(options.SwapOptions)
def swap(model: str, *variants: str, progress: bool = True, **given: Unpack[options.SwapOptions]) -> Replaced:
    """Put variants into a trained model in the place of its attention, as ``attnbench swap`` does.

    Args:
        model: ``"listops"``, which is shipped; a folder, a .gguf file, ``"pypi:PACKAGE/FILE"``, or an id in the hub's
            cache on this disk.
        variants: one or more, with options in the text: ``"local:window=64"``.
        progress: show a progress bar.
        **given: see below.

    Raises:
        UsageError: an argument is wrong, there is no such model, or the text is too short.
        Unsupported: the model's attention cannot be replaced.
        BrokenContract: softmax attention in the place of the model's own changes it.
    """
    if not variants:
        raise UsageError("swap needs a variant; for example: attnbench.swap('listops', 'performer')")
    from attnbench.cli.screen.run import Screen
    from attnbench.harness.runner import execute
    from attnbench.harness.swap.request import SwapRequest, refuse_inexact, variants_of

    given = completed(options.SwapOptions, given)
    specs = variants_of(variants, given["plugins"])
    check_importable(specs, "its rows are kept, and nothing would tell them from those of another class")
    asked = SwapRequest.of(model, specs, given)
    with asked.worker() as worker, console.progress(1, wanted=progress) as bar:
        _, plan = asked.plan(worker)
        folder, records = execute(plan, Screen(plan, bar) if progress else None, worker)
    refuse_inexact(records)
    return Replaced(folder.path, records)
