"""Which data a run uses, as one typed value."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from flyby.data.dataset import DataBundle
from flyby.data.sources import load


class DataSettings(BaseModel):
    """Which data, and how it is read. ``holdout`` is the test share where the source has no test split of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "digits"
    size: int | None = None
    column: str | None = None
    holdout: float = 0.2

    def load(self, progress: bool = False) -> DataBundle:
        return load(self.name, size=self.size, holdout=self.holdout, column=self.column, progress=progress)

    def absolute(self) -> DataSettings:
        """The same data, named so that a process in another folder finds it."""
        path = Path(self.name)
        return self.model_copy(update={"name": str(path.resolve())}) if path.exists() else self
