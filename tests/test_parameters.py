"""No function takes more than seven parameters: what its callers hand on together is a thing with a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_layers import FILES, ROOT, home_of

MOST = 7
MOST_OF_A_COMMAND = 12
"""Options of a command that its Python function has not; those of both are declared in attnbench/cli/options.py."""
EXCEPTIONS = {
    "catalogue.attention.selection.compressed.csa.CSA.__init__": "the options of a variant, as a user types them",
    "catalogue.attention.selection.minference.MInference.__init__": "the options of a variant, as a user types them",
    "catalogue.attention.selection.msa.MSA.__init__": "the options of a variant, as a user types them",
    "catalogue.attention.selection.nsa.NSA.__init__": "the options of a variant, as a user types them",
    "catalogue.attention.kernel.performer.Performer.__init__": "the options of a variant, as a user types them",
    "catalogue.attention.selection.sparge.Sparge.__init__": "the options of a variant, as a user types them",
}
"""What takes more all the same -> why."""


def functions(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{inside}.{child.name}" if named else inside
        if named and not isinstance(child, ast.ClassDef):
            yield name, child
        yield from functions(child, name)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many there are. Together q, k and v are one, as the contract of a variant has them."""
    own = function.args
    names = [one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
    if names[:1] == ["ctx"] or any("jit" in ast.unparse(one) for one in function.decorator_list):
        return 0  # torch.autograd hands over each tensor by itself, and Triton each pointer with its strides
    return len({"q" if name in ("k", "v") else name for name in names if name not in ("self", "cls")})


def too_many(source: str, home: str, most: int = MOST) -> dict[str, int]:
    found = {name: parameters(function) for name, function in functions(ast.parse(source), home)}
    return {name: count for name, count in found.items() if count > most}


def test_no_function_takes_more_than_seven_parameters_but_those_named_here() -> None:
    found: dict[str, int] = {}
    for path in FILES:
        home = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        most = MOST_OF_A_COMMAND if home_of(path) == "cli" else MOST
        found |= too_many(path.read_text(encoding="utf-8"), home, most)
    assert found.keys() == EXCEPTIONS.keys(), found


def test_the_rule_counts_what_a_caller_hands_over() -> None:
    seven = "a, b, c, /, d, e, *rest, f, g, **more"
    assert too_many(f"def f({seven}): ...", "m") == {}
    assert too_many(f"class C:\n def f(self, h, {seven}): ...", "m") == {"m.C.f": 8}
    assert too_many("def f():\n async def g(a, b, c, d, *, e, f, g, h): ...", "m") == {"m.f.g": 8}
    assert too_many("def f(q, k, v, a, b, c, d, e, *, f): ...", "m") == {}
    assert too_many("def f(q, k, v, a, b, c, d, e, *, f, g): ...", "m") == {"m.f": 8}
    eight = "a, b, c, d, e, f, g, h"
    assert too_many(f"def f(ctx, {eight}): ...", "m") == too_many(f"@triton.jit\ndef f({eight}): ...", "m") == {}
