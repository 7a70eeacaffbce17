"""Which data a run uses, as one typed value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import ConfigDict

from flyby.data.dataset import DataBundle
from flyby.data.sources import load
from flyby.settings import Grown


class DataSettings(Grown):
    """Which data, and how it is read. ``holdout`` is the test share where the source has no test split of its own;
    ``mirror`` says whether a flipped image still means the same (None: as the source itself says, which for digits and
    house numbers is no)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "digits"
    size: int | None = None
    column: str | None = None
    holdout: float = 0.2
    mirror: bool | None = None

    later = frozenset({"mirror"})

    def load(self, progress: bool = False) -> DataBundle:
        bundle = load(self.name, size=self.size, holdout=self.holdout, column=self.column, progress=progress)
        return bundle if self.mirror is None else replace(bundle, mirror=self.mirror)

    def absolute(self) -> DataSettings:
        """The same data, named so that a process in another folder finds it."""
        path = Path(self.name)
        return self.model_copy(update={"name": str(path.resolve())}) if path.exists() else self
