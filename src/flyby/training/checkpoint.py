"""A checkpoint: named tensors and one JSON value in a single safetensors file. No pickle, written whole or not at
all."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from flyby.errors import BadInput
from flyby.files import write_bytes

SECONDS, SHARE = 5.0, 50.0


class Cadence:
    """When to write a checkpoint: after ``SECONDS``, and after ``SHARE`` times what the last one cost."""

    def __init__(self) -> None:
        self.written, self.patience = time.perf_counter(), SECONDS

    def keep(self, save: Callable[[], None]) -> None:
        """Call ``save`` if it is time."""
        if (now := time.perf_counter()) - self.written > self.patience:
            save()
            self.written = time.perf_counter()
            self.patience = max(SECONDS, SHARE * (self.written - now))


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
    return {
        f"{i}.{key}": torch.as_tensor(value)
        for i, entry in state.items()
        for key, value in entry.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        parameter = parameters[int(index)]
        if value.shape == parameter.shape:
            # Fused kernels walk both memories in step: the state needs its parameter's (channels-last) strides, which a
            # file has not.
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class TrainingState:
    """Where a site's training stands: epoch, history, the state after the last good epoch, the best weights so far.

    Used as a context manager around the loop: whatever ends it early, that state is on disk. ``identity`` names the
    settings and the data, so that a checkpoint of another training is refused instead of mixed in.
    """

    def __init__(
        self,
        path: Path | None,
        identity: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: nn.Module,
        average: nn.Module | None = None,
    ) -> None:
        self.path, self.identity, self.optimizer = path, identity, optimizer
        self.model, self.objective, self.average = model, objective, average
        self.epoch, self.stopped, self.best_epoch, self.best_loss = 0, False, 0, math.inf
        self.rows: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] = {}
        self.good: dict[str, Tensor] = {}
        self.spare: dict[str, Tensor] = {}  # the memory of the state before, to be written over

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.save()

    def advance(self, row: dict[str, Any], patience: int | None) -> None:
        """Take a good epoch in. The tensors are copied first: an interrupt in between then leaves the epoch before
        it."""
        good = self._copied()
        if patience is not None and row["val_loss"] < self.best_loss:
            best = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
            self.best, self.best_loss, self.best_epoch = best, row["val_loss"], int(row["epoch"])
        self.spare, self.good, self.epoch, self.rows = self.good, good, int(row["epoch"]), [*self.rows, row]
        self.stopped = patience is not None and self.epoch - self.best_epoch >= patience

    def use_best(self) -> None:
        if self.best:
            self.model.load_state_dict(self.best)

    def _tensors(self) -> dict[str, Tensor]:
        groups = {
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer),
            "average": self.average.state_dict() if self.average is not None else {},
        }
        return {f"{group}/{name}": t.detach() for group, entries in groups.items() for name, t in entries.items()}

    def _copied(self) -> dict[str, Tensor]:
        now = self._tensors()
        if {name: t.shape for name, t in self.spare.items()} != {name: t.shape for name, t in now.items()}:
            return {name: t.clone() for name, t in now.items()}
        torch._foreach_copy_(
            [self.spare[name] for name in now], list(now.values())
        )  # one launch where clones take hundreds
        return self.spare

    def save(self) -> None:
        """Write the state after the last whole epoch, which is a good one: a diverged epoch never gets here."""
        if self.path is None or not self.good:
            return
        tensors = self.good | {f"best/{name}": t for name, t in self.best.items()}
        state = {
            "identity": self.identity,
            "epoch": self.epoch,
            "rows": self.rows,
            "stopped": self.stopped,
            "best_epoch": self.best_epoch,
        }
        save_checkpoint(self.path, tensors, state | ({"best_loss": self.best_loss} if self.best else {}))

    def restore(self) -> None:
        if self.path is None or not self.path.exists():
            return
        tensors, state = load_checkpoint(self.path)
        if state.get("identity") != self.identity:
            raise BadInput(
                f"{self.path} is the checkpoint of a training with other settings or images; delete it, or use another"
                " folder"
            )
        device = next(self.model.parameters()).device
        groups: dict[str, dict[str, Tensor]] = {
            name: {} for name in ("model", "objective", "optimizer", "average", "best")
        }
        for name, t in tensors.items():
            group, _, rest = name.partition("/")
            groups[group][rest] = t.to(device)
        self.model.load_state_dict(groups["model"])
        self.objective.load_state_dict(groups["objective"])
        if self.average is not None:
            self.average.load_state_dict(groups["average"])
        restore_optimizer(self.optimizer, groups["optimizer"])
        self.best, self.good = groups["best"], self._copied()
        self.epoch, self.rows, self.stopped, self.best_epoch = (
            state["epoch"],
            state["rows"],
            state["stopped"],
            state["best_epoch"],
        )
        self.best_loss = state.get("best_loss", math.inf)
