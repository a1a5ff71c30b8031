from __future__ import annotations

import ast
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import attnbench.plots
from attnbench.errors import CannotCreate, StoreError, UsageError
from attnbench.plots import FIGURES, draw_all
from attnbench.plots.page import draw_nothing, shorten, text_width, wrap
from attnbench.plots.scaling import draw_scaling
from attnbench.plots.style import FAMILY_COLOURS, MARKERS, looks, save
from attnbench.plots.ticks import halves, padded, plain, power_ticks, trimmed
from attnbench.plots.tradeoff import draw_tradeoff
from attnbench.variant import FAMILIES

Words = Callable[[Figure], str]


@pytest.fixture(scope="module")
def small(run: Any) -> pd.DataFrame:
    rows = [
        row for row in run.lra_rows((64, 128, 256)) if row["variant"] in ("softmax", "local", "performer", "linear")
    ]
    return run.table(rows)


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_same_table_gives_the_same_bytes(tmp_path: Path, small: pd.DataFrame, suffix: str) -> None:
    first = save(draw_tradeoff(small), tmp_path / "a", [suffix])
    second = save(draw_tradeoff(small.copy()), tmp_path / "b", [suffix])
    assert first[0].name == f"a.{suffix}"
    assert first[0].read_bytes() == second[0].read_bytes()


def test_an_svg_is_well_formed_and_its_text_is_text(tmp_path: Path, small: pd.DataFrame) -> None:
    frame = small.copy()
    odd = 'a$b_c$<&>"x"'
    frame.loc[frame["label"] == "local", ["label", "variant", "family"]] = [odd, odd, "<f>"]
    (path,) = save(draw_scaling(frame), tmp_path / "f.svg-is-part-of-the-name", ["svg"])
    assert path.name == "f.svg-is-part-of-the-name.svg"
    texts = {"".join(node.itertext()) for node in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert odd in texts
    assert "Time and peak memory against length" in texts


def test_a_sign_that_the_font_lacks_is_no_warning(tmp_path: Path, small: pd.DataFrame) -> None:
    frame = small.replace({"label": {"local": "注意"}, "variant": {"local": "注意"}})
    assert len(save(draw_tradeoff(frame), tmp_path / "f")) == 2


def test_the_readers_matplotlibrc_neither_decides_nor_is_changed(tmp_path: Path, small: pd.DataFrame) -> None:
    plain_bytes = save(draw_scaling(small), tmp_path / "a", ["svg"])[0].read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "pink", "svg.fonttype": "path"}):
        own = dict(matplotlib.rcParams)
        assert save(draw_scaling(small), tmp_path / "b", ["svg"])[0].read_bytes() == plain_bytes
        assert dict(matplotlib.rcParams) == own


def test_a_family_has_one_colour_in_every_figure_and_no_two_share_it() -> None:
    assert tuple(FAMILY_COLOURS) == FAMILIES  # keys show them in this order
    assert len(set(FAMILY_COLOURS.values())) == len(FAMILIES)


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_every_family_colour_stands_out_from_white() -> None:
    for colour in FAMILY_COLOURS.values():
        assert 1.05 / (luminance(colour) + 0.05) > 1.9


def test_a_variant_looks_the_same_in_every_figure_of_a_table(run: Any) -> None:
    pairs = [(f"v{k}", "kernel") for k in range(30)] + [("w", "exact")]
    table = looks(pairs)
    assert table == looks(pairs * 2)
    assert {table[label].colour for label, family in pairs if family == "kernel"} == {FAMILY_COLOURS["kernel"]}
    assert len({(look.marker, look.hollow) for look in list(table.values())[: 2 * len(MARKERS)]}) == 2 * len(MARKERS)
    assert looks([("x", "of a plug-in")])["x"].colour not in FAMILY_COLOURS.values()


def test_unknown_formats_and_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    figure = draw_nothing("t", [], ["because"])
    with pytest.raises(UsageError, match="svg, png, pdf, not 'jpg'"):
        save(figure, tmp_path / "f", ["jpg"])
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotCreate, match="cannot make this folder"):
        save(figure, tmp_path / "file" / "f")
    (tmp_path / "f.svg").mkdir()
    with pytest.raises(StoreError, match=r"f\.svg: cannot be written"):
        save(figure, tmp_path / "f")


def test_lines_of_notes_are_no_wider_than_the_page() -> None:
    text = "one two three " * 40 + "x" * 500 + " $ _ <&>"
    lines = wrap(text, 3.0, 8)
    assert len(lines) > 5
    assert max(text_width(line, 8) for line in lines) <= 3.0
    assert lines[-1].endswith("$ _ <&>")
    assert wrap("", 3.0, 8) == []
    assert shorten("short", 3.0, 8) == "short"
    assert shorten("long " * 50, 1.0, 8).endswith("…")


