"""Small files in the layouts in which the data of the Long Range Arena is released."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from attnbench.tasks.listops import ListOps, evaluate, to_text


@pytest.fixture
def released_listops(tmp_path: Path) -> Path:
    """40, 8 and 12 different trees of at most 40 tokens, with the round brackets that the released files have."""
    folder = tmp_path / "listops-1000"
    folder.mkdir()
    rng, trees = random.Random(0), ListOps(min_length=5, max_length=40)
    distinct: dict[str, int] = {}
    while len(distinct) < 60:
        tree = trees.sample(rng)
        distinct[to_text(tree)] = evaluate(tree)
    lines = [f"( {text.replace(' ]', ' ) ]')} )\t{value}\n" for text, value in distinct.items()]
    for name, start, end in (("train", 0, 40), ("val", 40, 48), ("test", 48, 60)):
        (folder / f"basic_{name}.tsv").write_text("Source\tTarget\n" + "".join(lines[start:end]))
    return folder
