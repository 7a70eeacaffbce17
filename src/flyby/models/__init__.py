"""Model specs and the networks they describe."""

from __future__ import annotations

from flyby.models.heads import HEADS
from flyby.models.networks import ARCHITECTURES
from flyby.models.spec import ModelSpec, Network

__all__ = ["ModelSpec", "Network", "ARCHITECTURES", "HEADS"]
