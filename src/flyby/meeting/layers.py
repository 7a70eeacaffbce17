"""Which layers two networks share: FOL's Appendix B.1 [Huang and Shu, ICML 2025].

L_shared(k, j) holds pairs (l, l') of layers of the same type and the same full shape; each layer is in one pair at
most, and every layer of k takes the first of j's that is still free. What j has beyond that is unshared. (In the
paper's example eq. 26 also lists BN(32)_j, which j does not have: only BN(64)_j is unshared.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flyby.models import ModelSpec

Signature = tuple[object, ...]


def signature(layer: nn.Module) -> Signature | None:
    """Type and full shape of a layer, None for one without weights. The bias is part of the shape, groups tell
    depthwise filters apart."""
    shapes = tuple(tuple(p.shape) for p in layer.parameters(recurse=False))
    if isinstance(layer, nn.Conv2d):
        return ("conv", layer.groups, *shapes)
    if isinstance(layer, nn.Linear):
        return ("linear", *shapes)
    if isinstance(layer, nn.BatchNorm2d):
        return ("batch norm", *shapes)
    return ("other", type(layer).__name__, *shapes) if shapes else None


def layers_of(network: nn.Module) -> dict[str, Signature]:
    """A network's layers with weights, in order, by name."""
    return {name: mark for name, layer in network.named_modules() if (mark := signature(layer)) is not None}


def match(own: Mapping[str, Signature], other: Mapping[str, Signature]) -> list[tuple[str, str]]:
    """Greedy one-to-one pairs (own layer, other's layer), each of ``own`` in order with the first free layer of its
    kind."""
    free = list(other)
    pairs = []
    for name, mark in own.items():
        partner = next((candidate for candidate in free if other[candidate] == mark), None)
        if partner is not None:
            free.remove(partner)
            pairs.append((name, partner))
    return pairs


@lru_cache(maxsize=256)
def shared_layers(own: ModelSpec, other: ModelSpec) -> tuple[tuple[str, str], ...]:
    """The pairs of shared layers of two architectures: (own layer, other's layer)."""
    return tuple(match(layers_of(own.skeleton()), layers_of(other.skeleton())))


def cosine(
    own: ModelSpec, own_state: Mapping[str, Tensor], other: ModelSpec, other_state: Mapping[str, Tensor]
) -> float:
    """Eq. 8 over the parameters of shared layers; -1 where two networks share none."""
    pairs = shared_layers(own, other)
    if not pairs:
        return -1.0
    mine = _flat(own, own_state, [a for a, _ in pairs])
    theirs = _flat(other, other_state, [b for _, b in pairs])
    return float(F.cosine_similarity(mine, theirs.to(mine.device), dim=0))


def _flat(spec: ModelSpec, state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    skeleton = spec.skeleton()
    keys = [
        f"{name}.{key}" if name else key
        for name in names
        for key, _ in skeleton.get_submodule(name).named_parameters(recurse=False)
    ]
    return torch.cat([state[key].detach().double().reshape(-1) for key in keys])
