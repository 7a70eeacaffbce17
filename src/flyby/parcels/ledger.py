"""The ledger: who sent what to whom, and how many bytes it took. One crossing for each ordered pair, ever."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from flyby import files
from flyby.errors import BadInput
from flyby.names import Name
from flyby.settings import sentence

SCHEMA = 1


class SecondCrossing(BadInput):
    """A model tried to cross the same way twice; one-shot learning allows it once."""


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Crossing:
    """One upload: ``bytes`` is the size of the file, ``digest`` names its content, ``round`` the contact round (0 if
    there is one)."""

    sender: Name
    receiver: Name
    bytes: Annotated[int, Field(ge=0)]
    digest: Annotated[str, Field(min_length=1, max_length=128)]
    round: Annotated[int, Field(ge=0)] = 0


class Ledger:
    """All crossings of a run, in the order they happened. A second crossing of the same ordered pair is an error, not a
    warning."""

    def __init__(self) -> None:
        self._crossings: dict[tuple[str, str], Crossing] = {}

    @property
    def crossings(self) -> list[Crossing]:
        return list(self._crossings.values())

    def record(self, sender: str, receiver: str, bytes: int, digest: str, round: int = 0) -> None:
        """Notes that ``sender`` sent ``bytes`` to ``receiver``; raises :class:`SecondCrossing` if it had done so
        before."""
        try:
            crossing = Crossing(sender, receiver, bytes, digest, round)
        except ValidationError as error:
            raise BadInput(f"not a valid crossing: {sentence(error)}") from None
        self._add(crossing)

    def _add(self, crossing: Crossing) -> None:
        pair = crossing.sender, crossing.receiver
        if crossing.sender == crossing.receiver:
            raise BadInput(f"{crossing.sender} cannot send a parcel to itself; name two different participants")
        if pair in self._crossings:
            earlier = self._crossings[pair].digest[:16]
            raise SecondCrossing(
                f"{crossing.sender} already sent {earlier} to {crossing.receiver}; each model crosses once, so use the"
                " parcel that is there"
            )
        self._crossings[pair] = crossing

    def has(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) in self._crossings

    def bytes_up(self, server: str = "server") -> int:
        """Bytes that reached the server."""
        return sum(c.bytes for c in self._crossings.values() if c.receiver == server)

    def bytes_down(self, server: str = "server") -> int:
        """Bytes that left the server."""
        return sum(c.bytes for c in self._crossings.values() if c.sender == server)

    def uploads(self, server: str = "server") -> int:
        """How many parcels reached the server."""
        return sum(c.receiver == server for c in self._crossings.values())

    @property
    def total_bytes(self) -> int:
        return sum(c.bytes for c in self._crossings.values())

    def save(self, path: Path | str) -> None:
        """Writes the ledger as JSON, whole or not at all."""
        files.write_json(path, {"schema_version": SCHEMA, "crossings": [dataclasses.asdict(c) for c in self.crossings]})

    @classmethod
    def load(cls, path: Path | str) -> Ledger:
        """Reads a saved ledger under the same rules that recorded it, so that an edited file cannot hold what
        ``record`` would refuse."""
        value: Any = files.read_json(path)
        if (
            not isinstance(value, dict)
            or set(value) != {"schema_version", "crossings"}
            or not isinstance(value["crossings"], list)
        ):
            raise BadInput(f"{path} is not a ledger; it should hold 'schema_version' and a list of 'crossings'")
        if value["schema_version"] != SCHEMA:
            raise BadInput(
                f"{path} has ledger schema {value['schema_version']!r} and this flyby reads {SCHEMA}; update flyby"
            )
        ledger = cls()
        for index, row in enumerate(value["crossings"]):
            try:
                if not isinstance(row, dict):
                    raise BadInput("it should be an object")
                ledger._add(Crossing(**row))
            except ValidationError as error:
                raise BadInput(f"{path}: crossing {index} is not valid: {sentence(error)}") from None
            except BadInput as error:
                raise type(error)(f"{path}: crossing {index} is not valid: {error}") from None
        return ledger
