"""Code and data that change: what a run notes of them, and what becomes of it once they are others."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attnbench.contract.plugins import discovery as plugins
from attnbench.errors import UsageError
from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import Watcher, execute
from attnbench.results import sources
from attnbench.results.sources import OURS, Changed, Watch, changed, look
from tests.instant import Listening

PLUGIN = """
from pathlib import Path
from torch import nn
from attnbench import register
import beside_it
from safetensors.torch import load_file
WEIGHT = float(Path(__file__).with_name("weight.txt").read_text())

@register("mine", family="reference", source="-", formula="-", cost="-")
class Mine(nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        import found_later
        self.kept = load_file(Path(__file__).with_name("matrix.safetensors"))
        return v
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A plug-in with a module and data beside it, all older than any process that reads them."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file({"a": torch.zeros(3)}, folder / "matrix.safetensors")
    os.utime(folder / "matrix.safetensors", (1, 1))
    for name, text in {"mine.py": PLUGIN, "beside_it.py": "", "found_later.py": "", "weight.txt": "1.0"}.items():
        (folder / name).write_text(text)
        os.utime(folder / name, (1, 1))
    return folder / "mine.py"


def test_what_changed_is_found_by_its_content_and_what_did_not_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.txt"
    file.write_text("1")
    before = look([str(file), OURS, str(tmp_path / "missing")], {})
    assert changed(before) == []
    os.utime(file, (1, 1))
    assert changed(before) == []  # the same content of another time
    file.write_text("2")
    assert changed(before) == [str(file)]
    file.unlink()
    assert changed(before) == [str(file)]
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"{self} is read again"))
    assert look([OURS], before)[OURS] == before[OURS]


def test_our_own_code_counts_but_not_what_only_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("figures/error.py", "catalogue/attention/kernel/linear.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path)
    before = look([OURS], {})
    (tmp_path / "figures/error.py").write_text("x = 22\n")
    assert changed(before) == []
    (tmp_path / "catalogue/attention/kernel/linear.py").write_text("x = 22\n")
    assert changed(before) == [OURS]


def test_data_is_noted_however_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    files = [tmp_path / name for name in ("text", "bytes", "rows.db", ".data/hidden", "written", "home/.cache/font")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (1, 1))
    monkeypatch.setattr(sources, "_opened", set())
    sources._hear("open", (str(files[0]), "r", os.O_RDONLY))
    sources._hear("open", (os.fsencode(files[1]), "r", os.O_RDONLY))
    sources._hear("sqlite3.connect", (str(files[2]),))
    sources._hear("sqlite3.connect", (":memory:",))
    sources._hear("open", (str(files[3]), "r", os.O_RDONLY))
    sources._hear("open", (str(files[4]), "w", os.O_WRONLY))
    sources._hear("open", (str(files[5]), "r", os.O_RDONLY))
    noted = {Path(name).expanduser() for name in sources.used(2.0)}
    assert noted & set(files) == set(files[:4])


def test_what_is_in_memory_is_judged_once_though_it_is_looked_at_after_each_answer(tmp_path: Path) -> None:
    """With a plug-in, looking at hundreds of mapped files took a tenth of a quick run."""
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"w" * 4096)
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        sources.note_mapped()
        assert any(Path(name).expanduser() == weights for name in sources.used(math.inf))
        judged = [one.cache_info().misses for one in (sources._may_decide, plugins.is_versioned)]
        sources.note_mapped()
        sources.used(math.inf)
    assert [one.cache_info().misses for one in (sources._may_decide, plugins.is_versioned)] == judged
    assert min(judged) > 0


def test_a_watch_refuses_what_changed_in_one_line_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "qkv.safetensors"
    file.write_text("1")
    watch = Watch({}, [str(file)], listens=False)
    assert watch.news().keys() == {OURS, str(file)}
    assert watch.news() == {}
    file.write_text("22")
    with pytest.raises(Changed) as caught:
        watch.news()
    assert str(caught.value) == (
        f"{file} changed since this run began to measure, and rows of two programs are not mixed; give the same "
        "command again, which measures anew"
    )
    with pytest.raises(Changed):
        Watch(look([str(file)], {}) | {OURS: ["other", ""]}, [], listens=False).news()


