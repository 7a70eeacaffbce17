"""Null-space projectors of a trained network's layers, for MA-Echo [Su et al., 2022].

For every linear and convolution layer P projects onto the directions that the layer's inputs r (patches, for a
convolution; a 1 appended for the bias) do not use, so that weights moved by D P answer them as before: (W + D P) r is
nearly W r. By recursive least squares, from I:

    P <- P - s (P r)(P r)^T / (a + r^T P r)

With s = 1 that is the inverse, updated input by input, of I + sum_r r r^T / a (Sherman and Morrison), so it is computed
from the second moment at once, whatever the order of the images: P = (I + S/rho)^-1 with S = E[r r^T] and a = rho n for
n inputs. Stating rho, a mean square, instead of a makes P not depend on how many images a site has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flyby.data.site import Site
from flyby.models import Network
from flyby.parcels.parcel import Manifest
from flyby.statistics.extras import ROUNDING, Entry, Extra, Sent, positive
from flyby.statistics.kfac import (
    matrices,
    pack,
    packed_entries,
    second_moments,
    some_of,
    under,
    unpack,
)

SAMPLES = 10_000
RIDGE = 0.1  # a direction used less than this, in mean square, counts as mostly free
TOLERANCE = 1e-2  # the largest error of P, in any direction, that a low rank may bring


def null_space(
    network: Network,
    site: Site,
    seed: int,
    *,
    samples: int = SAMPLES,
    ridge: float = RIDGE,
    rank: int | None = None,
    tolerance: float = TOLERANCE,
    half: bool = True,
) -> dict[str, Tensor]:
    """The statistic ``null-space``: for every layer ``LAYER.triangle`` (P, packed) or, where that is smaller,
    ``LAYER.basis``.

    The basis V, of low rank, stands for P = I - V V^T. ``tolerance`` says how much of P may be lost so; ``rank`` caps
    the rank whatever is lost.
    """
    part = some_of(site, samples, seed, "null-space")
    moments, _ = second_moments(network, part.images)
    packed: dict[str, Tensor] = {}
    for name, moment in moments.items():
        packed |= {f"{name}.{key}": value for key, value in compress(moment, ridge, rank, tolerance, half).items()}
    return packed


def projector(moment: Tensor, ridge: float) -> Tensor:
    """P = (I + S/rho)^-1 of second moments S ``[..., n, n]``."""
    inverse: Tensor = torch.linalg.inv(
        torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device) + moment / ridge
    )
    return inverse


def recurse(projector: Tensor, r: Tensor, step: float, ridge: float) -> Tensor:
    """One step of the recursion, P - s (P r)(P r)^T / (a + r^T P r), as it is published; ``ridge`` is a."""
    used = projector @ r
    return projector - step * torch.outer(used, used) / (ridge + r @ used)


def compress(moment: Tensor, ridge: float, rank: int | None, tolerance: float, half: bool) -> dict[str, Tensor]:
    """P of second moments ``[groups, n, n]`` as a triangle or as a basis, whichever takes fewer bytes (a ``rank``
    always asks for the basis)."""
    n = moment.shape[-1]
    values, vectors = torch.linalg.eigh(moment.double())
    used = (values.clamp_min(0) / ridge) / (1 + values.clamp_min(0) / ridge)  # the eigenvalues of I - P, rising
    kept = max(1, int((used > tolerance).sum(1).max()))
    kept = kept if rank is None else max(1, min(rank, kept))
    if rank is None and 2 * kept >= n + 1:
        free = torch.einsum("gij,gj,gkj->gik", vectors, 1 - used, vectors)
        return pack(free.float(), half=half)
    basis = vectors[:, :, -kept:] * used[:, None, -kept:].sqrt()
    return {"basis": basis.half() if half else basis.float()}


def expand(
    packed: Mapping[str, Tensor], n: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Tensor:
    """P ``[groups, n, n]`` from what :func:`compress` gave."""
    if "basis" not in packed:
        return unpack(packed, n, dtype, device)
    basis = packed["basis"].to(device, dtype)
    return torch.eye(n, dtype=dtype, device=device) - basis @ basis.mT


class NullSpace(Extra):
    """For every layer P or its basis; P and I - P have no eigenvalue below zero."""

    name = "null-space"
    cure = "train it with --set objective.send=[null-space], or use fedavg"

    def entries(self, manifest: Manifest, given: Sent) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for start, groups, n in projectors(manifest):
            basis = given.get(f"{start}.basis")
            if basis is None:
                found |= packed_entries(start, groups, n, given)
            else:
                rank = min(n, basis.shape[-1]) if basis.ndim else 1
                dtype = torch.float32 if basis.dtype == torch.float32 else torch.float16
                found[f"{start}.basis"] = Entry(dtype, (groups, n, rank), -1 - ROUNDING, 1 + ROUNDING)
        return found

    def sound(self, manifest: Manifest, given: Sent) -> str:
        for start, _, n in projectors(manifest):
            packed = under(start, given)
            if "basis" in packed:  # I - V V^T has the eigenvalues of I - V^T V, and ones
                basis = packed["basis"].float()
                free = [torch.eye(basis.shape[2]) - basis.mT @ basis]
            else:
                free = [unpack(packed, n, torch.float32)]
                free.append(torch.eye(n) - free[0])
            if not all(positive(each, 1.0) for each in free):
                return f"{start} is no projector: it has eigenvalues outside 0 .. 1"
        return ""


def projectors(manifest: Manifest) -> Iterator[tuple[str, int, int]]:
    """(name, groups, rows) of every projector that a network has."""
    for name, (groups, _, inputs), _ in matrices(manifest.spec):
        yield f"null-space.{name}", groups, inputs
