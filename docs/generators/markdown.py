"""Small pieces of Markdown, and docstrings as Markdown."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_ROLE = re.compile(r":\w+:`~?(?:[^`]*\.)?([^`.]+)`")
_CODE = re.compile(r"``([^`]+)``")
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_SECTION = re.compile(r"(Args|Returns|Raises):$")
_TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}
_ITEM = re.compile(r"(\*{0,2}[\w, ]+?): ")
_STRESSED = re.compile(r"(?<![\w*])\*([A-Za-z]{3,})\*(?![\w*])")
_SPECIAL = re.compile(r"(?<!\\)([*_<>|$~\[\]])")


def page(*parts: str) -> str:
    """Parts with an empty line between them; empty parts are left out."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a cell is one line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\|", re.sub(r"[ \t\n]+", " ", text.strip())) or " "


def text(plain: str) -> str:
    """Plain text in which only ``*word*`` is markup: ``‖x‖²/2 * w_ij`` as it stands."""
    parts = _STRESSED.split(plain)
    return "".join(f"*{part}*" if place % 2 else _SPECIAL.sub(r"\\\1", part) for place, part in enumerate(parts))


def code(plain: str) -> str:
    """Text between backticks."""
    return f"`{plain}`" if plain else ""


def formula(latex: str, plain: str) -> str:
    """A formula of LaTeX as MathML, which browsers draw themselves, in pieces between which a narrow line may break.

    Args:
        plain: the same as Unicode text, for those who hear the page.
    """
    lines = "".join(f"<div>{' '.join(map(_drawn, pieces(line)))}</div>" for line in latex.split(r", \quad "))
    return f'<div class="formula" role="math" aria-label="{escape(plain)}">{lines}</div>'


def _drawn(piece: str) -> str:
    from latex2mathml.converter import convert

    words = re.fullmatch(r"\\text\{(.*)\}", piece)
    if words:
        return escape(words[1])
    return convert(piece, display="block").replace('display="block"', 'display="inline" displaystyle="true"', 1)


_TOKEN = re.compile(r"\\text\{[^{}]*\}(?![_^])|\\left|\\right|\\[a-zA-Z]+|\\.|.")


_OPEN, _CLOSED = ("{", "(", "[", r"\left", r"\{"), ("}", ")", "]", r"\right", r"\}")
_CUTS = ("=", "+", r"\cup", r"\odot", r"\;")


def pieces(latex: str) -> list[str]:
    """LaTeX, cut outside of all brackets into words, relations and terms; together they are the whole."""
    found, depth = [""], 0
    for token in _TOKEN.findall(latex):
        depth += (token in _OPEN) - (token in _CLOSED)
        words, before = token.startswith(r"\text{"), found[-1].rstrip()[-1:]
        cut = depth == 0 and (words or token in _CUTS) and before not in ("", "_", "^")
        if cut or found[-1].startswith(r"\text{"):
            found.append("")
        found[-1] += token
    return [piece.strip() for piece in found if piece.strip()]


def source(plain: str) -> str:
    """The name of a paper, with a link for each number of arXiv."""
    return _ARXIV.sub(lambda m: f"[{m[0]}](https://arxiv.org/abs/{m[1]})", text(plain))


def words(docstring: str) -> str:
    """Code and references of a docstring as Markdown, and everything else as plain text."""
    plain = _ROLE.sub(r"``\1``", docstring)
    parts = _CODE.split(plain)  # text and code take turns
    return "".join(code(part) if place % 2 else text(part) for place, part in enumerate(parts))


def prose(docstring: str) -> str:
    """A docstring, as ``inspect.cleandoc`` gives it: paragraphs, lists, and its sections as lists."""
    return "\n\n".join(
        "\n".join(_block(block)) for block in re.split(r"\n\s*\n", docstring.strip("\n")) if block.strip()
    )


def _block(block: str) -> Iterator[str]:
    lines = block.splitlines()
    section = _SECTION.match(lines[0].strip())
    if not section:
        yield words(block)
        return
    yield f"**{_TITLES[section[1]]}**"
    yield ""
    below = inspect.cleandoc("\n".join(lines[1:]))
    if section[1] == "Returns":
        yield words(below)
        return
    items: list[str] = []
    for line in below.splitlines():
        if items and line.startswith(" "):
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    for item in items:
        name = _ITEM.match(item)
        yield f"- `{name[1]}`: {words(item[name.end() :])}" if name else f"- {words(item)}"


def first_line(docstring: str | None) -> tuple[str, str]:
    """The first line of a docstring, and the rest."""
    first, _, rest = inspect.cleandoc(docstring or "").partition("\n")
    return first, rest.strip("\n")


def described(path: str, name: str) -> dict[str, str]:
    """The fields of a class in a file, each with the docstring that stands below it.

    Args:
        path: of the file, below the root of the project.
        name: of the class.
    """
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    fields: dict[str, str] = {}
    last = ""
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[last := node.target.id] = ""
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            fields[last := node.targets[0].id] = ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            fields[last] = " ".join(inspect.cleandoc(str(node.value.value)).split())
            last = ""
        else:
            last = ""
    return fields
