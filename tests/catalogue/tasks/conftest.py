"""Small files in the layouts in which the data of the Long Range Arena is released."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnbench.catalogue.tasks.listops import ListOps, evaluate, to_text


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


@pytest.fixture
def released_text(tmp_path: Path) -> Path:
    """20 reviews to train on and 8 to test on, half of them good; beside them what else the archive has."""
    folder = tmp_path / "aclImdb"
    for split, count in (("train", 10), ("test", 4)):
        for side, stars in (("pos", 7), ("neg", 1)):
            (folder / split / side).mkdir(parents=True)
            for number in range(count):
                text = f"{side} {split} {number}:<br /> caf\u00e9 " + "so " * (3 * number)
                (folder / split / side / f"{number}_{stars + number % 4}.txt").write_text(text, encoding="utf-8")
        (folder / split / "urls_pos.txt").write_text("https://example.org")
    (folder / "train" / "unsup").mkdir()
    (folder / "train" / "unsup" / "0_0.txt").write_text("no label")
    return folder


@pytest.fixture
def released_image(tmp_path: Path) -> Path:
    """Five batches of 4 records and one of 6, of random pixels; record i of all has the label i % 10."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = np.random.default_rng(0).integers(0, 256, (26, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(26) % 10
    for number in range(5):
        records[4 * number : 4 * number + 4].tofile(folder / f"data_batch_{number + 1}.bin")
    records[20:].tofile(folder / "test_batch.bin")
    (folder / "batches.meta.txt").write_text("airplane")
    return folder


@pytest.fixture
def released_retrieval(tmp_path: Path) -> Path:
    """20, 4 and 6 pairs of texts with quotes in them."""
    folder = tmp_path / "tsv_data"
    folder.mkdir()
    for name, count in (("train", 20), ("eval", 4), ("test", 6)):
        lines = [
            f'{number % 2}.0\tP{number}\tQ{number}\t"{name} {number}\tnaïve "quotes{"!" * 9 * number}\n'
            for number in range(count)
        ]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def released_pathfinder(tmp_path: Path) -> Path:
    """Two folders of 20 random images each; the label is the lowest bit of the first pixel."""
    folder = tmp_path / "pathfinder32"
    rng = np.random.default_rng(0)
    (folder / "metadata").mkdir(parents=True)
    for k in range(2):
        (folder / "imgs" / str(k)).mkdir(parents=True)
        lines = []
        for number in reversed(range(20)):
            pixels = rng.integers(0, 256, (32, 32), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "imgs" / str(k) / f"sample_{number}.png")
            lines.append(f"imgs/{k} sample_{number}.png {number} {pixels[0, 0] % 2} 1.0 14 4 2 0.5 1 [0.75]\n")
        (folder / "metadata" / f"{k}.npy").write_text("".join(lines))
    return folder
