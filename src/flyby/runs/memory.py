"""What a simulated node has done, round by round, so that an interrupted run goes on in the middle of a node: the
folder of a real node, which gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flyby.meeting.candidate import Candidate
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.runs.nodefolder import STATE, NodeFolder


@dataclass
class Memory:
    """``data`` names the node's images: what kept peers answered counts for these alone."""

    folder: NodeFolder
    data: str

    @classmethod
    def at(cls, path: Path, own: Parcel, data: str) -> Memory:
        there = (path / STATE).exists()
        return cls(NodeFolder.load(path) if there else NodeFolder.start(path, own), data)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return list(self.folder.state.rounds)

    def versions(self, own: Parcel) -> list[Parcel]:
        """Every version of the node's model, from the one it began with; a round may have left it as it was."""
        found, path = [own], self.folder.path
        assert path is not None
        for number in range(1, self.folder.state.number + 1):
            file = path / "own" / f"{number}.parcel"
            found.append(parcel.read(file) if file.exists() else found[-1])
        return found

    def kept(self, device: torch.device | str) -> list[Candidate]:
        return self.folder.kept(device, self.data)

    def note(self, number: int, own: Parcel, kept: Sequence[Candidate], rounds: Sequence[dict[str, Any]]) -> None:
        """A round is over; ``rounds`` has what was measured in all of them so far."""
        state = self.folder.state.model_copy(update={"number": number, "rounds": list(rounds)})
        self.folder.save(state, own, kept, self.data, lambda _: None)
