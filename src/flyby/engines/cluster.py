"""The tie to a Ray cluster: what a task may take, one connection for all work, images placed once, tasks seen through
to their end."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from flyby.data.dataset import DataBundle, Dataset
from flyby.errors import BadInput, FlybyError
from flyby.settings import build

Item = TypeVar("Item")
Answer = tuple[
    FlybyError | KeyboardInterrupt | None, Any
]  # what went wrong, if anything, and what the task has to give

POLL = 0.2  # seconds between two looks at the tasks
GRACE = 5.0  # seconds that interrupted tasks have to hand over their checkpoints
PENDING = 1000  # most tasks handed to Ray at once


class RaySettings(BaseModel):
    """What a task takes of a machine, from ``FLYBY_RAY_CPUS``, ``_GPUS``, ``_RETRIES`` and ``_CELLS`` in the
    environment of the driver."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: float = Field(1.0, gt=0, description="share of the cores that one task takes")
    gpus: float | None = Field(
        None, ge=0, description="share of a GPU; above 0 tasks train on cuda. By default 1 with --device cuda, else 0"
    )
    retries: int = Field(3, ge=0, description="how often a task may lose its worker and is given to another one")
    cells: int | None = Field(
        None, ge=1, description="study cells at once; by default as many as the driver's machine has cores"
    )

    @field_validator("gpus")
    @classmethod
    def _whole(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError("a task takes a part of one GPU, or whole ones")
        return gpus

    @classmethod
    def read(cls) -> RaySettings:
        names = {name: f"FLYBY_RAY_{name.upper()}" for name in cls.model_fields}
        return build(cls, {name: os.environ[key] for name, key in names.items() if os.environ.get(key)}, "FLYBY_RAY")

    def device(self, wanted: str) -> str:
        """Where tasks compute: the GPU share decides, so that a driver without a GPU can use those of the cluster."""
        return "cuda" if (wanted.startswith("cuda") if self.gpus is None else self.gpus > 0) else "cpu"

    def share(self, device: str) -> dict[str, float]:
        gpus = self.gpus if self.gpus is not None else float(device == "cuda")
        return {"num_cpus": self.cpus, "num_gpus": gpus}


# -- the connection

_held = 0
_ours = False
placed: dict[tuple[str, bool], Any] = {}


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside this block one connection serves all work, and the images stay placed; it begins with the first task. What
    was started is ended."""
    global _held, _ours
    _held += 1
    try:
        yield
    finally:
        _held -= 1
        if not _held:
            placed.clear()
            if _ours:
                import ray

                _ours = False
                ray.shutdown()


def connected() -> Any:
    """The module ``ray``, connected: to whatever this process already is, to ``RAY_ADDRESS``, or to a quiet local
    cluster."""
    global _ours
    import logging

    import ray

    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise BadInput(
            f"RAY_ADDRESS is {address}, a Ray Client address; run flyby on a machine of the cluster, with"
            " RAY_ADDRESS=auto or HOST:PORT"
        )
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    try:
        _knock(address)
        ray.init(**options)
    except Exception as error:  # that a node was too slow to start is a bare Exception of Ray's
        where = (
            "a local Ray cluster does not start"
            if address == "local"
            else f"no Ray cluster answers at RAY_ADDRESS={address}"
        )
        raise BadInput(
            f"{where} ({(str(error).strip() or type(error).__name__).splitlines()[0]}); see docs/ray.md, or use"
            " --engine processes"
        ) from None
    _ours = True
    return ray


def _knock(address: str) -> None:
    """Ray itself would try for many minutes to reach a cluster that is not there."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def check_room(ray: Any, share: dict[str, float]) -> None:
    """A share that no machine has would wait for ever; say so instead."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(m.get("CPU", 0) >= share["num_cpus"] and m.get("GPU", 0) >= share["num_gpus"] for m in machines):
        raise BadInput(
            f"no machine of the Ray cluster has {share['num_cpus']:g} CPUs and {share['num_gpus']:g} GPUs for one task;"
            " lower FLYBY_RAY_CPUS or FLYBY_RAY_GPUS"
        )


def place(ray: Any, bundle: DataBundle) -> Any:
    """A reference to the training images in the object store: put there once, sent once to each machine, read in place
    by all its tasks."""
    key = (bundle.train.digest, bundle.mirror)
    if key not in placed:
        placed[key] = ray.put(replace(bundle, train=plain(bundle.train), test=None, validation=None, broken=()))
    return placed[key]


def plain(data: Dataset) -> Dataset:
    """Without memory maps, which Ray would copy for every reader, and without the groups, which only a split needs."""
    return replace(data, images=np.asarray(data.images), labels=np.asarray(data.labels), groups=None)


# -- tasks


def finished(
    ray: Any,
    items: Iterable[Item],
    name: Callable[[Item], str],
    submit: Callable[[Item], Any],
    retries: int,
    *,
    most: int = PENDING,
    watch: Callable[[], None] = lambda: None,
    rescue: Callable[[Item, Answer], Any] = lambda item, answer: None,
) -> Generator[tuple[Item, Answer], None, None]:
    """Submits items, ``most`` at a time, and gives each with its answer as it ends. One whose worker or machine died is
    submitted again. Whatever ends this early, the running tasks are cancelled; after Ctrl-C ``rescue`` gets what they
    still have to say."""
    from ray.exceptions import RayError, RayTaskError

    waiting, again = iter(items), deque[Item]()
    running, deaths = dict[Any, Item](), Counter[str]()
    try:
        while True:
            while len(running) < most and (fresh := again.popleft() if again else next(waiting, None)) is not None:
                running[submit(fresh)] = fresh
            if not running:
                return
            done, _ = ray.wait(list(running), timeout=POLL)
            watch()
            for ref in done:
                item = running.pop(ref)
                try:
                    answer = ray.get(ref)
                except RayTaskError:
                    raise
                except RayError as error:
                    deaths[name(item)] += 1
                    if deaths[name(item)] > retries:
                        raise FlybyError(
                            f"{name(item)} lost its worker {deaths[name(item)]} times (killed, or out of memory:"
                            f" {type(error).__name__}); the same command goes on from here (a run with --resume);"
                            " FLYBY_RAY_RETRIES allows more"
                        ) from None
                    again.append(item)
                    continue
                yield item, answer
    except KeyboardInterrupt:
        for ref in running:
            ray.cancel(ref)
        for ref in ray.wait(list(running), num_returns=len(running), timeout=GRACE)[0] if running else []:
            with contextlib.suppress(RayError):
                rescue(running.pop(ref), ray.get(ref))
        raise
    finally:
        # Whoever goes on after an error must not meet a worker that was interrupted in the midst of an import: those
        # are ended.
        for ref in running:
            ray.cancel(ref, force=True)
