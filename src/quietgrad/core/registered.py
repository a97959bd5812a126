"""Registered values: frozen dataclasses that are known by the name of their kind, in files as in code.

Events, mechanisms and sampling schemes are three families of them. A family gives the key under which JSON has the
kind; a subclass names its kind, and is registered by that. What is read back is exactly what was written: an
unknown kind, a missing field and a field too many are refused.

>>> from dataclasses import dataclass
>>> class Shape(Registered, family="shape"):
...     pass
>>> @dataclass(frozen=True)
... class Circle(Shape, kind="circle"):
...     radius: float
>>> Shape.read(Circle(2.0).to_json())
Circle(radius=2.0)
>>> Shape.read({"shape": "circle", "radius": 2.0, "colour": "red"})
Traceback (most recent call last):
quietgrad.core.errors.SettingError: shape={'shape': 'circle', ...}: must be one of circle with its settings.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Self

from quietgrad.core.errors import SettingError


class Registered:
    """Base of the families; see the module."""

    kind: ClassVar[str]
    family: ClassVar[str]
    key: ClassVar[str]
    """Under which JSON has the kind."""
    kinds: ClassVar[dict[str, Any]]
    """The family's classes, by kind."""
    __match_args__: ClassVar[tuple[str, ...]] = ()  # of a dataclass: its fields

    def __init_subclass__(
        cls, *, kind: str | None = None, family: str | None = None, key: str | None = None
    ) -> None:
        super().__init_subclass__()
        if family is not None:
            cls.family, cls.key, cls.kinds = family, key or family, {}
        elif kind is not None:
            cls.kind = kind
            cls.kinds[kind] = cls
        elif ABC not in cls.__bases__:  # it would be written down as its parent, which is something else
            raise TypeError(f"{cls.__name__}: a {cls.family} names its kind.")

    def to_json(self) -> Any:
        """Return plain JSON values: the kind and the fields."""
        return {self.key: self.kind, **{name: _to_json(vars(self)[name]) for name in self.__match_args__}}

    @classmethod
    def read(cls, data: object) -> Self:
        """Rebuild a value of the family from :meth:`to_json`; a kind alone stands for one without settings."""
        fields = {cls.key: data} if isinstance(data, str) else dict(data) if isinstance(data, Mapping) else {}
        name = fields.pop(cls.key, None)
        kind = cls.kinds.get(name) if isinstance(name, str) else None
        if kind is None or set(fields) != set(kind.__match_args__):
            kinds = ", ".join(sorted(cls.kinds))
            raise SettingError(f"{{{cls.family}}}: must be one of {kinds} with its settings.", **{cls.family: data})
        value: Self = kind(**{name: cls._from_json(fields[name]) for name in kind.__match_args__})
        return value

    @classmethod
    def _from_json(cls, value: object) -> Any:
        """Read a field: an object is a value of the same family, a list a tuple."""
        if isinstance(value, dict):
            return cls.read(value)
        return tuple(cls._from_json(item) for item in value) if isinstance(value, list) else value


def _to_json(value: object) -> object:
    if isinstance(value, Registered):
        return value.to_json()
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value
