"""torch's optimisers without torch's compiler, where nothing is compiled.

The first optimiser of a process imports ``torch._dynamo``, some 800 modules and two seconds, only to tell the compiler
to leave it alone. flyby compiles a network's backbone at most and never a step, so its optimisers leave the telling
out; every number stays the same.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import optimizer


def _bare(method: Any) -> Any:
    """What torch wrapped, to keep the compiler away or to time it; the method itself where it did not."""
    return inspect.unwrap(method)


class Untold(optimizer.Optimizer):
    """An optimiser that says nothing to the compiler when it is made, cleared, saved or read back."""

    add_param_group = _bare(optimizer.Optimizer.add_param_group)
    zero_grad = _bare(optimizer.Optimizer.zero_grad)
    state_dict = _bare(optimizer.Optimizer.state_dict)
    load_state_dict = _bare(optimizer.Optimizer.load_state_dict)


class SGD(Untold, torch.optim.SGD):
    """``torch.optim.SGD``."""

    step = torch.no_grad()(_bare(torch.optim.SGD.step))


class Adam(Untold, torch.optim.Adam):
    """``torch.optim.Adam``."""

    step = torch.no_grad()(_bare(torch.optim.Adam.step))


class AdamW(Untold, torch.optim.AdamW):
    """``torch.optim.AdamW``."""

    step = torch.no_grad()(_bare(torch.optim.AdamW.step))


class LBFGS(Untold, torch.optim.LBFGS):
    """``torch.optim.LBFGS``, whose step is free of the compiler already."""


def eagerly() -> AbstractContextManager[Any]:
    """A block in which a compiled backbone runs as it is written; nothing to do where none can have been compiled."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
