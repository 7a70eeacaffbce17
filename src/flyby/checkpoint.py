"""A checkpoint: named tensors and one JSON value in a single safetensors file. No pickle, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flyby.errors import BadInput
from flyby.files import write_bytes


def save_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    flat = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    write_bytes(path, save(flat, metadata={"state": json.dumps(state)}))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state = json.loads((file.metadata() or {})["state"])
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BadInput(f"{path} is not a usable checkpoint ({error}); delete it to start this site again") from None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as flat names ``index.key``; learning rates are recomputed from the schedule, not saved."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": torch.as_tensor(value) for i, entry in state.items() for key, value in entry.items() if value is not None}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
