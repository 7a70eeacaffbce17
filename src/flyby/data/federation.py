"""Data as a person holds it in Python: ``Data`` can divide itself, and ``Sites`` are what it is divided into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from flyby.data.dataset import DataBundle
from flyby.data.settings import DataSettings
from flyby.data.site import Site, site_of
from flyby.data.splits import Split, SplitSettings, make_split
from flyby.settings import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Sites(Sequence[Site]):
    """A dataset divided among sites: a sequence of :class:`Site`, by number or by name, that shows who holds what."""

    def __init__(self, data: Data, split: Split) -> None:
        self.data, self.split = data, split
        self.names = list(split.shares)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int | str) -> Site: ...
    @overload
    def __getitem__(self, place: slice) -> list[Site]: ...
    def __getitem__(self, place: int | str | slice) -> Site | list[Site]:
        if isinstance(place, slice):
            return [site_of(self.data, self.split, name) for name in self.names[place]]
        return site_of(self.data, self.split, place if isinstance(place, str) else self.names[place])

    def table(self) -> str:
        """Who holds how many images of which class, as text."""
        return self.split.table()

    def plot(self, path: Path | str | None = None) -> Figure:
        """The same as a figure, saved where a path is given."""
        return self.split.plot(path)

    def __repr__(self) -> str:
        return repr(self.split)

    def _repr_html_(self) -> str:
        return self.split._repr_html_()


@dataclass(frozen=True, repr=False)
class Data(DataBundle):
    """Training images, test images, and how to divide the first among sites. ``source`` says where another process
    finds them."""

    source: DataSettings | None = None

    @classmethod
    def of(cls, bundle: DataBundle, source: DataSettings | None = None) -> Self:
        return cls(**{one.name: getattr(bundle, one.name) for one in fields(DataBundle)}, source=source)

    def split(self, clients: int = 5, alpha: float = 0.1, seed: int = 0, **settings: Any) -> Sites:
        """Divide the training images among ``clients`` sites; ``name`` is the rule (``dirichlet`` where none is given),
        and every other setting of a split has its own name here."""
        asked = build(SplitSettings, {"clients": clients, "alpha": alpha, **settings}, "split")
        return Sites(self, make_split(self.train, asked, seed))

    def __repr__(self) -> str:
        height, width = self.train.size
        test = f", {len(self.test):,} for testing" if self.test is not None else ""
        shape = f"{height}x{width}x{self.train.channels}"
        return f"<Data {self.name}: {len(self.train):,} images of {shape}{test}, {self.train.classes} classes>"
