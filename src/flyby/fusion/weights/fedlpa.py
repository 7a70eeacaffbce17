"""FedLPA [Liu et al., NeurIPS 2024]: layer-wise aggregation of Gaussian posteriors whose precisions are K-FAC factors.

Near its own optimum M_k (a layer's [W | b]) client k's loss grows as (1/2) <M - M_k, B_k (M - M_k) A_k>. The M that is
best for all, each weighed by q_k = n_k / N, solves one linear equation per layer:

    sum_k q_k B_k M A_k = sum_k q_k B_k M_k A_k          (A_k and B_k damped by .0316 I)

The operator is symmetric and positive definite, so it is solved by conjugate gradients, from the average,
preconditioned by the mean factors (exact where all B_k agree). The residual is reported. Everything else (BatchNorm,
heads that are not linear) is averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from flyby.fusion.base import Fusion, Server, weights_of
from flyby.fusion.predictor import Predictor
from flyby.fusion.weights.average import AverageSettings, FedAvg
from flyby.fusion.weights.layers import Gathered, Revised, layer_by_layer, weighted
from flyby.parcels.inbox import Inbox
from flyby.statistics.kfac import divide, matrix_shape, under, unpack


class FedLpaSettings(AverageSettings):
    damping: float = Field(0.0316, gt=0, description="added to the diagonals of all factors")
    tolerance: float = Field(1e-6, gt=0, description="relative residual at which a layer is solved")
    iterations: int = Field(500, ge=0, description="most steps of conjugate gradients per layer")


@dataclass(frozen=True)
class Solution:
    """What conjugate gradients found: the matrix, ||rhs - operator(matrix)|| / ||rhs||, and the steps it took."""

    matrix: Tensor
    residual: float
    steps: int


class FedLpa(Fusion):
    name = "fedlpa"
    paper = "FedLPA: Liu et al., NeurIPS 2024"
    about = "layer-wise posteriors with K-FAC precision, joined by one linear solve per layer"
    needs = frozenset({"weights", "kfac"})
    settings_type = FedLpaSettings
    settings: FedLpaSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        parcels.same_spec(self.name)
        shares = weights_of(parcels, self.settings.weights)
        solved: dict[str, Tensor] = {}
        rows = []
        for layer in layer_by_layer(parcels, "kfac"):
            average = weighted(shares, (m.double() for m in layer.matrices))
            found = self._solve(layer, shares, average.to(server.device))
            matrix = found.matrix.cpu()
            solved |= divide(matrix.float(), layer.name, layer.layer)
            groups, outputs, inputs = matrix_shape(layer.layer)
            moved = float((matrix - average).norm() / average.norm().clamp_min(1e-30))
            rows.append(
                [
                    layer.name,
                    f"{groups} x {outputs} x {inputs}",
                    layer.bytes,
                    found.steps,
                    f"{found.residual:.1e}",
                    round(moved, 4),
                ]
            )
        server.report.append(
            {
                "title": "FedLPA, layer by layer",
                "text": (
                    "Each row is one linear system, solved by conjugate gradients from the average of the sites'"
                    " weights. The factors' bytes are those of one site and part of its upload."
                ),
                "table": {
                    "columns": ["layer", "groups x outputs x inputs", "factor bytes", "steps", "residual", "moved"],
                    "rows": rows,
                },
            }
        )
        plain = AverageSettings(weights=self.settings.weights, recalibrate=self.settings.recalibrate)
        return FedAvg(plain).fuse(Revised(parcels, lambda item: item.weights | solved), server)

    def _solve(self, layer: Gathered, shares: Sequence[float], average: Tensor) -> Solution:
        _, outputs, inputs = matrix_shape(layer.layer)

        def factors(letter: str, n: int) -> list[Tensor]:
            found = [unpack(under(letter, each), n, average.dtype, average.device) for each in layer.statistics]
            for factor in found:
                factor.diagonal(dim1=1, dim2=2).add_(self.settings.damping)
            return found

        matrices = [m.to(average) for m in layer.matrices]
        return solve(
            shares,
            factors("A", inputs),
            factors("B", outputs),
            matrices,
            average,
            self.settings.tolerance,
            self.settings.iterations,
        )


def solve(
    shares: Sequence[float],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    matrices: Sequence[Tensor],
    start: Tensor,
    tolerance: float = 1e-6,
    iterations: int = 500,
) -> Solution:
    """M with sum_k q_k B_k M A_k = sum_k q_k B_k M_k A_k, by preconditioned conjugate gradients from ``start``.

    ``inputs`` are the A_k ``[groups, i, i]``, ``gradients`` the B_k ``[groups, o, o]``, ``matrices`` the M_k ``[groups,
    o, i]``. The groups are solved as one system: it is block-diagonal.
    """

    def total(each: Sequence[Tensor]) -> Tensor:
        return weighted(shares, (b @ m @ a for a, b, m in zip(inputs, gradients, each, strict=True)))

    def operator(m: Tensor) -> Tensor:
        return total([m] * len(shares))

    target = total(matrices)
    size = float(target.norm().clamp_min(1e-300))
    precondition = _preconditioner(shares, inputs, gradients)
    matrix = start.clone()
    residual = target - operator(matrix)
    steps = 0
    direction = preconditioned = precondition(residual)
    energy = (residual * preconditioned).sum()
    while steps < iterations and float(residual.norm()) > tolerance * size:
        image = operator(direction)
        curvature = (direction * image).sum()
        # Rounding, or a hostile parcel, made the operator indefinite: what is found so far stands.
        if not float(curvature) > 0:
            break
        matrix = matrix + energy / curvature * direction
        residual = residual - energy / curvature * image
        preconditioned = precondition(residual)
        energy, before = (residual * preconditioned).sum(), energy
        direction = preconditioned + energy / before * direction
        steps += 1
    return Solution(matrix, float((target - operator(matrix)).norm()) / size, steps)


def _preconditioner(
    shares: Sequence[float], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Callable[[Tensor], Tensor]:
    """R -> B^-1 R A^-1 with the mean factors; nothing is changed where rounding left one of them without a Cholesky
    factor."""
    roots = []
    for factors in (inputs, gradients):
        root, failed = torch.linalg.cholesky_ex(weighted(shares, factors))
        if bool(failed.any()):
            return lambda residual: residual
        roots.append(root)
    a, b = roots
    return lambda residual: torch.cholesky_solve(torch.cholesky_solve(residual, b).mT, a).mT
