"""Linear discriminant analysis from sums alone [GH-OFL; FedCGS uses the total covariance], and naive Bayes.

    mu_c = S_c / n_c,    Sigma = (B - sum_c n_c mu_c mu_c^T) / (N - C),    W_c = Sigma^-1 mu_c,
    b_c = -mu_c^T Sigma^-1 mu_c / 2 + log pi_c,

with Sigma drawn by ``shrink`` towards trace(Sigma) / D I, and all features taken from their common mean first: the
answers are the same, the numbers smaller. Naive Bayes leaves only the diagonal of Sigma. Variances of each class for
itself would need second moments of each class, which are not sent, so it is the pooled diagonal.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flyby.errors import BadInput
from flyby.fusion.base import Server
from flyby.fusion.closed.base import ClosedForm, ClosedSettings, Contributions, Linear
from flyby.statistics.feature_sums import Sums


class LdaSettings(ClosedSettings):
    shrink: float = Field(0.05, ge=0, le=1, description="how far the covariance is drawn towards a multiple of I")
    prior: Literal["counts", "uniform"] = Field("counts", description="how likely classes are beforehand")


class Gaussians:
    """One normal distribution for each class that has images, all of one covariance: ``held`` [H] which they are,
    ``means`` [H, D] from the common ``centre`` [D], ``covariance`` [D, D], ``log_prior`` [H]."""

    def __init__(self, sums: Sums, shrink: float, prior: str) -> None:
        self.sums, counts = sums, sums.counts.double()
        self.held = (sums.counts > 0).nonzero()[:, 0]
        self.centre = sums.first.sum(0) / sums.images
        self.means = sums.first[self.held] / counts[self.held, None] - self.centre
        freedom = sums.images - len(self.held)
        if freedom < 1:
            raise BadInput("there is no class with two images, so classes have no spread to be told; use ridge")
        spread = sums.within() / freedom
        level = float(spread.diagonal().mean())
        if not level > sums.alike:
            raise BadInput("the features of a class do not differ from image to image, so nothing can be solved")
        self.covariance = (1 - shrink) * spread
        self.covariance.diagonal().add_(shrink * level)
        shares = counts[self.held] / sums.images
        self.log_prior = shares.log() if prior == "counts" else torch.zeros_like(shares)

    def factor(self) -> Tensor:
        """L with L L^T the covariance."""
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(self.covariance)
        if int(info):
            raise BadInput("the covariance of the features is singular; raise --set fusion.shrink=0.05")
        return factor

    def answering(self, directions: Tensor) -> Linear:
        """The head whose scores are the classes' log-likelihoods, given Sigma^-1 of the means, [H, D]."""
        bias = self.log_prior - (self.means * directions).sum(1) / 2
        return self.spread_out(directions, bias)

    def spread_out(self, weight: Tensor, bias: Tensor) -> Linear:
        """A head over features from their centre and the classes held, as one over features and all classes."""
        classes, width = self.sums.first.shape
        whole, constant = weight.new_zeros(classes, width), bias.new_zeros(classes)
        whole[self.held], constant[self.held] = weight, bias - weight @ self.centre
        return Linear(whole, constant)


class Lda(ClosedForm):
    name = "lda"
    paper = "GH-OFL"
    about = "linear discriminant analysis from sums of features: that of all images together, whatever the split"
    settings_type = LdaSettings
    settings: LdaSettings

    def solve(self, sums: Contributions, server: Server) -> Linear:
        classes = Gaussians(sums.total, self.settings.shrink, self.settings.prior)
        return classes.answering(torch.cholesky_solve(classes.means.T, classes.factor()).T)


class NaiveBayes(ClosedForm):
    name = "nb"
    about = "naive Bayes with one variance per feature, pooled over classes, from sums of features"
    settings_type = LdaSettings
    settings: LdaSettings

    def solve(self, sums: Contributions, server: Server) -> Linear:
        classes = Gaussians(sums.total, self.settings.shrink, self.settings.prior)
        variances = classes.covariance.diagonal()
        if not bool((variances > 0).all()):
            raise BadInput("a feature does not vary within classes; raise --set fusion.shrink=0.05")
        return classes.answering(classes.means / variances)
