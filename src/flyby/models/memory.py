"""Memory: for a network that so far has names and shapes only, and for numbers that never change."""

from __future__ import annotations

import functools
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def allocate(module: M, device: torch.device | str) -> M:
    """A module of the meta device, moved to one with memory; its numbers are whatever lies there.

    What ``nn.Module.to_empty`` does, without its price: ``torch.empty_like`` of a meta tensor imports sympy and torch's
    symbolic shapes, a second of every process that builds a network.
    """

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    module._apply(empty)  # type: ignore[no-untyped-call]
    return module


@functools.lru_cache(maxsize=64)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers kept on the device: copying them there for every batch would stall it."""
    return torch.tensor(values, dtype=torch.float32, device=device)
