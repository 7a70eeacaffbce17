"""What every worker imports, imported once by the fork server. No tensor is made here: torch's threads start with its
first large sum."""

from __future__ import annotations

import torch._dynamo  # an optimiser imports it when the first one is made: a second in every worker
import torch._refs  # so do networks, which are built on the meta device

import flyby.engines.processes

__all__ = ["flyby", "torch"]
