"""Any module in Python as a backbone: known by its tensors and by how it prints itself, in this process only."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flyby.errors import BadInput
from flyby.models.backbones import Backbone, Named, is_name, lend, tensors_digest
from flyby.settings import build


def given(
    module: nn.Module,
    name: str,
    size: int | tuple[int, int],
    dim: int | None = None,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.25, 0.25, 0.25),
) -> Named:
    """The backbone that a module is; a copy of it, as it is now, is kept until this process ends."""
    if not is_name(full := f"own:{name}"):
        raise BadInput(f"a backbone cannot be called {name!r}; give it a short name of letters, digits, . _ / and -")
    kept = copy.deepcopy(module).cpu().eval().requires_grad_(False)
    tall, wide = (size, size) if isinstance(size, int) else size
    found = _features(kept, full, torch.zeros(2, len(mean), tall, wide))
    if dim not in (None, found):
        raise BadInput(f"the module for {full} gives {found} features and not {dim}; leave dim out")
    # Modules that hold the same numbers may do different things with them.
    sha256 = hashlib.sha256(f"{tensors_digest(kept.state_dict())}\n{kept!r}".encode()).hexdigest()
    words = {"sha256": sha256, "dim": found, "size": (tall, wide), "channels": len(mean)}
    words |= {"mean": tuple(map(float, mean)), "std": tuple(map(float, std))}
    named = Named(full, build(Backbone, words, "backbone"))
    lend(kept, named)
    return named


@torch.no_grad()
def _features(module: nn.Module, name: str, images: Tensor) -> int:
    try:
        said = module(images)
    except Exception as error:  # whatever a module does with images that it is not made for
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"the module for {name} cannot take images of {list(images.shape[1:])} ({reason}); give the size that it"
            " takes, and one mean for each channel"
        ) from error
    if not isinstance(said, Tensor) or said.ndim != 2 or len(said) != len(images):
        shape = list(said.shape) if isinstance(said, Tensor) else type(said).__name__
        raise BadInput(f"the module for {name} gives {shape} for 2 images; a backbone gives [2, features]")
    return said.shape[1]
