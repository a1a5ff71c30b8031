"""The same SVG in less than half of its bytes: styles are classes, groups without a meaning go, places have 0.01 pt."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from io import BytesIO
from zlib import crc32

import numpy as np
from PIL import Image

_TAG, _STYLE, _ID = re.compile(r"<[^>]*>"), re.compile(r' style="([^"]*)"'), re.compile(r' id="[^"]*"')
_PATH, _BETWEEN = re.compile(r' d="[^"]*(?=")'), re.compile(r"\s*([MLQCZz]|$)\s*")
_NO_TURN = re.compile(r' transform="rotate\(-?0 [^"]*"')
_MARKS = re.compile(r'<g [^>]*><use [^>]* class="(\w+)"/>(?:<use [^>]* class="\1"/>)*</g>')
_IMAGE = re.compile(r"(?<=base64,)[^\"]*")


def compact(svg: str) -> str:
    """Shorten what matplotlib wrote. Classes are named by their styles, so that files in one page do not clash."""
    styles: dict[str, str] = {}
    kept: list[bool] = []

    def short(found: re.Match[str]) -> str:
        tag = found[0]
        if tag == "</g>":
            return tag * kept.pop()
        tag = _STYLE.sub(lambda style: f' class="{styles.setdefault(style[1], f"z{crc32(style[1].encode()):x}")}"', tag)
        if tag.startswith(("<g", "<image")):
            tag = _IMAGE.sub(_with_palette, _ID.sub("", tag))
            if tag.startswith("<image") or tag.endswith("/>"):
                return tag * tag.startswith("<image")
            kept.append(tag != "<g>")
            return tag * kept[-1]
        tag = _PATH.sub(lambda path: _BETWEEN.sub(r"\1", path[0]), tag)
        return tag if "scale" in tag or "matrix" in tag else re.sub(r"\d+\.\d{3,}", _rounded, _NO_TURN.sub("", tag))

    def together(found: re.Match[str]) -> str:
        named = f' class="{found[1]}"'
        return found[0].replace(named, "").replace("<g", f"<g{named}", 1)

    svg = _MARKS.sub(together, re.sub(r">\s+<", "><", _TAG.sub(short, svg)))
    return svg.replace("</style>", "".join(f".{name}{{{style}}}" for style, name in styles.items()) + "</style>", 1)


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _with_palette(found: re.Match[str]) -> str:
    """The same image with at most 256 colours named once."""
    image = np.asarray(Image.open(BytesIO(b64decode(found[0]))).convert("RGBA"))
    colours, places = np.unique(image.reshape(-1, 4), axis=0, return_inverse=True)
    if len(colours) > 256:
        return found[0].strip()
    small, file = Image.fromarray(places.reshape(image.shape[:2]).astype(np.uint8)), BytesIO()
    small.putpalette(colours.tobytes(), "RGBA")
    small.save(file, "png", optimize=True)
    return b64encode(file.getvalue()).decode()
