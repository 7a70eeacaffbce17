"""A candidate: one model on its way through a node's pipeline, with what is known about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from flyby.meeting.stack import Tensors
from flyby.models import ModelSpec, Network
from flyby.parcels.parcel import Parcel


@dataclass(eq=False)
class Candidate:
    """A network by its spec and state dict (on the node's device). ``version`` is the round of its sender's model (0:
    pretrained); ``stays`` marks channels to be cut; ``logits`` caches what the network says of the node's own parts, by
    part name.
    """

    sender: str
    spec: ModelSpec
    state: Tensors
    counts: tuple[int, ...] | None = None
    version: int = 0
    adapted: bool = False
    score: float | None = None
    stays: Tensors | None = None
    logits: Tensors = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, item: Parcel, device: torch.device | str) -> Candidate:
        manifest = item.manifest
        version = manifest.meta.get("version", 0)
        return cls(
            manifest.sender,
            manifest.spec,
            {n: t.to(device) for n, t in item.weights.items()},
            manifest.counts,
            version if isinstance(version, int) else 0,
        )

    def become(self, state: Tensors, spec: ModelSpec | None = None) -> None:
        """Take new weights; what was cached about the old ones is forgotten."""
        self.state, self.spec, self.logits, self.score = state, spec or self.spec, {}, None

    def network(self) -> Network:
        network = self.spec.skeleton()
        network.load_state_dict(self.state, strict=True, assign=True)
        return network.eval()


def by_spec(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates of equal spec together, in the order they first come."""
    groups: dict[ModelSpec, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.spec, []).append(candidate)
    return list(groups.values())
