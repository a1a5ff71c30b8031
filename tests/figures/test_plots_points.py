"""A file of points that somebody read off a figure is drawn beside a run, or refused with its line and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from attnbench.cli.app import main
from attnbench.errors import UsageError
from attnbench.figures import draw
from attnbench.figures.kit.palette import LIGHT
from attnbench.figures.published.point_file import read_points

RUN = Path(__file__).parents[2] / "results" / "reference" / "lra-cpu"
ABOUT = "# source: Nobody 2099, figure 9\n# read: by eye, within 10 %\n"
SLOPE = "A,1024,1\nA,2048,4\n"


@pytest.fixture
def points(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "figure9.csv"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def beside(figure: Figure, name: str) -> list[list[tuple[float, float]]]:
    """The points of each line in the panel whose axis has this name."""
    (ax,) = [ax for ax in figure.axes if ax.get_ylabel() == name]
    return [list(zip(*line.get_data(), strict=True)) for line in ax.lines]


def test_each_model_is_a_line_of_its_points_by_length_in_a_panel_for_each_column(
    points: Callable[[str], Path], linformer: pd.DataFrame, words: Callable[[Figure], str]
) -> None:
    file = points(f"{ABOUT}model,n,time_ms,memory_mb\nA,2048,4,\nA,1024,1,\nB,1024,2,10\nB,4096,3,90\n")
    figure = draw(linformer, overlay=file)["scaling"]
    assert beside(figure, "time (ms)") == [[(1024, 1), (2048, 4)], [(1024, 2), (4096, 3)]]
    assert beside(figure, "memory (MB)") == [[(1024, 10), (4096, 90)]]
    assert "Published measurements" in words(figure)
    assert "Nobody 2099, figure 9. Read: by eye, within 10 %." in " ".join(words(figure).split())


def test_one_column_has_all_the_room_and_the_title_is_the_files(
    points: Callable[[str], Path],
    linformer: pd.DataFrame,
    words: Callable[[Figure], str],
    faults: Callable[..., list[str]],
) -> None:
    file = points(f"# title: Theirs\n{ABOUT}model,n,time_relative\n{SLOPE}")
    figure, alone = draw(linformer, overlay=file)["scaling"], draw(linformer, figures=["scaling"])["scaling"]
    (ax,) = [ax for ax in figure.axes if ax.get_ylabel() == "time (relative)"]
    assert ax.get_xlabel() == "length n (log2 scale)"
    assert "Theirs" in words(figure)
    assert set(faults(figure)) <= set(faults(alone))


def test_families_give_the_colours_of_our_own_lines(points: Callable[[str], Path], linformer: pd.DataFrame) -> None:
    file = points(f"{ABOUT}model,family,n,time_ms\nA,kernel,1,1\nA,kernel,2,2\n")
    (ax,) = [ax for ax in draw(linformer, overlay=file)["scaling"].axes if ax.get_ylabel() == "time (ms)"]
    assert to_hex(str(ax.lines[0].get_color())) == LIGHT.family("kernel")


def test_what_a_spreadsheet_writes_is_read(points: Callable[[str], Path]) -> None:
    file = points(f'\ufeff{ABOUT}\nmodel,n,time_ms\r\n"A, large", 1024 ,1e1\r\n"A, large",2048,20\r\n\r\n')
    assert read_points(file).table.values.tolist() == [["A, large", 1024, 10.0], ["A, large", 2048, 20.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: no source; begin the file with a line # source: that says the paper and its figure or table"),
        (f"model,n,time_ms\n{SLOPE}", "1: no source; begin the file with a line # source:"),
        (f"# source: A\nmodel,n,time_ms\n{SLOPE}", "1: no read; begin the file with a line # read: that says how"),
        (f"# by hand\n{ABOUT}model,n,time_ms\n{SLOPE}", "1: write # source: TEXT, # read: TEXT or # title: TEXT above"),
        (f"{ABOUT}# source: B\nmodel,n,time_ms\n{SLOPE}", "3: a second line for source; write all of it in one"),
        (f"# source: {'x' * 301}\nmodel,n,time_ms\n{SLOPE}", "1: source has 301 letters; shorten it to 300"),
        (f"{ABOUT}", "3: no points; write model,n,time_ms and a row for each"),
        (f"{ABOUT}model,n,time_ms\n", "3: no points; write model,n,time_ms and a row for each"),
        (f"{ABOUT}n,time_ms\n1024,1\n", "3: no column model; the columns are model, n and time_ms,"),
        (f"{ABOUT}model,time_ms\nA,1\n", "3: no column n; the columns are"),
        (f"{ABOUT}model,n\nA,1024\n", "3: no column of values; add time_ms, time_relative, memory_mb or"),
        (f"{ABOUT}model,n,time\n{SLOPE}", "3: unknown column 'time'; did you mean 'time_ms'?"),
        (f"{ABOUT}model,n,seconds\n{SLOPE}", "3: unknown column 'seconds'; there are: model, family, n, time_ms"),
        (f"{ABOUT}model\tn\ttime_ms\n", r"3: the columns are parted by '\t'; part them by commas"),
        (f"{ABOUT}model;n;time_ms\n", "3: the columns are parted by ';'; part them by commas"),
        (f"{ABOUT}model,n,n,time_ms\n", "3: column 'n' is there twice; remove one"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}A,4096,1 s\n", "6: time_ms is '1 s', not a number above 0; write one such"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}A,4096,0\n", "6: time_ms is '0', not a number above 0"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}A,4096,nan\n", "6: time_ms is 'nan', not a number above 0"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}A,4096,\n", "6: no value in this row; write time_ms"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}A,4k,1\n", "6: n is '4k', not a length; write a whole number such as 1024"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE},4096,1\n", "6: model is empty; name the model of this point"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}# more\n", "6: 1 cell for 3 columns; write model,n,time_ms"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}A,2048,5\n", "6: 'A' has a row of n = 2048 already; remove one"),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}B,2048,5\n", "6: one time_ms of 'B'; a line needs two lengths, so add one"),
        (f'{ABOUT}model,n,time_ms\n{SLOPE}"B"x,2048,5\n', "6: not CSV ("),
        (f"{ABOUT}model,family,n,time_ms\nA,kernels,1,1\n", "4: family is 'kernels'; did you mean 'kernel'?"),
        (f"{ABOUT}model,family,n,time_ms\nA,kernel,1,1\nA,exact,2,1\n", "5: 'A' is of the family 'kernel' above"),
        (
            f"{ABOUT}model,n,time_ms\n" + "".join(f"m{one},1,1\nm{one},2,1\n" for one in range(17)),
            "36: more than 16 models; draw fewer in one file",
        ),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_line_and_what_to_write(
    text: str, message: str, points: Callable[[str], Path]
) -> None:
    with pytest.raises(UsageError) as refused:
        read_points(points(text))
    assert f"figure9.csv:{message}" in str(refused.value)


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    for content, said in ((b"\xff\xfe", "not text in UTF-8"), (b"#" * 1_000_001, "more than 1 MB")):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=f"points.csv: .*{said}"):
            read_points(file)
    with pytest.raises(UsageError, match="not a file; give a CSV file of points"):
        read_points(tmp_path)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (f"{ABOUT}model,n,time_ms\nA,1024,\n", [], "figure9.csv:4: no value in this row"),
        (
            f"{ABOUT}model,n,time_ms\n{SLOPE}",
            ["--figure", "scaling", "--figure", "error"],
            "error takes no file of points; only the figure scaling does",
        ),
        (f"{ABOUT}model,n,time_ms\n{SLOPE}", ["--width", "column"], "figure9.csv is too wide for one column"),
    ],
)
def test_the_command_says_it_in_one_line_and_writes_nothing(
    text: str,
    words: list[str],
    message: str,
    points: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert main(["plot", str(RUN), "--overlay", str(points(text)), "--out", str(out), *words]) == 2
    said = capsys.readouterr()
    assert message in " ".join((said.out + said.err).split())
    assert not out.exists()


def test_the_command_draws_the_figure_with_the_points_alone(points: Callable[[str], Path], tmp_path: Path) -> None:
    file, out = points(f"{ABOUT}model,n,time_ms\n{SLOPE}"), tmp_path / "out"
    assert main(["plot", str(RUN), "--overlay", str(file), "--out", str(out), "--format", "svg"]) == 0
    assert [path.name for path in sorted(out.iterdir())] == ["scaling.svg", "scaling.txt"]
    assert "Nobody 2099, figure 9" in (out / "scaling.svg").read_text(encoding="utf-8")


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_points(tmp_path / f"{'a' * 300}.csv")
