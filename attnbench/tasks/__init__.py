"""What variants are trained on, in the order shown to users; imported when the table of tasks is first asked."""

from __future__ import annotations

from importlib import import_module

for _name in (
    "recall",
    "mqar",
    "copy",
    "duplication",
    "listops_task",
    "digits",
    "text",
    "image",
    "retrieval",
    "pathfinder",
    "contours",
):
    import_module(f"{__name__}.{_name}")
