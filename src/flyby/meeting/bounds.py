"""FOL's two theorems as diagnostics beside what is measured; they decide nothing.

Theorem 1 bounds the gap between the student's and the teacher's risk. As printed: L C T / (a (1 - a)) (L_KD / 2 + 1/8),
with a the least softmax output. Its eigenvalue step fails for C = 3 and it is loose by 2; since x^T (diag p - p p^T) x
>= a ||x||^2 for x orthogonal to 1, and log p is concave along a segment of logits, the centred logit gap is at most (T
/ a) ||p_S - p_T||, which gives L (T / a) mean ||p_S - p_T||.

Theorem 2: E||theta^r - theta*||^2 contracts by 1 - 2 eta mu + eta^2 L_s^3 / mu each step. It says something only for
eta < 2 mu^2 / L_s^3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.meeting.distill import Distilled
from flyby.meeting.stack import Stack
from flyby.objectives.kd import softened_kl
from flyby.rng import generator

LIPSCHITZ = math.sqrt(2)  # of cross-entropy in the logits: its gradient is p - y


def theorem_1(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, penalty: float = 0.0
) -> dict[str, float]:
    """Both forms of the bound from logits ``[N, C]`` of student and teacher, beside the measured gap. ``penalty`` is
    eq. 12's second term."""
    student, teacher, labels = student.double().cpu(), teacher.double().cpu(), labels.cpu()
    p_s, p_t = (student / temperature).softmax(1), (teacher / temperature).softmax(1)
    least = float(torch.minimum(p_s.min(), p_t.min()).clamp_min(1e-300))
    kd = float(softened_kl(student, teacher, temperature).mean()) + penalty
    centred = (student - student.mean(1, keepdim=True)) - (teacher - teacher.mean(1, keepdim=True))
    gap = abs(float(F.cross_entropy(student, labels) - F.cross_entropy(teacher, labels)))
    return {
        "risk_gap": gap,
        "printed": LIPSCHITZ * student.shape[1] * temperature / (least * (1 - least)) * (kd / 2 + 1 / 8),
        "ours": LIPSCHITZ * temperature / least * float((p_s - p_t).norm(dim=1).mean()),
        "logit_gap": float(centred.norm(dim=1).mean()),
        "logit_bound": temperature / least * float((p_s - p_t).norm(dim=1).mean()),
        "least_probability": least,
        "kd_loss": kd,
    }


def theorem_2(rate: float, convexity: float, smoothness: float) -> dict[str, Any]:
    """The contraction factor for a learning rate eta, strong convexity mu and smoothness L_s, and the largest eta for
    which it is under one."""
    if convexity <= 0 or smoothness <= 0:
        return {"factor": None, "largest_rate": 0.0, "says_nothing": True}
    factor = 1 - 2 * rate * convexity + rate * rate * smoothness**3 / convexity
    return {"factor": factor, "largest_rate": 2 * convexity**2 / smoothness**3, "says_nothing": not factor < 1}


def smoothness(stack: Stack, problem: Distilled, images: Tensor, rounds: int = 8, samples: int = 64) -> float:
    """L_s near the student: the largest curvature of eq. 12 on some images, by power iteration on Hessian products."""
    rows = torch.arange(min(samples, len(images)), device=stack.device)
    leaves = list(stack.parameters.values())
    gradients = torch.autograd.grad(problem.objective(stack, images, rows), leaves, create_graph=True)
    rng = generator("power iteration", device=stack.device)
    direction = [torch.randn(t.shape, generator=rng, device=t.device) for t in leaves]
    value = 0.0
    for _ in range(rounds):
        size = math.sqrt(sum(float(d.square().sum()) for d in direction))
        if not (math.isfinite(size) and size > 0):
            break
        direction = [d / size for d in direction]
        along = torch.stack([(g * d).sum() for g, d in zip(gradients, direction, strict=True)]).sum()
        product = torch.autograd.grad(along, leaves, retain_graph=True, allow_unused=True)
        direction = [torch.zeros_like(t) if p is None else p.detach() for p, t in zip(product, leaves, strict=True)]
        value = math.sqrt(sum(float(d.square().sum()) for d in direction))
    return value
