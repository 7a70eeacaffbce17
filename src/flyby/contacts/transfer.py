"""What goes through a window: how many bytes, in which pieces, and how a cut transfer goes on in a later one.

A file crosses in chunks of equal size, each known by its SHA-256. A chunk that a window's end cuts off is lost and sent
again; whole ones stay. Both directions share the channel (half-duplex), one after the other. Nothing counts as
received before every chunk is there and right: a partial transfer is not an exchange.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import BaseModel, ConfigDict, Field

from flyby.contacts.plan import Contact
from flyby.errors import BadInput

CHUNK = 65536


class LinkSettings(BaseModel):
    """What a window costs before and beside the bytes of a parcel."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acquisition: float = Field(10.0, ge=0, description="seconds of every window until the first byte crosses")
    overhead: float = Field(0.05, ge=0, description="what headers and repeats add, as a share of the bytes")
    chunk: int = Field(CHUNK, ge=1024, description="bytes of a chunk; one that is cut off is sent again")
    resume: bool = Field(True, description="go on with a cut transfer in the pair's later windows")

    def room(self, contact: Contact) -> int:
        """The bytes of parcels that a window can carry, both directions together."""
        return math.floor(max(0.0, contact.seconds - self.acquisition) * contact.rate / (1 + self.overhead))

    def until(self, contact: Contact, sent: int) -> float:
        """The second at which so many bytes of a window are through."""
        return min(contact.end, contact.start + self.acquisition + sent * (1 + self.overhead) / contact.rate)


@dataclass(frozen=True)
class Load:
    """Files that cross one after another through the same windows: their sizes, and the size of a chunk."""

    sizes: tuple[int, ...]
    chunk: int = CHUNK

    @cached_property
    def chunks(self) -> int:
        return sum(-(-size // self.chunk) for size in self.sizes)

    def bytes(self, done: int) -> int:
        """The bytes of the first ``done`` chunks; a file's last chunk may be short."""
        total = 0
        for size in self.sizes:
            here = min(done, -(-size // self.chunk))
            total, done = total + min(here * self.chunk, size), done - here
        return total

    def after(self, done: int, room: int) -> int:
        """How many chunks are across once a window with so much room has followed ``done`` of them."""
        goal, count = self.bytes(done) + room, 0
        for size in self.sizes:
            if size > goal:
                return max(done, count + goal // self.chunk)
            goal, count = goal - size, count - (-size // self.chunk)
        return count


@dataclass(frozen=True)
class Sheet:
    """What a sender says first: the size of the file and the hash of every chunk."""

    size: int
    chunk: int
    hashes: tuple[str, ...]

    @classmethod
    def of(cls, data: bytes, chunk: int = CHUNK) -> Sheet:
        return cls(len(data), chunk, tuple(hashlib.sha256(piece).hexdigest() for piece in pieces(data, chunk)))

    def length(self, number: int) -> int:
        return min(self.chunk, self.size - number * self.chunk)


def pieces(data: bytes, chunk: int = CHUNK) -> list[bytes]:
    return [data[start : start + chunk] for start in range(0, len(data), chunk)]


@dataclass
class Arriving:
    """A file on its way in. Chunks come in any order, in as many windows as it takes; a wrong one is refused."""

    sheet: Sheet
    held: dict[int, bytes] = field(default_factory=dict)

    def take(self, number: int, piece: bytes) -> None:
        if not 0 <= number < len(self.sheet.hashes):
            raise BadInput(f"chunk {number} is not one of the file's {len(self.sheet.hashes)}; ask for another")
        right = len(piece) == self.sheet.length(number)
        if not right or hashlib.sha256(piece).hexdigest() != self.sheet.hashes[number]:
            raise BadInput(f"chunk {number} is not what its hash says; ask for it again")
        self.held[number] = piece

    @property
    def missing(self) -> Sequence[int]:
        return [number for number in range(len(self.sheet.hashes)) if number not in self.held]

    def whole(self) -> bytes:
        """The file, once nothing is missing."""
        if self.missing:
            raise BadInput(
                f"{len(self.missing)} of {len(self.sheet.hashes)} chunks are missing; a partial transfer is not an"
                " exchange, so wait for the next window"
            )
        return b"".join(self.held[number] for number in range(len(self.sheet.hashes)))