@pytest.fixture
def worker(plugin: Path) -> Iterator[Worker]:
    with Worker(Settings(plugins=(str(plugin),), rates=False)) as worker:
        yield worker


def test_a_process_tells_what_its_plug_in_is_made_of_and_ends_once_that_changed(plugin: Path, worker: Worker) -> None:
    names = {str(plugin.with_name(name)) for name in ("mine.py", "beside_it.py", "weight.txt")}
    installed = {one for one in worker.start()["sources"] if one.endswith("entry_points.txt")}  # where it is installed
    assert worker.start()["sources"].keys() - installed == {OURS, *names}
    worker.stop()
    plugin.with_name("weight.txt").write_text("2.0")
    with pytest.raises(Changed, match=r"weight\.txt changed since this run began to measure"):
        worker.start()


SUITE = """\
name: s
rounds: 2
sweeps: [{name: w, measure: [time], matrix: {variant: [mine], seq_len: [8, 16]}}]
"""


def test_what_forward_imports_is_noted_and_a_change_between_rounds_ends_the_run(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SUITE)
    later = plugin.with_name("found_later.py")
    plugins.load(str(plugin))

    class Edits(Listening):
        def visited(self, record: Any) -> None:
            later.write_text("x = 1\n")

    def run(watcher: Watcher) -> Path:
        options = Options("cpu", out=tmp_path / "out", plugins=(str(plugin),), min_time=0.01, unchecked=True, threads=1)
        return execute(make_plan(tmp_path / "s.yaml", options), watcher)[0].path

    with pytest.raises(Changed, match=r"found_later\.py changed since this run began"):
        run(Edits())
    (first,) = (tmp_path / "out" / "s").iterdir()
    watcher = Listening()
    second = run(watcher)
    assert second != first
    assert f"{first}: measured before {later} changed, so a new run begins" in watcher.warnings
    assert run(Listening()) == second
    tensors = plugin.with_name("matrix.safetensors")  # which no Python opens
    save_file({"a": torch.ones(3)}, tensors)
    assert run(watcher) != second
    assert f"{second}: measured before {tensors} changed, so a new run begins" in watcher.warnings


def alone(folder: Path, source: str) -> str:
    """What loading a plug-in in a process of its own, in another folder, says."""
    code = f"from attnbench.contract.plugins.discovery import load; load({source!r}); print('loaded')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
    return done.stdout or done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    "files",
    [
        {"mine.py": "import layers\n", "layers.py": ""},
        {"mine.py": "from layers.deep import X\n", "layers/deep.py": "X = 1\n"},
        {"pkg/__init__.py": "", "pkg/mine.py": "from .layers import X\n", "pkg/layers.py": "X = 1\n"},
        {"pkg/mine.py": "from .layers import X\n", "pkg/layers.py": "X = 1\n"},
        {
            "pkg/__init__.py": "",
            "pkg/a/__init__.py": "",
            "pkg/a/mine.py": "from ..b import X\nfrom pkg.b import X\n",
            "pkg/b.py": "X = 1\n",
        },
    ],
    ids=["beside", "below", "package", "no-init", "above"],
)
def test_a_file_imports_what_lies_beside_it(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (file,) = tmp_path.rglob("mine.py")
    assert alone(elsewhere, str(file)) == "loaded\n"


def test_the_neighbour_of_another_plug_in_is_not_taken_for_the_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_modules", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("import beside_both\n")
        (tmp_path / name / "beside_both.py").write_text("")
    plugins.load(str(tmp_path / "a/mine.py"))
    with pytest.raises(UsageError, match=r"b/mine\.py: .*a/beside_both\.py is loaded already, not beside_both\.py"):
        plugins.load(str(tmp_path / "b/mine.py"))
    monkeypatch.delitem(sys.modules, "beside_both")
