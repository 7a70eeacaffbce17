"""The weighted ensemble, FOL's eqs. 10 and 11: A_w(x) = sum_i w_i f_i(x), w = argmin of the cross-entropy of A_w on the
node's own data.

The members' logits are computed once and kept; fitting K numbers to them costs nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.meeting.candidate import Candidate, by_spec
from flyby.meeting.settings import OrientSettings
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import stack_logits
from flyby.models.optimisers import LBFGS


def fit_weights(
    logits: Tensor,
    labels: Tensor,
    form: Literal["simplex", "unconstrained"] = "simplex",
    prior: float = 0.0,
    steps: int = 200,
) -> Tensor:
    """w ``[K]`` from cached logits ``[K, N, C]``: a softmax of free numbers (they stay positive and sum to one), or the
    numbers themselves.

    ``prior`` = s adds s KL(uniform || w) / N to the mean cross-entropy, s further images of which each member explains
    an equal share (a Dirichlet prior): few images of the node's own then cannot give all the weight to one member.
    """
    logits, labels = logits.detach().double().cpu(), labels.cpu()
    models = len(logits)
    free = (
        torch.zeros(models, dtype=torch.float64)
        if form == "simplex"
        else torch.full((models,), 1 / models, dtype=torch.float64)
    )
    free.requires_grad_()
    optimizer = LBFGS(
        [free], max_iter=steps, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(combine(logits, _weights(free, form)), labels)
        if form == "simplex" and prior > 0:
            value = value - prior / len(labels) * free.log_softmax(0).mean()
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


def ask(members: Mapping[Candidate, float], images: Tensor, settings: OrientSettings) -> Tensor:
    """A_w of some images ``[N, C]``: every member runs over them once, those of one architecture together."""
    answers = []
    for group in by_spec(members):
        stack = Stack.of(group[0].spec, [c.state for c in group], images.device, settings.backend)
        weights = torch.tensor([members[c] for c in group], dtype=torch.float64)
        answers.append(combine(stack_logits(stack, images, settings), weights))
    return torch.stack(answers).sum(0)
