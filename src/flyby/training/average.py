"""A moving mean of the weights, and of BatchNorm's moments with them: e_t = d_t e_{t-1} + (1 - d_t) w_t after step t,
with d_t = min(decay, (1 + t) / (10 + t)), so that the first steps, which are of little worth, are soon forgotten.

The mean is what a site is judged by and what it sends; the training goes on with the weights themselves. All of it
happens on the device, so that a recorded step does it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average(nn.Module):
    """The mean of all floating numbers of a network's state, beside it. Its buffers are its memory."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        entries = [t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()]
        self.live = [t.detach() for t in entries]  # the network's own memory: what a step writes is seen here
        device = self.live[0].device
        self.register_buffer("steps", torch.zeros((), device=device))
        for place, tensor in enumerate(self.live):
            self.register_buffer(f"mean{place}", tensor.clone(memory_format=torch.preserve_format))

    steps: Tensor

    @property
    def means(self) -> list[Tensor]:
        return [self.get_buffer(f"mean{place}") for place in range(len(self.live))]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after one more step in."""
        self.steps.add_(1)
        taken = 1 - ((1 + self.steps) / (10 + self.steps)).clamp(max=self.decay)
        means = self.means
        away = torch._foreach_sub(self.live, means)
        torch._foreach_mul_(away, taken)
        torch._foreach_add_(means, away)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the network has the mean of its weights; after it, its weights again, in the same memory."""
        kept = [t.clone() for t in self.live]
        torch._foreach_copy_(self.live, self.means)
        try:
            yield
        finally:
            torch._foreach_copy_(self.live, kept)
