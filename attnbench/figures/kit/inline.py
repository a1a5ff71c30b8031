"""A figure as SVG inside a page: colours are CSS variables, styles are classes, and marks name their rows.

Figures of one page share their classes and the shapes of their marks, which keeps the page small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Affine2D, Transform

from attnbench.figures.kit.palette import VARIABLES
from attnbench.figures.kit.style import MAIN, SMALL_SIZE, styled

_COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}
_WEIGHTS = {"normal": 400, "bold": 700}


class SharedStyles:
    """Styles and shapes that the figures of one page share."""

    def __init__(self) -> None:
        self._styles: dict[str, str] = {}
        self._shapes: dict[str, str] = {}

    @property
    def css(self) -> str:
        """The classes of all figures drawn so far."""
        return "\n".join(f".{name}{{{style}}}" for style, name in self._styles.items())

    @property
    def shapes(self) -> str:
        """The marks of all figures drawn so far, as the content of an SVG."""
        return "".join(f'<path id="{name}" d="{shape}"/>' for shape, name in self._shapes.items())

    def style(self, style: str) -> str:
        return self._styles.setdefault(style, f"z{len(self._styles)}")

    def shape(self, shape: str) -> str:
        return self._shapes.setdefault(shape, f"y{len(self._shapes)}")

    def svg(self, figure: Figure, title: str) -> str:
        """The figure as an SVG element; ``title`` is its name for a screen reader."""
        figure.dpi = 72
        figure.patch.set_visible(False)
        for ax in figure.axes:
            ax.patch.set_visible(False)
        width, height = figure.get_size_inches() * 72
        renderer = _Renderer(float(width), float(height), self)
        with styled():
            figure.draw(renderer)
        head = f'<svg viewBox="0 0 {_number(width)} {_number(height)}" role="group" aria-label="{escape(title)}">'
        return f"{head}{''.join(renderer.parts)}</svg>"


class _Renderer(RendererBase):
    def __init__(self, width: float, height: float, shared: SharedStyles) -> None:
        super().__init__()
        self.size, self.shared = (width, height), shared
        self.parts: list[str] = []
        self._marks: list[str] = []
        self._lines: list[tuple[float, float, float, str, str]] = []
        self._align = ""
        self._flip = Affine2D().scale(1, -1).translate(0, height)

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self.size

    def open_group(self, s: str, gid: str | None = None) -> None:
        self._lines = []
        if gid:
            self._marks.append(s)
            rows, main = gid.removesuffix(MAIN), ' class="m"' * gid.endswith(MAIN)
            self.parts.append(f'<g{main} data-r="{escape(rows)}">')

    def close_group(self, s: str) -> None:
        self._write_lines()
        if self._marks[-1:] == [s]:
            self._marks.pop()
            if not "".join(self.parts[-2:-1]).startswith("<g data-r"):
                self.parts.append("</g>")
            else:  # alone, it says its row itself
                last = self.parts.pop()
                name = last.split(" ", 1)[0]
                self.parts[-1] = f"{name}{self.parts[-1][2:-1]}{last.removeprefix(name)}"

    def draw_path(self, gc: GraphicsContextBase, path: Path, transform: Transform, rgbFace: Any = None) -> None:
        style = self._style(gc, rgbFace)
        box = gc.get_clip_rectangle()
        path, transform = path.transformed(transform), self._flip
        if style and box is not None:
            extents = path.get_extents()
            if extents.x0 < box.x0 - 1 or extents.x1 > box.x1 + 1 or extents.y0 < box.y0 - 1 or extents.y1 > box.y1 + 1:
                path = (
                    path.clip_to_bbox(box)
                    if rgbFace is not None
                    else path.cleaned(clip=(box.x0, box.y0, box.x1, box.y1), curves=True)
                )
        if style and (shape := _written(path, transform, simplify=rgbFace is None)):
            self.parts.append(f'<path class="{style}" d="{shape}"/>')

    def draw_markers(
        self,
        gc: GraphicsContextBase,
        marker_path: Path,
        marker_trans: Transform,
        path: Path,
        trans: Transform,
        rgbFace: Any = None,
    ) -> None:
        style = self._style(gc, rgbFace)
        places = self._flip.transform(trans.transform(path.vertices))
        radius = _radius(marker_path, marker_trans)
        places = places[np.isfinite(places).all(axis=1)]
        if len(marker_path) == 2:  # all ticks are one path
            start, end = marker_trans.transform(marker_path.vertices) * (1, -1)
            step = " ".join(map(_number, end - start))
            strokes = "".join(f"M{_number(x)} {_number(y)}l{step}" for x, y in places + start)
            self.parts.append(f'<path class="{style}" d="{strokes}"/>')
            return
        name = "" if radius else self.shared.shape(_written(marker_path, marker_trans + Affine2D().scale(1, -1)))
        for x, y in places:
            at = f'cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"' if radius else ""
            at = at or f'href="#{name}" x="{_number(x)}" y="{_number(y)}"'
            self.parts.append(f'<{"circle" if radius else "use"} class="{style}" {at}/>')

    def draw_text(
        self,
        gc: GraphicsContextBase,
        x: float,
        y: float,
        s: str,
        prop: FontProperties,
        angle: float,
        *more: Any,
        mtext: Text | None = None,
        **how: Any,
    ) -> None:
        width, _, _ = self.get_text_width_height_descent(s, prop, False)
        weight = prop.get_weight()
        rules = [
            f"font-size:{_number(prop.get_size())}px" * (prop.get_size() != SMALL_SIZE),
            f"font-weight:{_WEIGHTS.get(str(weight), weight)}" * (weight not in ("normal", 400)),
            "font-style:italic" * (prop.get_style() == "italic"),
            f"fill:{_colour(gc.get_rgb())}" * (_colour(gc.get_rgb()) != "var(--ink)"),
        ]
        style = self._class(rules)
        if not angle:
            self._align = mtext.get_horizontalalignment() if mtext is not None else ""
            self._lines.append((x, y, width, s, style))
        else:
            x, y = x + math.cos(math.radians(angle)) * width / 2, y - math.sin(math.radians(angle)) * width / 2
            turn = f' transform="rotate({_number(-angle)} {_number(x)} {_number(y)})"'
            self._write(x, y, "middle", s, style, turn)

    def _write_lines(self) -> None:
        """Write the lines of one text by the edge that they share: another font may be wider or narrower."""
        align = self._align
        if len(self._lines) > 1:  # matplotlib says it of a single line only
            edges = {"left": [one[0] for one in self._lines], "right": [one[0] + one[2] for one in self._lines]}
            align = next((name for name, at in edges.items() if max(at) - min(at) < 0.1), "")
        shift, anchor = {"left": (0.0, ""), "right": (1.0, "end")}.get(align, (0.5, "middle"))
        for x, y, width, text, style in self._lines:
            self._write(x + shift * width, y, anchor, text, style)
        self._lines = []

    def _write(self, x: float, y: float, anchor: str, text: str, style: str, turn: str = "") -> None:
        how = f' class="{style}"' * bool(style) + f' text-anchor="{anchor}"' * bool(anchor) + turn
        self.parts.append(f'<text x="{_number(x)}" y="{_number(y)}"{how}>{escape(text, quote=False)}</text>')

    def _class(self, rules: Iterable[str]) -> str:
        style = ";".join(filter(None, rules))
        return self.shared.style(style) if style else ""

    def _style(self, gc: GraphicsContextBase, face: Sequence[float] | None) -> str:
        """The class of a shape; empty if it is invisible."""
        rgb, width = gc.get_rgb(), gc.get_linewidth()
        inside = 0.0 if face is None else _opacity(gc, face)
        around = _opacity(gc, rgb) if width else 0.0
        if not inside and not around:
            return ""
        rules = [f"fill:{_colour(face)}" if face is not None and inside else "fill:none"]
        rules.append(f"fill-opacity:{_number(inside)}" * (0 < inside < 1))
        if around:
            _, dashes = gc.get_dashes()
            rules.append(f"stroke:{_colour(rgb)};stroke-width:{_number(width)}")
            rules.append(f"stroke-opacity:{_number(around)}" * (around < 1))
            pattern = " ".join(_number(one) for one in np.atleast_1d(dashes)) if dashes is not None else ""
            rules.append(f"stroke-dasharray:{pattern}" * bool(pattern))
            cap = {"projecting": "square"}.get(gc.get_capstyle(), gc.get_capstyle())
            rules.append(f"stroke-linecap:{cap}" * (cap != "butt"))
        return self._class(rules)


def _opacity(gc: GraphicsContextBase, rgba: Sequence[float]) -> float:
    forced = gc.get_alpha() if gc.get_forced_alpha() else None
    return float(forced if forced is not None else (*rgba, 1.0)[3])


def _colour(rgb: Sequence[float]) -> str:
    found = to_hex((rgb[0], rgb[1], rgb[2]))
    return VARIABLES.get(found, found)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:.1f}".removesuffix(".0")


def _written(path: Path, transform: Transform, *, simplify: bool = False) -> str:
    parts, last = [], ""
    for points, code in path.iter_segments(transform, simplify=simplify and path.should_simplify):
        command = _COMMANDS[code]
        if command == "Z":
            parts.append("Z")
        else:  # a line goes on after a move, and every command repeats itself
            parts.append("" if command == last or (command, last) == ("L", "M") else command)
            parts[-1] += " ".join(map(_number, points))
        last = "L" if (command, last) == ("L", "M") else command
    return " ".join(parts)


def _radius(path: Path, transform: Transform) -> float:
    """Radius of a mark that is a circle; 0 if it is not."""
    circle = Path.unit_circle()
    if len(path) != len(circle) or not np.array_equal(np.asarray(path.codes), np.asarray(circle.codes)):
        return 0.0
    start, middle = transform.transform(np.array([np.asarray(path.vertices)[0], (0.0, 0.0)]))
    return float(np.hypot(*(start - middle)))