def test_ticks_are_few_round_and_inside() -> None:
    assert power_ticks(900, 70000, 2) == [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    assert power_ticks(1e-7, 10, 10, most=4) == [1e-6, 1e-3, 1]
    for low, high, base in (
        (30, 50, 2),
        (0.6, 0.9, 10),
        (1, 1.0001, 2),
        (0.02, 0.3, 10),
        (5e-9, 6e9, 10),
        (1e-300, 1e300, 2),
    ):
        ticks = power_ticks(low, high, base)
        assert 2 <= len(ticks) <= 12
        assert all(low * (1 - 1e-6) <= tick <= high * (1 + 1e-6) for tick in ticks)
    low, high = padded([3.0, np.nan, np.inf, 0.0, -1.0])
    assert low < 3.0 < high
    assert padded([]) == (1.0, 2.0)
    assert [plain(v) for v in (0, 0.25, 1024, 65536, 2.1e6, 1e-5, 3e12)] == [
        "0",
        "0.25",
        "1024",
        "65536",
        "2.1M",
        "1e-5",
        "3T",
    ]
    assert [halves(v) for v in (1 / 16, 0.5, 1, 0.3)] == ["1/16", "1/2", "1", "0.3"]
    assert [trimmed(t) for t in ("1.00 GiB", "100 ms", "2.50 s")] == ["1 GiB", "100 ms", "2.5 s"]


def test_draw_all_draws_what_applies_for_each_suite(tmp_path: Path, small: pd.DataFrame, run: Any) -> None:
    paths = draw_all(small, tmp_path / "one", ["svg"])
    assert [path.name for path in paths] == ["tradeoff.svg", "scaling.svg"]
    both = pd.concat([small, run.table(run.linformer_rows((128, 256), (512, 1024)))], ignore_index=True)
    names = {path.name for path in draw_all(both, tmp_path / "two", ["svg"], figures=["scaling", "speedup"])}
    assert names == {"lra-scaling.svg", "linformer-scaling.svg", "lra-speedup.svg", "linformer-speedup.svg"}


def test_draw_all_refuses_unknown_figures_options_and_values(tmp_path: Path, small: pd.DataFrame) -> None:
    for given, message in (
        ({"figures": ["tradeof"]}, "unknown figure 'tradeof'; did you mean 'tradeoff'"),
        ({"levle": "model"}, "unknown option of a figure 'levle'; did you mean 'level'"),
        ({"figures": ["scaling"], "level": "layer"}, "no rows with level 'layer'"),
    ):
        with pytest.raises(UsageError) as caught:
            draw_all(small, tmp_path, ["svg"], **given)
        assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_suits_one_figure_only_is_said_on_the_page_of_the_other(
    tmp_path: Path, small: pd.DataFrame
) -> None:
    frame = small.replace({"inputs": {"listops": "gaussian:logit_std=1"}})
    paths = draw_all(frame, tmp_path, ["svg"], figures=["tradeoff", "error"], n=64, x=None)
    assert {path.name for path in paths} == {"tradeoff.svg", "error.svg"}
    assert "no error rows at n = 64" in (tmp_path / "error.svg").read_text()


def test_no_figure_fails_on_any_of_the_tables(tmp_path: Path, run: Any, performer: pd.DataFrame, words: Words) -> None:
    failed = run.table(
        [run.failed("crash", "signal 9", label, seq_len=n) for label in run.labels[:3] for n in (64, 128)]
    )
    for frame in (failed, failed.iloc[:1], performer.iloc[:1], performer.iloc[:0]):
        for kind in FIGURES.values():
            assert words(kind.draw(frame))


def test_the_table_of_figures_names_them_in_order_and_cannot_be_changed() -> None:
    assert list(FIGURES) == ["tradeoff", "peers", "catalogue", "scaling", "error", "map", "speedup"]
    with pytest.raises(TypeError):
        FIGURES["x"] = None  # type: ignore[index]  # that is the point
    with pytest.raises(AttributeError):
        _ = attnbench.plots.FIGURE


def test_drawing_imports_neither_torch_nor_opens_a_window(tmp_path: Path, small: pd.DataFrame) -> None:
    small.to_pickle(tmp_path / "frame.pkl")
    code = (
        "import sys, attnbench.plots\n"
        "assert 'matplotlib' not in sys.modules and 'pandas' not in sys.modules\n"
        "import pandas\n"
        f"frame = pandas.read_pickle({str(tmp_path / 'frame.pkl')!r})\n"
        f"attnbench.plots.draw_all(frame, {str(tmp_path)!r}, ['svg'])\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "from matplotlib._pylab_helpers import Gcf\n"
        "assert not Gcf.figs\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_module_here_uses_pyplot_or_a_layer_above_two() -> None:
    allowed = {
        "plots",
        "errors",
        "units",
        "record",
        "variant",
        "status",
        "spec",
        "qkv",
        "shape",
        "machine",
        "table",
        "cell",
        "store",
    }
    for path in Path(attnbench.plots.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert "pyplot" not in name
                assert name.split(".")[0] != "torch"
                assert not name.startswith("attnbench.") or name.split(".")[1] in allowed, f"{path.name}: {name}"


def test_ten_thousand_rows_are_drawn_in_seconds(run: Any) -> None:
    rows = run.lra_rows((64, 128, 256), seed=0)
    frame = pd.concat([run.table(rows).assign(seed=k) for k in range(115)], ignore_index=True)
    assert len(frame) > 10_000
    start = time.process_time()
    figure = draw_scaling(frame)
    assert len(figure.axes[0].lines) == 18
    assert time.process_time() - start < 30  # about one second; a bound against quadratic work, not a promise
