"""What the builder of a backbone asks of a spec, so that builders stand below specs."""

from __future__ import annotations

from typing import Protocol


class Shape(Protocol):
    """The images a backbone takes, and the stem it takes them with."""

    @property
    def channels(self) -> int: ...
    @property
    def size(self) -> tuple[int, int]: ...
    @property
    def stem(self) -> str: ...
