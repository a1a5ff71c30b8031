"""Where q, k and v come from, in the order shown to users; imported when the table of inputs is first asked."""

from __future__ import annotations

from importlib import import_module

for _name in ("gaussian", "structured", "captured"):
    import_module(f"{__name__}.{_name}")
