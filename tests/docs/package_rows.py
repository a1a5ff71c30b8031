"""What docs/packages.md says of what ``check`` answered: docs/data/packages.csv."""

from __future__ import annotations

from tests.benchmarks import packages
from tests.docs.making import rows, table


@rows
def packages_asked() -> str:
    """Each package, what it is, and what ``check`` said."""
    lines = [
        [f"{one.package} {one.version}", one.is_, one.attention or "–", one.cost or "–", one.right]
        for one in packages.read()
    ]
    right = sum(one.right == "yes" for one in packages.read())
    said = f"{right} of {len(lines)} are right.\n\n" if lines else ""
    return said + table(["package", "what it is", "`check`: attention", "`check`: cost", "right"], lines)
