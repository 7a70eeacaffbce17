"""The distance that distillation makes smaller, for server rules and for nodes alike."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def softened_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(softmax(teacher/T) || softmax(student/T)) of each sample, over the last dimension, without the factor T^2."""
    log_s, log_t = F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1)
    return F.kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1)
