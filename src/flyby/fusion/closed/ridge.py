"""Ridge regression on the classes' indicators, from sums alone [AFL: He et al., CVPR 2025; Fed3R: Fani et al., ICML
2024].

With s = sum of x over all N images, the best W and b of sum ||W x + b - e_y||^2 + lambda ||W||^2 are

    W^T = (B - s s^T / N + lambda I)^-1 (S^T - s n^T / N),        b = (n - W s) / N,

where S, n and B are those of all images, so the split among sites does not matter. The constant is not shrunk. Lambda
is in units of the mean eigenvalue of the centred B. It is chosen from the sums too: by generalised cross-validation,
(RSS / N) / (1 - df / N)^2 with df the effective number of parameters, or by the squared error on each parcel's images
of the head that was solved without them (``choose=sites``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flyby.errors import BadInput
from flyby.fusion.base import Server
from flyby.fusion.closed.base import ClosedForm, ClosedSettings, Contributions, Linear
from flyby.statistics.feature_sums import Sums

GRID = tuple(10.0 ** (power / 2) for power in range(-12, 5))  # of lambda, in units of the mean eigenvalue

LEAST = 1e-3  # the smallest share of the targets that is believed to be left unexplained


class RidgeSettings(ClosedSettings):
    lam: float | None = Field(None, gt=0, description="lambda in units of the mean eigenvalue; by default it is chosen")
    choose: Literal["gcv", "sites"] = Field(
        "gcv", description="how lambda is chosen: generalised cross-validation, or leaving out one parcel at a time"
    )
    normalise: bool = Field(False, description="divide each class's weights by their norm, as Fed3R does")
    even: bool = Field(False, description="give every feature a spread of 1 first: where layers of several scales meet")


@dataclass(frozen=True)
class Centred:
    """The regression with its constant solved for: ``gram`` [D, D] and ``cross`` [D, C] about the means, the mean
    feature [D], the classes' shares [C], how much there is to explain, the mean eigenvalue of the gram, how far float32
    may have moved any eigenvalue, and what each feature was divided by [D]."""

    gram: Tensor
    cross: Tensor
    mean: Tensor
    shares: Tensor
    targets: float
    images: int
    unit: float
    rounding: float
    scale: Tensor

    @classmethod
    def of(cls, sums: Sums, even: bool = False) -> Centred:
        n, counts = sums.images, sums.counts.double()
        s, shares = sums.first.sum(0), counts / sums.images
        gram = sums.second - torch.outer(s, s) / n
        cross, targets = sums.first.T - torch.outer(s, shares), float((counts * (1 - shares)).sum())
        unit = float(gram.diagonal().mean())
        if not unit > n * sums.alike:
            raise BadInput("the features do not differ from image to image, so nothing can be solved from their sums")
        scale, rounding = torch.ones_like(s), 2.0**-24 * float(sums.second.norm()) / math.sqrt(len(s))
        if even:  # noise may leave a spread below nothing
            scale = (gram.diagonal() / n).clamp_min(1e-6 * unit / n).sqrt()
            gram, cross, s = gram / torch.outer(scale, scale), cross / scale[:, None], s / scale
            rounding *= float(gram.diagonal().mean()) / unit
            unit = float(gram.diagonal().mean())
        return cls(gram, cross, s / n, shares, targets, n, unit, rounding, scale)

    def factor(self, lam: float) -> Tensor | None:
        """The Cholesky factor at a lambda of this many mean eigenvalues; None where rounding leaves none."""
        gram = self.gram.clone()
        gram.diagonal().add_(lam * self.unit)
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(gram)
        return None if int(info) else factor

    def solved(self, lam: float) -> Linear:
        """W and b."""
        factor = self.factor(lam)
        if factor is None:
            raise BadInput(f"the sums are singular at lambda {lam:g}; raise it with --set fusion.lam=...")
        weight = torch.cholesky_solve(self.cross, factor).T
        return Linear(weight / self.scale, self.shares - weight @ self.mean)


class Ridge(ClosedForm):
    name = "ridge"
    paper = "AFL: He et al., CVPR 2025; Fed3R: Fani et al., ICML 2024"
    about = "ridge regression from sums of features: that of all images together, whatever the split"
    settings_type = RidgeSettings
    settings: RidgeSettings

    def solve(self, sums: Contributions, server: Server) -> Linear:
        lam, tried, even = self.settings.lam, list[float](), self.settings.even
        if lam is None:
            by_sites = self.settings.choose == "sites"
            tried = left_out(sums, even) if by_sites else cross_validated(Centred.of(sums.total, even))
            if not any(math.isfinite(one) for one in tried):
                raise BadInput("no lambda can be told from these sums; give one with --set fusion.lam=0.01")
            lam = GRID[tried.index(min(tried))]
        server.report.append(_section(lam, tried, self.settings.choose, sums.total))
        head = Centred.of(sums.total, even).solved(lam)
        if not self.settings.normalise:
            return head
        norm = head.weight.norm(dim=1).clamp_min(1e-30)
        return Linear(head.weight / norm[:, None], head.bias / norm)

    def usual_temperature(self, classes: int) -> float:
        # Scores between 0 and 1 are no log-shares. Sites of 850 images measured .25 and .25 with 2 classes, .10 and .12
        # with 10, .036 with 100 (EfficientNet-Lite0; docs/quality.md).
        return 1.0 if self.settings.normalise else float(f"{0.35 / math.sqrt(classes):.4g}")


def cross_validated(one: Centred) -> list[float]:
    """The generalised cross-validation score of every second lambda of the grid and of the neighbours of the best;
    infinite where it was not asked for or says nothing."""
    scores = [math.inf] * len(GRID)
    for place in range(0, len(GRID), 2):
        scores[place] = _score(one, GRID[place])
    best = scores.index(min(scores))
    for place in {max(0, best - 1), min(len(GRID) - 1, best + 1)}:
        scores[place] = _score(one, GRID[place])
    return scores


def _score(one: Centred, lam: float) -> float:
    """With A = gram + lambda I: df = tr(A^-1 gram) + 1 = D - lambda tr(A^-1) + 1, and the residual sum of squares is
    that of the targets less tr(W cross) + lambda ||W||^2. Where features outnumber images a small lambda explains all,
    and both differences drown in rounding: less than a thousandth of the targets counts as that, and a lambda near
    what rounding does to eigenvalues says nothing. Cholesky factors: an eigenvalue problem takes ten times as long."""
    factor, shift = one.factor(lam), lam * one.unit
    if factor is None or (one.images < 2 * len(factor) and shift < 32 * one.rounding):
        return math.inf
    weight = torch.cholesky_solve(one.cross, factor).T
    rss = one.targets - float((weight.T * one.cross).sum()) - shift * float(weight.square().sum())
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse = float(torch.linalg.solve_triangular(factor, identity, upper=False).square().sum())
    free = 1 - (len(factor) - shift * inverse + 1) / one.images
    return max(rss, LEAST * one.targets) / one.images / free**2 if free > 0 else math.inf


def left_out(sums: Contributions, even: bool) -> list[float]:
    """The squared error of each lambda of the grid, summed over parcels, each by the head that was solved without
    it."""
    if sums.sent.noise is not None:
        raise BadInput("choose=sites needs sums without noise; use --set fusion.choose=gcv, or give fusion.lam")
    if len(sums) < 2:
        raise BadInput("choose=sites leaves out one parcel at a time, and there is one; use --set fusion.choose=gcv")
    scores = [0.0] * len(GRID)
    for own in sums:
        rest = Centred.of(sums.total - own, even)
        for place, lam in enumerate(GRID):
            try:
                scores[place] += squared_error(rest.solved(lam), own)
            except BadInput:  # too small a lambda for what is left
                scores[place] = math.inf
    return scores


def squared_error(head: Linear, sums: Sums) -> float:
    """The sum of ||W x + b - e_y||^2 over the images that sums stand for."""
    weight, bias, n = head.weight, head.bias, sums.images
    s, counts = sums.first.sum(0), sums.counts.double()
    squares = ((weight @ sums.second) * weight).sum() + 2 * bias @ (weight @ s) + n * bias.square().sum()
    return float(squares - 2 * (weight * sums.first).sum() - 2 * bias @ counts + n)


def _section(lam: float, tried: Sequence[float], how: str, total: Sums) -> dict[str, object]:
    text = f"Lambda {lam:.3g} of the mean eigenvalue; {total.images:,} images, {total.width:,} features."
    pairs = zip(GRID, tried, strict=True) if tried else ()
    rows = [[f"{one:.3g}", f"{score:.6g}"] for one, score in pairs if math.isfinite(score)]
    table = {"table": {"columns": ["lambda", f"score by {how}"], "rows": rows}} if rows else {}
    return {"title": "Ridge from sums", "text": text, **table}
