"""Which data a run uses, as one typed value."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict, Field

from flyby.data.classes import match, unknown_classes
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.sources import SOURCES, Reading, load
from flyby.files import digest
from flyby.settings import Grown

log = logging.getLogger(__name__)


class DataSettings(Grown):
    """Which data, and how it is read. ``holdout`` is the test share where the source has no test split of its own;
    ``mirror`` says whether a flipped image still means the same (None: as the source itself says, which for digits and
    house numbers is no)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("digits", description="digits, a folder, an .npz, hf:NAME: the same as --data")
    size: int | None = Field(
        None, description="pixels a side that images get, from the middle; default: as they are, or data.fit"
    )
    column: str | None = Field(
        None, description="a column of the table that sites are told apart by (the split by-column)"
    )
    holdout: float = Field(0.2, description="share kept for testing where the data has no test images of its own")
    mirror: bool | None = Field(
        None, description="whether a mirrored image still means the same; default: as the data itself says"
    )

    fit: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="pixels a side of images that differ in size or are large; default: 64, or the backbone's",
    )
    channels: Literal[1, 3] | None = Field(
        None, description="make photographs grey (1) or RGB (3); default: grey where all are"
    )
    nested: bool = Field(False, description="folders in class folders are parts of the class, whatever they look like")
    test: str | None = Field(None, description="other data to judge by, a folder of class folders: as --test-dir")

    later = frozenset({"mirror", "fit", "channels", "nested", "test"})

    def load(self, progress: bool = False) -> DataBundle:
        reading = Reading(self.fit, self.channels, self.nested)
        holdout = self.holdout if self.test is None else 0.0
        how = {"reading": reading, "column": self.column, "progress": progress}
        bundle = load(self.name, size=self.size, holdout=holdout, **how)  # type: ignore[arg-type]
        bundle = bundle if self.mirror is None else replace(bundle, mirror=self.mirror)
        return bundle if self.test is None else judged_by(bundle, self.test, self.nested)

    def absolute(self) -> DataSettings:
        """The same data, named so that a process in another folder finds it."""
        names = {"name": self.name, "test": self.test}
        here = {key: Path(name) for key, name in names.items() if name is not None and name not in SOURCES}
        return self.model_copy(update={key: str(path.resolve()) for key, path in here.items() if path.exists()})


def judged_by(bundle: DataBundle, name: str, nested: bool = False) -> DataBundle:
    """The same training images with the test images of another source (all of its images where it has no test split),
    read as they are and numbered as their classes."""
    train = bundle.train
    other = load(name, size=train.size, reading=Reading(channels=train.channels, nested=nested))
    data = other.test or other.train
    found = match(data.class_names, data.counts(), train.class_names)
    if found.left_out:
        cure = "leave their images out of --test-dir, or rename the folders"
        raise unknown_classes(found.left_out, train.class_names, name, "the training data", cure)
    labels = np.asarray(found.to, dtype=np.int64)[data.labels]
    test = Dataset(data.images, labels, train.class_names, digest([data.digest, list(train.class_names), found.to]))
    known = {image.tobytes() for image in train.images}
    if seen := sum(image.tobytes() in known for image in test.images):
        log.warning("note: %d of the %d test images of %s are training images too", seen, len(test), name)
    return replace(bundle, test=test, broken=(*bundle.broken, *other.broken))
