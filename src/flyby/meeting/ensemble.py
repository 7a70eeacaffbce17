"""The weighted ensemble, FOL's eqs. 10 and 11: A_w(x) = sum_i w_i f_i(x), w = argmin of the cross-entropy of A_w on the
node's own data.

The members' logits are computed once and kept; fitting K numbers to them costs nothing more.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def fit_weights(
    logits: Tensor, labels: Tensor, form: Literal["simplex", "unconstrained"] = "simplex", steps: int = 200
) -> Tensor:
    """w ``[K]`` from cached logits ``[K, N, C]``: a softmax of free numbers (they stay positive and sum to one), or the
    numbers themselves."""
    logits, labels = logits.detach().double().cpu(), labels.cpu()
    models = len(logits)
    free = (
        torch.zeros(models, dtype=torch.float64)
        if form == "simplex"
        else torch.full((models,), 1 / models, dtype=torch.float64)
    )
    free.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [free], max_iter=steps, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(combine(logits, _weights(free, form)), labels)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    found = _weights(free.detach(), form)
    return found if bool(torch.isfinite(found).all()) else torch.full((models,), 1 / models, dtype=torch.float64)


def _weights(free: Tensor, form: str) -> Tensor:
    return free.softmax(0) if form == "simplex" else free


def combine(logits: Tensor, weights: Tensor) -> Tensor:
    """Eq. 10 on cached logits: ``[K, N, C]`` and ``[K]`` to ``[N, C]``."""
    return torch.einsum("k,knc->nc", weights.to(logits), logits)
