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
from matplotlib.image import imread

import attnbench.figures
from attnbench.contract.variant import FAMILIES
from attnbench.errors import CannotCreate, StoreError, UsageError
from attnbench.figures import FIGURES, draw_all, figure_kinds
from attnbench.figures.kit.page import NothingToDraw, new_page, shorten, text_width, wrap
from attnbench.figures.kit.palette import DARK, LIGHT, Palette, drawn_in
from attnbench.figures.kit.style import looks, save
from attnbench.figures.kit.ticks import halves, length, padded, plain, power_ticks, trimmed
from attnbench.figures.scaling import draw_scaling
from attnbench.figures.tradeoff import draw_tradeoff

Words = Callable[[Figure], str]


@pytest.fixture(scope="module")
def small(run: Any) -> pd.DataFrame:
    rows = [
        row for row in run.lra_rows((64, 128, 256)) if row["variant"] in ("softmax", "local", "performer", "linear")
    ]
    return run.table(rows)


def test_the_same_table_gives_the_same_bytes_in_each_format(tmp_path: Path, small: pd.DataFrame) -> None:
    formats = ["svg", "png", "pdf"]
    first = save(draw_tradeoff(small), tmp_path / "a", formats)
    second = save(draw_tradeoff(small.copy()), tmp_path / "b", formats)
    assert [path.name for path in first] == [f"a.{suffix}" for suffix in formats]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_an_svg_is_well_formed_and_its_text_is_text(tmp_path: Path, small: pd.DataFrame) -> None:
    frame = small.copy()
    odd = 'a$b_c$<&>"x"'
    frame.loc[frame["label"] == "local", ["label", "variant", "family"]] = [odd, odd, "<f>"]
    (path,) = save(draw_scaling(frame), tmp_path / "f.svg-is-part-of-the-name", ["svg"])
    assert path.name == "f.svg-is-part-of-the-name.svg"
    texts = {"".join(node.itertext()) for node in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")}
    assert odd in texts
    assert any(text.startswith("Fastest at n = ") for text in texts)


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
    for palette in (LIGHT, DARK):
        assert tuple(palette.families) == FAMILIES  # keys show them in this order
        assert len({*palette.families.values(), palette.other}) == len(FAMILIES) + 1


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    """The contrast of WCAG 2: 1 for equal colours, 21 for black on white."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("palette", "least"), [(LIGHT, 1.9), (DARK, 4.5)], ids=["light", "dark"])
def test_text_can_be_read_and_every_line_stands_out_from_what_is_behind_it(palette: Palette, least: float) -> None:
    for behind in (palette.page, palette.band, palette.worse):
        assert contrast(palette.ink, behind) > 10
        assert contrast(palette.faint, behind) > 4.5
        assert all(contrast(colour, behind) > 0.92 * least for colour in [*palette.families.values(), palette.other])
    assert all(contrast(colour, palette.page) > least for colour in palette.sequence)


def test_the_dark_colours_are_told_apart_as_well_as_the_light_ones_by_colour_blind_readers() -> None:
    """Distances in OKLab of what deuteranopes and protanopes see (Machado et al. 2009, doi:10.1109/TVCG.2009.113)."""
    kinds = (
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        np.eye(3),
    )
    to_cone = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    to_cone.append([0.0883024619, 0.2817188376, 0.6299787005])
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
    to_lab.append([0.0259040371, 0.7827717662, -0.8086757660])

    def nearest(palette: Palette) -> float:
        colours = np.array([to_rgb(colour) for colour in palette.families.values()])
        linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
        distances = []
        for seen in kinds:
            lab = np.cbrt((linear @ np.array(seen).T).clip(0) @ np.array(to_cone).T) @ np.array(to_lab).T
            apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
            distances.append(apart[np.triu_indices(len(lab), 1)].min())
        return float(min(distances))

    assert nearest(DARK) >= 0.9 * nearest(LIGHT)
    assert nearest(LIGHT) >= 0.07


def test_a_dark_figure_is_dark_all_over_and_the_next_one_light_again(tmp_path: Path, small: pd.DataFrame) -> None:
    light = save(draw_tradeoff(small), tmp_path / "light", ["svg"])[0].read_text()
    with drawn_in("dark"):
        figure = draw_tradeoff(small)
    dark = save(figure, tmp_path / "dark", ["svg"])[0].read_text()
    assert all(ax.get_facecolor()[:3] == to_rgb(DARK.page) for ax in figure.axes)
    for colour in (LIGHT.page, LIGHT.ink, LIGHT.faint, LIGHT.line, LIGHT.band, *LIGHT.families.values()):
        if colour != DARK.families["exact"]:
            assert colour not in dark, colour
    assert save(draw_tradeoff(small), tmp_path / "again", ["svg"])[0].read_text() == light
    with pytest.raises(UsageError, match="unknown style 'drak'; did you mean 'dark'"), drawn_in("drak"):
        pass


def test_a_variant_looks_the_same_in_every_figure_of_a_table(run: Any) -> None:
    pairs = [(f"v{k}", "kernel") for k in range(30)] + [("w", "exact")]
    table = looks(pairs)
    assert table == looks(pairs * 2)
    assert {table[label].colour for label, family in pairs if family == "kernel"} == {LIGHT.families["kernel"]}
    assert looks([("x", "of a plug-in")])["x"].colour not in LIGHT.families.values()


def test_lines_of_a_single_family_are_not_all_of_one_colour() -> None:
    exact = looks([("softmax", "exact"), ("sdpa", "exact"), ("chunked", "exact"), ("identity", "reference")])
    assert len({look.colour for look in exact.values()}) == 4
    assert exact["identity"].colour == LIGHT.families["reference"]
    mixed = looks([("softmax", "exact"), ("sdpa", "exact"), ("linear", "kernel")])
    assert mixed["sdpa"].colour == LIGHT.families["exact"]


def test_no_two_of_a_hundred_lines_of_one_family_look_alike() -> None:
    table = looks((f"v{k}", "kernel") for k in range(100))
    assert len({(look.marker, str(look.dashes), look.hollow) for look in table.values()}) == 100


def test_unknown_formats_and_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    figure = new_page("t", [], ["because"]).figure
    with pytest.raises(UsageError, match="svg, png, pdf, not 'jpg'"):
        save(figure, tmp_path / "f", ["jpg"])
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotCreate, match=r"cannot write .*: File exists; choose another place"):
        save(figure, tmp_path / "file" / "f")
    (tmp_path / "f.svg").mkdir()
    with pytest.raises(StoreError, match=r"cannot write .*f\.svg: Is a directory"):
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
    assert power_ticks(0.008, 0.7, 10) == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.5])  # two powers tell no scale
    assert power_ticks(7, 130, 2, most=4) == [8, 32, 128]
    mib = 2**20
    assert power_ticks(79 * mib, 97 * mib, 2) == [80 * mib, 84 * mib, 88 * mib, 92 * mib, 96 * mib]
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
        *("0", "0.25", "1024", "65536", "2.1M", "1e-5", "3T"),
    ]
    assert [length(n) for n in (1, 512, 1000, 1024, 1536, 3072, 16384, 65536, 2**20, 3 * 2**20, 10**6)] == [
        *("1", "512", "1000", "1k", "1536", "3k", "16k", "64k", "1M", "3M", "1000000"),
    ]
    assert [halves(v) for v in (1 / 16, 0.5, 1, 0.3)] == ["1/16", "1/2", "1", "0.3"]
    assert [trimmed(t) for t in ("1.00 GiB", "100 ms", "2.50 s")] == ["1 GiB", "100 ms", "2.5 s"]


def test_draw_all_draws_what_applies_for_each_suite(tmp_path: Path, small: pd.DataFrame, run: Any) -> None:
    paths = draw_all(small, tmp_path / "one", ["svg"])
    assert [path.name for path in paths] == ["tradeoff.svg", "scaling.svg"]
    both = pd.concat([small, run.table(run.linformer_rows((128, 256), (512, 1024)))], ignore_index=True)
    names = {path.name for path in draw_all(both, tmp_path / "two", ["svg"], figures=["scaling", "speedup"])}
    assert names == {"lra-scaling.svg", "linformer-scaling.svg", "linformer-speedup.svg"}


def test_draw_all_refuses_unknown_figures_options_and_values(tmp_path: Path, small: pd.DataFrame) -> None:
    for given, message in (
        ({"figures": ["tradeof"]}, "unknown figure 'tradeof'; did you mean 'tradeoff'"),
        ({"overlai": "x"}, "unknown option of a figure 'overlai'; did you mean 'overlay'"),
        ({"figures": ["scaling"], "only": {"level": "layer"}}, "no rows with level layer; there are: model, operator"),
        (
            {"only": {"dtype": "float32", "causal": True}},
            "causal true among those with dtype float32; there are: false",
        ),
        ({"only": {"dtyp": "float32"}}, "no column 'dtyp' in the results; did you mean 'dtype'?"),
        ({"style": "drak"}, "unknown style 'drak'; did you mean 'dark'"),
    ):
        with pytest.raises(UsageError) as caught:
            draw_all(small, tmp_path, ["svg"], **given)
        assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_figure_that_a_value_does_not_suit_is_left_out_with_the_reason(tmp_path: Path, small: pd.DataFrame) -> None:
    frame = small.replace({"inputs": {"listops": "gaussian:logit_std=1"}})
    left_out: dict[str, str] = {}
    figures = ["tradeoff", "error"]
    paths = draw_all(frame, tmp_path, ["svg"], figures=figures, n=64, x=None, on_left_out=left_out.__setitem__)
    assert [path.name for path in paths] == ["tradeoff.svg"]
    assert list(tmp_path.iterdir()) == paths
    assert left_out == {"error": "no error rows at n = 64; there are: 1024"}


def test_each_figure_that_does_not_apply_is_told_with_what_it_needs(tmp_path: Path, small: pd.DataFrame) -> None:
    left_out: dict[str, str] = {}
    paths = draw_all(small, tmp_path, ["svg"], on_left_out=left_out.__setitem__)
    assert [path.name for path in paths] == ["tradeoff.svg", "scaling.svg"]
    assert list(left_out) == [name for name in FIGURES if name not in ("tradeoff", "scaling")]
    assert left_out["catalogue"] == "needs times of 24 variants"


def test_no_figure_fails_on_any_of_the_tables_and_none_is_empty(run: Any, performer: pd.DataFrame) -> None:
    failed = run.table(
        [run.failed("crash", "signal 9", label, seq_len=n) for label in run.labels[:3] for n in (64, 128)]
    )
    for frame in (failed, failed.iloc[:1], performer.iloc[:1], performer.iloc[:0]):
        for kind in figure_kinds().values():
            with pytest.raises(NothingToDraw):
                kind.draw(frame)


def test_where_all_failed_nothing_is_written_and_the_reason_is_told(tmp_path: Path, run: Any) -> None:
    frame = run.table([run.failed("oom", "needs 9 GiB", label) for label in run.labels[:3]])
    with pytest.raises(NothingToDraw, match="nothing to draw: oom: softmax"):
        draw_all(frame, tmp_path / "plots", ["svg"])
    assert not (tmp_path / "plots").exists()


def test_where_nothing_fits_what_was_measured_each_figure_says_what_it_needs(tmp_path: Path, run: Any) -> None:
    frame = run.table([run.row(run.labels[0], seq_len=64), run.failed("interrupted", "stopped", run.labels[1])])
    needs = r"nothing to draw: tradeoff needs times and errors.*; share needs times of a layer"
    with pytest.raises(NothingToDraw, match=needs):
        draw_all(frame, tmp_path / "plots", ["svg"])


def test_title_and_resolution_apply_to_every_figure(tmp_path: Path, small: pd.DataFrame, words: Words) -> None:
    draw_all(small, tmp_path / "one", title="Mine", dpi=100)
    draw_all(small, tmp_path / "two", title="Mine", dpi=200)
    for name in ("tradeoff", "scaling"):
        svg = (tmp_path / "one" / f"{name}.svg").read_text()
        assert ">Mine<" in svg
        assert svg == (tmp_path / "two" / f"{name}.svg").read_text()
        once, twice = (imread(tmp_path / folder / f"{name}.png").shape for folder in ("one", "two"))
        assert (twice[0], twice[1]) == (2 * once[0], 2 * once[1])


def test_the_table_of_figures_names_them_in_order_and_cannot_be_changed() -> None:
    assert list(figure_kinds()) == [
        *("tradeoff", "scores", "lengths", "curves", "recall", "peers", "catalogue", "scaling", "error", "own_error"),
        *("served", "steps", "map", "speedup", "share", "swap"),
    ]
    with pytest.raises(TypeError):
        figure_kinds()["x"] = None  # type: ignore[index]  # that is the point
    with pytest.raises(AttributeError):
        _ = attnbench.figures.FIGURE


def test_drawing_imports_neither_torch_nor_opens_a_window(tmp_path: Path, small: pd.DataFrame) -> None:
    small.to_pickle(tmp_path / "frame.pkl")
    code = (
        "import sys, attnbench.figures\n"
        "assert 'matplotlib' not in sys.modules and 'pandas' not in sys.modules\n"
        "import pandas\n"
        f"frame = pandas.read_pickle({str(tmp_path / 'frame.pkl')!r})\n"
        f"attnbench.figures.draw_all(frame, {str(tmp_path)!r}, ['svg'])\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "from matplotlib._pylab_helpers import Gcf\n"
        "assert not Gcf.figs\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_module_here_uses_pyplot_or_torch() -> None:
    for path in Path(attnbench.figures.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any("pyplot" in name or name.split(".")[0] == "torch" for name in names), path.name


def test_ten_thousand_rows_are_drawn_in_seconds(run: Any) -> None:
    rows = run.lra_rows((64, 128, 256), seed=0)
    once = run.table(rows)
    frame = pd.concat([once.assign(seed=k) for k in range(115)], ignore_index=True)
    assert len(frame) > 10_000
    start = time.process_time()
    figure = draw_scaling(frame)
    assert len(figure.axes[0].lines) == 18
    assert time.process_time() - start < 30  # about one second; a bound against quadratic work, not a promise
