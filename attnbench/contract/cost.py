"""Read how a cost grows from its text: ``O(n·b·d + n²·d/b)`` grows with the square of n."""

from __future__ import annotations

import ast
import re

_TOKEN = re.compile(r"\s*(log|sqrt|[0-9]+(?:\.[0-9]+)?|[a-z](?![a-z]{3})|[²³√]|[-+·*/^()])")
"""A letter stands for itself, and ``nd`` for n·d; four letters in a row are a word, not a product."""
_AS_PYTHON = {"·": " * ", "*": " * ", "^": "**", "²": "**2", "³": "**3", "√": "sqrt"}


def power_of_n(cost: str) -> float | None:
    """The largest power of n in ``O(...)``, ignoring logarithms; None if the text is not of that form.

    It understands products and powers of n, other letters and numbers, and roots as ``√n`` or ``n^0.5``.
    """
    text = cost.strip()
    if not (text.startswith("O(") and text.endswith(")")):
        return None
    text = text[2:-1].lower()
    if _TOKEN.sub("", text).strip():
        return None
    python = ""
    for token in (_AS_PYTHON.get(token, token) for token in reversed(_TOKEN.findall(text))):
        if token in ("log", "sqrt"):
            operand = re.match(r"(?=\()|((log|sqrt)\()*[a-z0-9.]+\)*", python)  # the next operand
            end = operand.end() if operand else 0
            python = f"{token}({python[:end]}){python[end:]}" if end else f"{token}{python}"
        else:
            product = (token[-1].isalnum() or token == ")") and re.match(r"[a-z0-9(]", python)
            python = f"{token}{'*' if product else ''}{python}"
    try:
        return _power(ast.parse(python, mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def _power(node: ast.expr) -> float:
    """The power of n in an expression; raises ValueError if the expression is no cost."""
    match node:
        case ast.Constant():
            return 0.0
        case ast.Name(name) if name not in ("log", "sqrt"):
            return float(name == "n")
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return max(_power(left), _power(right))
        case ast.BinOp(left, ast.Mult(), right):
            return _power(left) + _power(right)
        case ast.BinOp(left, ast.Div(), right):
            return _power(left) - _power(right)
        case ast.BinOp(left, ast.Pow(), ast.Constant(float() | int() as power)):
            return _power(left) * power
        case ast.BinOp(left, ast.Pow(), ast.Name(name)) if name != "n" and not _power(left):
            return 0.0
        case ast.Call(ast.Name("sqrt"), [of]):
            return _power(of) / 2
        case ast.Call(ast.Name("log"), [of]):
            return 0.0 * _power(of)
    raise ValueError
