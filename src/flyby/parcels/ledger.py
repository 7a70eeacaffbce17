"""The ledger: who sent what to whom, and how many bytes it took. One crossing for each ordered pair, ever; another one
is entered only where somebody asked for it, and is counted."""

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
    there is one). ``again`` counts the crossings of this pair before it: more than 0 only where that was asked for.
    ``weights`` names the model, whatever travels beside it (None in ledgers that do not say). ``sites`` is how many the
    upload speaks for, where it is a region's."""

    sender: Name
    receiver: Name
    bytes: Annotated[int, Field(ge=0)]
    digest: Annotated[str, Field(min_length=1, max_length=128)]
    round: Annotated[int, Field(ge=0)] = 0
    again: Annotated[int, Field(ge=0)] = 0
    weights: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    sites: Annotated[int, Field(ge=1)] = 1

    def row(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        usual = {"again": 0, "weights": None, "sites": 1}
        return {key: value for key, value in row.items() if key not in usual or value != usual[key]}


class Ledger:
    """All crossings of a run, in the order they happened. A second crossing of the same ordered pair is an error, not a
    warning."""

    def __init__(self) -> None:
        self._crossings: dict[tuple[str, str, int], Crossing] = {}
        self._origins: dict[tuple[str, str], str] = {}  # (weights, receiver) -> who sent them first

    @property
    def crossings(self) -> list[Crossing]:
        return list(self._crossings.values())

    def record(
        self,
        sender: str,
        receiver: str,
        bytes: int,
        digest: str,
        round: int = 0,
        *,
        again: bool = False,
        weights: str | None = None,
        sites: int = 1,
    ) -> None:
        """Notes that ``sender`` sent ``bytes`` to ``receiver``; raises :class:`SecondCrossing` if it had done so
        before, unless ``again`` allows it."""
        before = self.times(sender, receiver) if again else 0
        try:
            crossing = Crossing(sender, receiver, bytes, digest, round, before, weights, sites)
        except ValidationError as error:
            raise BadInput(f"not a valid crossing: {sentence(error)}") from None
        self._add(crossing)

    def take_over(self, other: Ledger, *, known: bool = False) -> None:
        """Notes all that another ledger holds, under the same rules; with ``known`` pairs that are here already are
        left."""
        for c in other.crossings:
            if not (known and self.has(c.sender, c.receiver)):
                self.record(c.sender, c.receiver, c.bytes, c.digest, c.round, weights=c.weights, sites=c.sites)

    def _add(self, crossing: Crossing) -> None:
        times = self.times(crossing.sender, crossing.receiver)
        if crossing.sender == crossing.receiver:
            raise BadInput(f"{crossing.sender} cannot send a parcel to itself; name two different participants")
        if crossing.again != times:
            if crossing.again > times:
                raise BadInput(
                    f"{crossing.sender} has not crossed to {crossing.receiver} {crossing.again} times before"
                )
            earlier = self._crossings[crossing.sender, crossing.receiver, times - 1].digest[:16]
            raise SecondCrossing(
                f"{crossing.sender} already sent {earlier} to {crossing.receiver}; each model crosses once, so use the"
                " parcel that is there"
            )
        if (first := self.origin(crossing.weights, crossing.receiver)) is not None:
            raise SecondCrossing(
                f"the model of {crossing.sender} is the one that {first} already sent to {crossing.receiver}; a copy"
                " under another name counts once"
            )
        self._crossings[crossing.sender, crossing.receiver, times] = crossing
        if crossing.weights is not None:
            self._origins[crossing.weights, crossing.receiver] = crossing.sender

    def origin(self, weights: str | None, receiver: str) -> str | None:
        """Who has sent this very model to ``receiver``, under whatever name."""
        return None if weights is None else self._origins.get((weights, receiver))

    def has(self, sender: str, receiver: str) -> bool:
        return self.times(sender, receiver) > 0

    def times(self, sender: str, receiver: str) -> int:
        """How often ``sender`` has sent to ``receiver``."""
        times = 0
        while (sender, receiver, times) in self._crossings:
            times += 1
        return times

    def bytes_up(self, server: str = "server") -> int:
        """Bytes that reached the server."""
        return sum(c.bytes for c in self._crossings.values() if c.receiver == server)

    def bytes_down(self, server: str = "server") -> int:
        """Bytes that left the server."""
        return sum(c.bytes for c in self._crossings.values() if c.sender == server)

    def uploads(self, server: str = "server") -> int:
        """How many parcels reached the server."""
        return sum(c.receiver == server for c in self._crossings.values())

    def sites(self, server: str = "server") -> int:
        """How many sites those parcels spoke for."""
        return sum(c.sites for c in self._crossings.values() if c.receiver == server)

    @property
    def total_bytes(self) -> int:
        return sum(c.bytes for c in self._crossings.values())

    def save(self, path: Path | str) -> None:
        """Writes the ledger as JSON, whole or not at all."""
        files.write_json(path, {"schema_version": SCHEMA, "crossings": [c.row() for c in self.crossings]})

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
