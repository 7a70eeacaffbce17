"""The noun ``Registry``: the things of one kind, by name; those of flyby and those that installed packages bring.

A package brings one by an entry point, ``[project.entry-points."flyby.fusions"]`` ``mine = "my_package:MyFusion"``.
Nothing of such a package is imported before somebody asks for the name, or for the list.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from flyby.errors import BadInput, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
log = logging.getLogger(__name__)


class Registry(Mapping[str, T]):
    """A mapping from names to things of one ``kind``: ``registry[name]`` is the thing, or a :class:`BadInput` that
    suggests the nearest names. ``built_in`` are those of flyby, in order; ``group`` is the name of the entry points
    under which packages offer more. A package can add a name but never replace one.

    >>> rules = Registry("rule", {"least": min, "most": max})
    >>> rules["most"](3, 4)
    4
    """

    def __init__(self, kind: str, built_in: Mapping[str, T], group: str = "") -> None:
        self.kind, self.group = kind, group
        self.built_in: dict[str, T] = dict(built_in)
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self.built_in:
            return self.built_in[name]
        if name not in self._loaded:
            if name not in self.offered:
                raise unknown(self.kind, name, [*self.built_in, *self.offered])
            self._loaded[name] = self._load(self.offered[name])
        return self._loaded[name]

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return default

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self.offered

    def __iter__(self) -> Iterator[str]:
        """The names in order, those of packages last; one whose package does not work is left out with a warning."""
        yield from list(self.built_in)
        for name in self.offered:
            try:
                self[name]
            except BadInput as error:
                log.warning("left out: %s", error)
            else:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, value: T) -> None:
        self.built_in[name] = value

    def __delitem__(self, name: str) -> None:
        del self.built_in[name]

    @cached_property
    def offered(self) -> dict[str, EntryPoint]:
        """What installed packages offer under names that are free, not yet imported."""
        from importlib.metadata import entry_points

        found: dict[str, EntryPoint] = {}
        for point in sorted(entry_points(group=self.group) if self.group else (), key=lambda p: (p.name, package(p))):
            if point.name in self.built_in or point.name in found:
                owner = package(found[point.name]) if point.name in found else "flyby"
                log.warning(
                    "the %s %r of %s is not used: %s has that name", self.kind, point.name, package(point), owner
                )
            else:
                found[point.name] = point
        return found

    def _load(self, point: EntryPoint) -> T:
        what = f"the {self.kind} {point.name!r} of the package {package(point)}"
        try:
            value: T = point.load()
        except Exception as error:  # whatever a foreign module does while it is imported
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise BadInput(f"{what} cannot be loaded ({reason}); mend or uninstall that package") from error
        named = getattr(value, "name", point.name)  # a class or recipe that says its name is also looked up by it
        if named != point.name:
            raise BadInput(f"{what} calls itself {named!r}; its entry point must have the same name")
        return value


def package(point: EntryPoint) -> str:
    """The installed package that an entry point comes from."""
    return point.dist.name if point.dist else point.value
