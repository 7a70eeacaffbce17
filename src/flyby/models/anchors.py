"""Simplex equiangular tight frames: the fixed geometry AURORA aligns to and FedETF classifies with.

A = sqrt(C/(C-1)) U (I - 11^T/C), with U orthonormal, has unit columns whose pairwise cosine is -1/(C-1), the least that
C directions can share [Papyan et al., PNAS 2020].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flyby.errors import BadInput
from flyby.rng import generator


def simplex_etf(classes: int, dim: int, seed: int) -> Tensor:
    """Anchors ``[C, d]`` (one unit row a class), the same for every site that uses the same seed.

    For d >= C the frame lies in a random C-dimensional subspace; for d = C-1 it is an exact simplex in a random
    rotation of the whole space; fewer dimensions cannot hold C equiangular directions.
    """
    if dim < classes - 1:
        raise BadInput(
            f"a simplex of {classes} classes needs features of at least {classes - 1} dimensions, this network has"
            f" {dim}; widen it, or add a projector with --set model.projector=[2048,2048]"
        )
    rng = generator(seed, "anchors", classes, dim)
    eye = torch.eye(classes, dtype=torch.float64)
    centred = eye - 1 / classes
    if dim >= classes:
        basis = _orthonormal(dim, classes, rng)
        frame = basis @ centred
    else:
        # Rows of the Helmert matrix: an orthonormal basis of what is orthogonal to 11^T.
        helmert = torch.zeros(dim, classes, dtype=torch.float64)
        for i in range(1, classes):
            helmert[i - 1, :i] = 1 / math.sqrt(i * (i + 1))
            helmert[i - 1, i] = -i / math.sqrt(i * (i + 1))
        frame = _orthonormal(dim, dim, rng) @ helmert
    return (math.sqrt(classes / (classes - 1)) * frame).T.float().contiguous()


def _orthonormal(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=rng))
    turned: Tensor = q * torch.sign(torch.diagonal(r))
    return turned  # the sign convention makes Q unique, whatever the library
