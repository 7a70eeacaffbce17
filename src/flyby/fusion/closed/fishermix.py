"""FisherMix [GH-OFL]: a head trained on features that are drawn where classes differ.

Features are whitened by the pooled within-class covariance of LDA. There the means of H classes span at most H - 1
dimensions, Fisher's discriminant subspace, with orthonormal basis Q. The server draws ``samples`` points of every class
from N(Q^T mu_c, tau^2 I), and trains a softmax head on them, each class weighed by its prior, with weight decay. The
noise is drawn in the whitened space and then projected, so what comes out depends on the sums and the seed, and not on
which basis was found.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flyby.fusion.base import Server
from flyby.fusion.closed.base import ClosedForm, Contributions, Linear
from flyby.fusion.closed.lda import Gaussians, LdaSettings
from flyby.rng import generator

FLAT = 1e-9  # of the largest singular value: directions in which the means do not differ


class FisherMixSettings(LdaSettings):
    tau: float = Field(1.0, gt=0, le=100, description="width of the drawn clouds, in units of the classes' own")
    samples: int = Field(200, ge=1, le=1_000_000, description="features drawn per class")
    decay: float = Field(1e-3, gt=0, description="weight decay of the head")
    iterations: int = Field(200, ge=1, le=100_000, description="most steps of L-BFGS")


class FisherMix(ClosedForm):
    name = "fishermix"
    paper = "GH-OFL"
    about = "a head trained on features drawn in the classes' discriminant subspace, from sums of features"
    settings_type = FisherMixSettings
    settings: FisherMixSettings

    def solve(self, sums: Contributions, server: Server) -> Linear:
        settings = self.settings
        classes = Gaussians(sums.total, settings.shrink, settings.prior)
        factor = classes.factor()
        white = torch.linalg.solve_triangular(factor, classes.means.T, upper=False)
        vectors, values, _ = torch.linalg.svd(white, full_matrices=False)
        basis = vectors[:, values > FLAT * values[0].clamp_min(1e-300)]
        centres, rng = (basis.T @ white).T, generator(server.seed, "fishermix")
        clouds = []
        for centre in centres:  # one class at a time: the noise has as many dimensions as there are features
            noise = torch.randn(settings.samples, len(basis), generator=rng, dtype=torch.float64).to(centre.device)
            clouds.append(centre + settings.tau * noise @ basis)
        head = fitted(torch.stack(clouds), classes.log_prior.softmax(0), settings.decay, settings.iterations)
        weight = torch.linalg.solve_triangular(factor.T, basis @ head.weight.T, upper=True).T
        return classes.spread_out(weight, head.bias)


def fitted(clouds: Tensor, prior: Tensor, decay: float, iterations: int) -> Linear:
    """The softmax head of least weighed cross-entropy on points [H, samples, r] of H classes, from zero; convex, so
    there is one."""
    classes, samples, width = clouds.shape
    weight = torch.zeros(classes, width, dtype=clouds.dtype, device=clouds.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=clouds.dtype, device=clouds.device, requires_grad=True)
    points, labels = clouds.flatten(0, 1), torch.arange(classes, device=clouds.device).repeat_interleave(samples)
    weights = (prior / samples)[labels]
    optimiser = torch.optim.LBFGS(
        [weight, bias],
        max_iter=iterations,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (weights * F.cross_entropy(points @ weight.T + bias, labels, reduction="none")).sum()
        loss = loss + decay / 2 * (weight.square().sum() + bias.square().sum())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return Linear(weight.detach(), bias.detach())
