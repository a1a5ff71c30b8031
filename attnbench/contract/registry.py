"""A table of named things with the keyword arguments of their callables as options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from attnbench.contract import index
from attnbench.contract.spec import POSITIONAL, Scalar, Spec, format_scalar
from attnbench.errors import UsageError, did_you_mean, plain_words


class Needs(str):
    """Mark in an option's annotation: it does nothing without one of these settings, ``mode=full or mode=local``."""

    __slots__ = ()

    @property
    def settings(self) -> list[str]:
        return self.split(" or ")


@dataclass(frozen=True)
class Entry:
    """A registered name; its options are the keyword-only parameters of ``make``: type, bounds, default, meaning."""

    name: str
    make: Callable[..., Any]
    summary: str

    @cached_property
    def options_model(self) -> type[BaseModel]:
        """The options as a strict pydantic model: unknown names and wrong types are refused."""
        parameters = inspect.signature(self.make, eval_str=True).parameters.values()
        options: dict[str, Any] = {
            p.name: (p.annotation, ... if p.default is p.empty else p.default)
            for p in parameters
            if p.kind is p.KEYWORD_ONLY
        }
        return create_model(self.name, __config__=ConfigDict(extra="forbid", strict=True), **options)

    @property
    def options(self) -> dict[str, FieldInfo]:
        """Option name -> annotation, default, description and bounds."""
        return dict(self.options_model.model_fields)

    @property
    def needs(self) -> list[tuple[str, Needs]]:
        """Options that do nothing by themselves, each with a mark that has to hold."""
        options = self.options.items()
        return [(name, mark) for name, option in options for mark in option.metadata if isinstance(mark, Needs)]

    def check(self, options: Mapping[str, Scalar]) -> dict[str, Any]:
        """Validate ``options`` and return only those given, so that defaults stay in one place.

        Raises UsageError for an unknown option, or a value of the wrong type or out of range.
        """
        given: dict[str, Any] = dict(options)
        if POSITIONAL in given:
            if not self.options:
                raise UsageError(f"{self.name} has no options")
            first_option = next(iter(self.options))
            if first_option in given:
                raise UsageError(f"{self.name}: option {first_option!r} is given twice")
            if given[POSITIONAL] in self.options:
                option = given[POSITIONAL]
                raise UsageError(f"{self.name}: option {option!r} has no value; write {self.name}:{option}=VALUE")
            given[first_option] = given.pop(POSITIONAL)
        try:
            model = self.options_model(**given)
        except ValidationError as error:
            first = error.errors()[0]
            option = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                hint = did_you_mean(option, self.options)
                known = f"; it has {', '.join(self.options) or 'no options'}"
                raise UsageError(f"{self.name}: unknown option {option!r}{hint or known}") from None
            if option not in given:
                raise UsageError(f"{self.name}: option {option!r} is required") from None
            wanted = plain_words(first["msg"])
            raise UsageError(f"{self.name}: option {option}={format_scalar(given[option])} {wanted}") from None
        return {name: getattr(model, name) for name in given}

    def complete(self, spec: Spec) -> Spec:
        """The spec with every option that has a value, given or by default; options that are None are left out.

        So is ``form=auto``: it depends on the machine, and the column ``kernel`` has the result.
        """
        values = {name: field.default for name, field in self.options.items() if not field.is_required()}
        values |= self.check(dict(spec.options))
        return Spec.of(self.name, {k: v for k, v in values.items() if v is not None and (k, v) != ("form", "auto")})

    def normalise(self, spec: Spec) -> Spec:
        """The spec with positional values named and options that repeat the default dropped."""
        checked = self.check(dict(spec.options))
        return Spec.of(self.name, {k: v for k, v in checked.items() if v != self.options[k].default})


E_ = TypeVar("E_", bound=Entry)


class Registry(Generic[E_]):
    """Shipped names, then those of plug-ins as they were registered: the order shown to users.

    ``SHIPPED`` of the package ``home`` has the names that attnbench ships, each with the module that registers it. A
    look-up imports that module alone; only a loop over all of them imports all. A plug-in cannot take a shipped name.
    """

    def __init__(
        self, kind: str, *, home: str | None = None, elsewhere: Mapping[str, str] | None = None, own: str = ""
    ) -> None:
        """Start an empty table.

        Args:
            home: the package whose modules register the shipped entries.
            elsewhere: prefix of the names in a plug-in -> the command that installs it.
            own: advice for an unknown name that resembles no other.
        """
        self.kind = kind
        self.home = home
        self._elsewhere = elsewhere or {}
        self._own = f"; {own}" if own else ""
        self._entries: dict[str, E_] = {}
        self.compounds: dict[str, E_] = {}

    def _shipped(self) -> Mapping[str, str]:
        return {} if self.home is None else import_module(self.home).SHIPPED

    def _filled(self) -> dict[str, E_]:
        for name in self._shipped():
            self._import(name)
        names = [*self._shipped(), *self._entries]
        return {name: self._entries[name] for name in names if name in self._entries}

    def _import(self, name: str) -> None:
        if name not in self._entries and name in self._shipped():
            import_module(f"{self.home}.{self._shipped()[name]}")

    def add(self, entry: E_) -> None:
        """Add an entry; raise UsageError if the name is taken."""
        ours = self.home is not None and entry.make.__module__.startswith(f"{self.home}.")
        if entry.name in ({*self._entries, *self.compounds} if ours else self):
            raise UsageError(f"{self.kind} {entry.name!r} is registered already; choose another name")
        self._entries[entry.name] = entry

    def add_compound(self, entry: E_) -> None:
        """Add an entry that is made of others: whoever names it finds it, and no list of names has it."""
        self.compounds[entry.name] = entry

    def indexed(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> facts from the index, until entries themselves are imported; then, or without one, empty."""
        return {} if self._entries or self.home is None else index.shipped().get(self.kind, {})

    def get(self, name: str) -> E_:
        """The entry of that name; raise UsageError with the nearest name if there is none."""
        if name not in self._entries:
            self.refuse_unknown(name)
        self._import(name)
        return self._entries.get(name) or self.compounds[name]

    def refuse_unknown(self, name: str) -> None:
        """Raise UsageError with the nearest name if there is no such entry; nothing is imported for it."""
        if name not in self:
            entries = [*self._shipped(), *self._entries]
            there = [how for start, how in self._elsewhere.items() if name.startswith(start)]
            installed = any(known.startswith(tuple(self._elsewhere)) for known in entries)
            hint = f"; install it with: {there[0]}" if there and not installed else did_you_mean(name, entries)
            raise UsageError(f"unknown {self.kind} {name!r}{hint or self._own}")

    def names(self) -> list[str]:
        return list(self._filled())

    def __iter__(self) -> Iterator[E_]:
        return iter(list(self._filled().values()))

    def __contains__(self, name: str) -> bool:
        return name in self._shipped() or name in self._entries or name in self.compounds
