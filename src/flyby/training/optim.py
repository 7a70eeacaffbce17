"""The optimiser of a training, and its learning rate from epoch to epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from flyby.models.optimisers import SGD, Adam, AdamW
from flyby.objectives.base import Objective
from flyby.training import graphs
from flyby.training.muon import Muon
from flyby.training.settings import TrainSettings


def make_optimizer(model: nn.Module, objective: Objective, settings: TrainSettings) -> torch.optim.Optimizer:
    """Weight decay acts on matrices and filters only: biases, BatchNorm, prototypes' scales and an objective's own
    parameters are spared."""
    muon = settings.optimizer == "muon"
    matrices = {p for name, p in model.named_parameters() if muon and p.ndim >= 2 and not name.startswith("head.")}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and p not in matrices]
    spared = [p for p in trained if p.ndim < 2]
    shares = ((decayed, settings.weight_decay), (spared, 0.0))
    groups: list[dict[str, Any]] = [{"params": params, "weight_decay": decay} for params, decay in shares if params]
    if turned := [p for p in trained if p in matrices]:
        groups.append({"params": turned, "weight_decay": settings.weight_decay, "muon": True, "base": settings.muon_lr})
    if own := list(objective.parameters()):
        groups.append({"params": own, "weight_decay": 0.0, "fixed_lr": objective.parameter_lr})
    device = next(model.parameters()).device
    if device.type == "cuda":  # a graph reads the learning rate from the device, where every epoch writes its own
        for group in groups:
            group["lr"] = torch.tensor(settings.lr, device=device)
    if muon:
        return Muon(groups, settings.lr, settings.momentum)
    if settings.optimizer == "sgd":
        return SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=True)
    kind = Adam if settings.optimizer == "adam" else AdamW
    return kind(groups, lr=settings.lr, fused=True, capturable=device.type == "cuda")


def set_learning_rate(
    optimizer: torch.optim.Optimizer, settings: TrainSettings, epoch: int, batch: int | None = None
) -> float:
    """The learning rate of the epoch that follows ``epoch`` finished ones, in steps of ``batch`` images."""
    done = epoch / settings.epochs
    factor = 1.0
    if settings.schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * done))
    elif settings.schedule == "step":
        factor = settings.gamma ** sum(done >= m for m in settings.milestones)
    if settings.warmup:
        factor *= min(1.0, (epoch + 1) / (settings.warmup * settings.epochs))
    if settings.lr_batch is not None and batch is not None:
        factor *= batch / settings.lr_batch
    for group in optimizer.param_groups:
        graphs.set_learning_rate(group, group.get("fixed_lr") or group.get("base", settings.lr) * factor)
    return settings.lr * factor
