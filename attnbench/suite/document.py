"""The part of YAML that suites are written in: plain data with line numbers, and back to text.

No tags, anchors, aliases, repeated keys or second documents, so that a file can neither run code nor grow when it is
read. Bare words are read by :func:`attnbench.contract.spec.parse_scalar`: ``1e-6`` is a number, ``no`` and ``010`` are
words.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import yaml

from attnbench.contract.spec import parse_scalar
from attnbench.suite.messages import Place

MAX_DEPTH = 50
MAX_NODES = 5_000

_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)


class NotASuite(Exception):
    """A mistake in the text, and its line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _Loader(yaml.SafeLoader):
    depth = 0
    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call] # its stub has no types
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise NotASuite(line, f"alias *{event.anchor} is not allowed; write the value out")
        if event.anchor is not None:
            raise NotASuite(line, f"anchor &{event.anchor} is not allowed; remove it")
        if event.tag is not None:
            raise NotASuite(line, f"tag {event.tag} is not allowed; a suite holds plain data, remove the tag")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise NotASuite(line, f"more than {MAX_NODES} keys and values; use ranges such as 1024..16384+1024")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotASuite(line, f"nested more than {MAX_DEPTH} levels deep; a suite needs about 6")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_document(text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """The plain data of a suite, and the line of each value. Raises NotASuite: not YAML, or YAML that a
    suite may not use."""
    lines: dict[Place, int] = {}
    root = _compose(text)
    if root is None:
        raise NotASuite(1, "the file is empty; write name: and sweeps:")
    if not isinstance(root, yaml.MappingNode):
        raise NotASuite(_line(root), "a suite is a mapping; start with name: and sweeps:")
    data = _plain(root, (), lines)
    assert isinstance(data, dict)
    return data, lines


@functools.lru_cache(maxsize=64)
def _compose(text: str) -> yaml.Node | None:
    loader = None
    try:
        loader = _Loader(text)
        node: yaml.Node | None = loader.get_single_node()
        return node
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise NotASuite(line, f"character U+{ord(text[error.position]):04X} is not allowed; remove it") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        if error.problem == "but found another document":
            raise NotASuite(line, "a second document starts here; remove the line of dashes") from None
        began = (
            f" ({error.context}, line {error.context_mark.line + 1})" if error.context and error.context_mark else ""
        )
        raise NotASuite(line, f"not YAML: {error.problem}{began}; check indentation, quotes and brackets") from None
    except (yaml.YAMLError, ValueError, OverflowError):
        # PyYAML itself lets ValueError and OverflowError out: "\UFFFFFFFF", and %YAML with a very long number.
        line = loader.line + 1 if loader else 1
        raise NotASuite(line, "not YAML: an impossible escape or directive; check \\U.. and lines with %") from None


def _plain(node: yaml.Node, place: Place, lines: dict[Place, int]) -> object:
    lines.setdefault(place, _line(node))
    if isinstance(node, yaml.MappingNode):
        data: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise NotASuite(_line(key_node), "a key must be one word; write key: value")
            key = _encodable(key_node)
            if key in data:
                first = lines[(*place, key)]
                raise NotASuite(_line(key_node), f"key {key!r} is given twice (first on line {first}); remove one")
            lines[(*place, key)] = _line(key_node)
            data[key] = _plain(value_node, (*place, key), lines)
        return data
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*place, index), lines) for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node)


def _scalar(node: yaml.ScalarNode) -> object:
    text = _encodable(node)
    if node.style is not None:
        return text
    if _NOT_FINITE.fullmatch(text):
        raise NotASuite(_line(node), f"{text} is not a finite number; write a finite one")
    return parse_scalar(text) if text else None


def _encodable(node: yaml.ScalarNode) -> str:
    text: str = node.value
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotASuite(_line(node), "half of a surrogate pair is not a character; remove the \\u escape") from None
    return text


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Quoted wherever the bare word would come back as something else.
    quoted = not text or parse_scalar(text) != text or not text.isprintable() or _NOT_FINITE.fullmatch(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _represent_text)


def write_document(data: dict[str, Any]) -> str:
    """YAML text from which :func:`read_document` gives ``data`` back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
