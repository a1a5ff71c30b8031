from __future__ import annotations

import re
from pkgutil import iter_modules

from attnbench.catalogue import engines


def test_the_table_of_rooms_has_them_all() -> None:
    listed = re.findall(r"^``(\w+)`` ", engines.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(one.name for one in iter_modules(engines.__path__))
