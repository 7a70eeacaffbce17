"""MA-Echo [Su et al., 2022, "One-shot federated learning without server-side training"]: averaging along what each
client does not use.

Each client sends, per layer, a projector P_k on the directions its inputs leave free
(``flyby.statistics.null_space``). W starts at the mean of the W_k; then, again and again,

    W   <- W + eta mean_k (W - W_k)(P_k - I)        W is pulled to each client along the directions that client uses
    W_k <- W_k + eta (W - W_k) P_k                  each client moves to W along the directions it does not use

and the answer is the mean of the W_k. The eigenvalues of P_k and of I - P_k lie in [0, 1], so both steps contract for
eta <= 1, and rounding does not grow: float32 serves. Everything that is not a linear or convolution layer is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flyby.fusion.base import Fusion, Server, weights_of
from flyby.fusion.predictor import Predictor
from flyby.fusion.weights.average import AverageSettings, FedAvg
from flyby.fusion.weights.layers import Revised, layer_by_layer, weighted
from flyby.parcels.inbox import Inbox
from flyby.statistics.kfac import divide, matrix_shape
from flyby.statistics.null_space import expand


class MaEchoSettings(AverageSettings):
    weights: Literal["size", "uniform"] = Field("uniform", description="of the clients, in every mean")
    eta: float = Field(1.0, gt=0, le=1, description="step size")
    iterations: int = Field(50, ge=0, description="steps of moving the weights together")


class MaEcho(Fusion):
    name = "maecho"
    paper = "MA-Echo: Su et al., 2022"
    about = "weights moved together along the directions each client's inputs leave free"
    needs = frozenset({"weights", "null-space"})
    settings_type = MaEchoSettings
    settings: MaEchoSettings

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        parcels.same_spec(self.name)
        shares = weights_of(parcels, self.settings.weights)
        answers: dict[str, Tensor] = {}
        rows = []
        for layer in layer_by_layer(parcels, "null-space"):
            groups, outputs, inputs = matrix_shape(layer.layer)
            projectors = [expand(each, inputs, torch.float32, server.device) for each in layer.statistics]
            matrices = [m.to(server.device, torch.float32) for m in layer.matrices]
            answer, change = echo(matrices, projectors, shares, self.settings.eta, self.settings.iterations)
            answers |= divide(answer.cpu().float(), layer.name, layer.layer)
            average = weighted(shares, matrices)
            free = float(torch.stack([p.diagonal(dim1=1, dim2=2).mean() for p in projectors]).mean())
            moved = float((answer - average).norm() / average.norm().clamp_min(1e-30))
            rows.append(
                [
                    layer.name,
                    f"{groups} x {outputs} x {inputs}",
                    layer.bytes,
                    round(free, 3),
                    f"{change:.1e}",
                    round(moved, 4),
                ]
            )
        server.report.append(
            {
                "title": "MA-Echo, layer by layer",
                "text": (
                    f"{self.settings.iterations} steps of {self.settings.eta:g}. Free: the share of a layer's input"
                    " directions that its clients do not use, on average. Last change: how far the last step moved the"
                    " answer, relative to its size. The projectors' bytes are those of one site and part of its"
                    " upload."
                ),
                "table": {
                    "columns": [
                        "layer",
                        "groups x outputs x inputs",
                        "projector bytes",
                        "free",
                        "last change",
                        "moved",
                    ],
                    "rows": rows,
                },
            }
        )
        plain = AverageSettings(weights=self.settings.weights, recalibrate=self.settings.recalibrate)
        return FedAvg(plain).fuse(Revised(parcels, lambda item: item.weights | answers), server)


def echo(
    matrices: Sequence[Tensor], projectors: Sequence[Tensor], shares: Sequence[float], eta: float, iterations: int
) -> tuple[Tensor, float]:
    """(mean of the W_k after so many steps, how far the last step moved it, relative to its size). ``shares`` weigh
    every mean."""
    clients = list(matrices)
    centre = answer = before = weighted(shares, clients)
    for _ in range(iterations):
        gaps = [centre - client for client in clients]
        centre = centre + eta * weighted(shares, (gap @ p - gap for gap, p in zip(gaps, projectors, strict=True)))
        clients = [client + eta * (centre - client) @ p for client, p in zip(clients, projectors, strict=True)]
        answer, before = weighted(shares, clients), answer
    return answer, float((answer - before).norm() / answer.norm().clamp_min(1e-30))
