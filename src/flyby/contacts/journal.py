"""The journal: what happened, event by event, in the order of time. It decides a run: replayed, it gives the same
bytes.

One line is one JSON object; the first says which plan and which settings made it. ``at`` is in seconds of the plan.

============  ========================================================================================================
``exchange``  ``a`` and ``b`` have each other's model: ``codec``, ``bytes`` and ``versions`` of what a and b gave (null
              where one of them wanted nothing), ``windows`` it took, ``begun`` when
``partial``   a window ended before all chunks were across: ``chunks`` of ``of`` are. Not an exchange
``carry``     ``a`` handed ``b`` the model of ``origin``, as it had received it
``deliver``   ``node`` has sent its model to a ``station``
``round``     ``node`` orients for the ``number``-th time on ``models``; each with its ``age`` in seconds and by how
              many versions its maker is ``ahead`` by then
``evict``     ``node`` had no room and dropped ``origin``'s model
============  ========================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyby.errors import BadInput
from flyby.files import canonical, write_text

SCHEMA = 1
KINDS = ("exchange", "partial", "carry", "deliver", "round", "evict")
Event = dict[str, Any]


@dataclass
class Journal:
    """``head``: the digest of the plan, its hours, the nodes (and which site stands for each), settings and sizes."""

    head: dict[str, Any]
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def rounds(self, node: str) -> list[Event]:
        return [event for event in self.of("round") if event["node"] == node]

    @property
    def sites(self) -> dict[str, str]:
        """The site that stands for each node."""
        found: dict[str, str] = self.head["sites"]
        return found

    def lines(self) -> Iterator[str]:
        for one in ({"journal": SCHEMA, **self.head}, *self.events):
            yield canonical(one).decode() + "\n"

    def write(self, path: Path) -> None:
        write_text(path, "".join(self.lines()))

    @classmethod
    def read(cls, path: Path | str) -> Journal:
        try:
            rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
            head = rows[0]
            if head.pop("journal") != SCHEMA:
                raise BadInput(f"{path} is a journal of another flyby; make it again, or update flyby")
            whole = isinstance(head["sites"], dict) and all(
                row["event"] in KINDS and isinstance(row["at"], int | float) for row in rows[1:]
            )
        except FileNotFoundError:
            raise BadInput(f"{path} does not exist; a run with --contacts writes one") from None
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadInput(f"{path} is not a journal ({type(error).__name__}: {error}); name a run's") from None
        if not whole:
            raise BadInput(f"{path} is not a journal (an event of it cannot be read); name a run's")
        return cls(head, rows[1:])
