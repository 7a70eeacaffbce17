"""Engine ``ray``: sites, server rules and study cells as tasks of a Ray cluster, on one machine or many.

The cluster is the one that ``RAY_ADDRESS`` names, else a local one for the time of the work. A task gets the images from the object store, where
they are placed once, and everything else with its call; it works in a scratch folder of its own machine, and all files it leaves there come back
to the driver, which alone writes the run folder: machines need not share a disk. A task whose worker dies is given to another one.

Ray pickles whatever moves inside a cluster, so a cluster is one trust domain: whoever can reach it can run code on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from flyby import parcel
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import site_of
from flyby.data.splits import Split
from flyby.engines.jobs import DataSettings, Job, bundle_of, perform, samples_of, split_at
from flyby.errors import BadInput, FlybyError
from flyby.files import write_bytes
from flyby.fusion import Fusion, Inbox, Predictor, load_predictor, save_predictor
from flyby.settings import build
from flyby.training import Row

Item = TypeVar("Item")
Result = TypeVar("Result")
Files = dict[str, bytes]
Answer = tuple[FlybyError | KeyboardInterrupt | None, Any]  # what went wrong, if anything, and what the task has to give

POLL = 0.2  # seconds between two looks at the tasks
GRACE = 5.0  # seconds that interrupted sites have to hand over their checkpoints
PENDING = 1000  # most tasks handed to Ray at once
LOCK = ".lock"  # in a folder of uploads, held by the process that has them trained


class RaySettings(BaseModel):
    """What a task takes of a machine, from ``FLYBY_RAY_CPUS``, ``_GPUS``, ``_RETRIES`` and ``_CELLS`` in the environment of the driver."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: float = Field(1.0, gt=0, description="share of the cores that one task takes")
    gpus: float | None = Field(
        None, ge=0, description="share of a GPU; above 0 tasks train on cuda. By default 1 with --device cuda, else 0"
    )
    retries: int = Field(3, ge=0, description="how often a task may lose its worker and is given to another one")
    cells: int | None = Field(None, ge=1, description="study cells at once; by default as many as the driver's machine has cores")

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


# -- the connection ---------------------------------------------------------------------------------------------------------------------

_held = 0
_ours = False
_quiet = False  # in the task of a study cell nobody watches the epochs
_placed: dict[tuple[str, bool], Any] = {}


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside this block one connection serves all work, and the images stay placed; it begins with the first task. What was started is ended."""
    global _held, _ours
    _held += 1
    try:
        yield
    finally:
        _held -= 1
        if not _held:
            _placed.clear()
            if _ours:
                import ray

                _ours = False
                ray.shutdown()


def _connected() -> Any:
    """The module ``ray``, connected: to whatever this process already is, to ``RAY_ADDRESS``, or to a quiet local cluster."""
    global _ours
    import logging

    import ray

    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise BadInput(
            f"RAY_ADDRESS is {address}, a Ray Client address; run flyby on a machine of the cluster, with RAY_ADDRESS=auto or HOST:PORT"
        )
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "a local Ray cluster does not start" if address == "local" else f"no Ray cluster answers at RAY_ADDRESS={address}"
        raise BadInput(f"{where} ({str(error).strip().splitlines()[0]}); see docs/ray.md, or use --engine processes") from None
    _ours = True
    return ray


def _check_room(ray: Any, share: dict[str, float]) -> None:
    """A share that no machine has would wait for ever; say so instead."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(m.get("CPU", 0) >= share["num_cpus"] and m.get("GPU", 0) >= share["num_gpus"] for m in machines):
        raise BadInput(
            f"no machine of the Ray cluster has {share['num_cpus']:g} CPUs and {share['num_gpus']:g} GPUs for one task; "
            "lower FLYBY_RAY_CPUS or FLYBY_RAY_GPUS"
        )


def _place(ray: Any, bundle: DataBundle) -> Any:
    """A reference to the training images in the object store: put there once, sent once to each machine, read in place by all its tasks."""
    key = (bundle.train.digest, bundle.mirror)
    if key not in _placed:
        _placed[key] = ray.put(replace(bundle, train=_plain(bundle.train), test=None, validation=None, broken=()))
    return _placed[key]


def _plain(data: Dataset) -> Dataset:
    """Without memory maps, which Ray would copy for every reader, and without the groups, which only a split needs."""
    return replace(data, images=np.asarray(data.images), labels=np.asarray(data.labels), groups=None)


# -- the driver's side ------------------------------------------------------------------------------------------------------------------


def run_ray(jobs: Sequence[Job], on_epoch: Callable[[Row], None]) -> None:
    """Every site a task; its parcel and rows come back as bytes and are written here. Same bytes as ``inline`` on a CPU."""
    if not jobs:
        return
    settings = RaySettings.read()
    with kept(), _filling({job.folder for job in jobs}):
        jobs = sorted((job for job in jobs if not job.done()), key=samples_of, reverse=True)  # another cell may have trained them meanwhile
        if not jobs:
            return
        ray = _connected()
        device, token = settings.device(jobs[0].device), _token()
        share = settings.share(device)
        _check_room(ray, share)
        train = ray.remote(_in_scratch).options(max_retries=0, **share)
        events, pass_on = _events(ray, on_epoch)

        def submit(job: Job) -> Any:
            split = split_at(job.split)
            mine = replace(split, shares={job.site: split.shares[job.site]}, counts={})
            before = {p.name: p.read_bytes() for p in [job.checkpoint_path] if p.exists()}
            sent = job.model_copy(update={"device": device}).model_dump_json()
            return train.remote(f"{token}-{job.site}", before, _train, sent, _place(ray, bundle_of(job.data)), mine, events)

        def deliver(job: Job, answer: Answer) -> None:
            error, (files, _) = answer
            for name in sorted(files, key=lambda name: (name == job.parcel_path.name, name)):  # the parcel last: it says that all is there
                write_bytes(job.folder / name, files[name])
            if error is None:
                job.checkpoint_path.unlink(missing_ok=True)

        finished = _finished(ray, jobs, lambda job: job.site, submit, settings.retries, watch=pass_on, rescue=deliver)
        with contextlib.closing(finished):
            for job, answer in finished:
                deliver(job, answer)
                if answer[0] is not None:
                    raise answer[0]


def fuse_ray(
    fusion: Fusion,
    inbox: Inbox,
    *,
    proxy: Dataset | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    work: Path | None = None,
) -> Predictor:
    """The server rule as a task. Parcels go there as the bytes they are, the predictor comes back as its deployable folder."""
    settings = RaySettings.read()
    where, token = settings.device(str(device)), _token()
    share = settings.share(where)
    with kept(), tempfile.TemporaryDirectory() as place:
        ray = _connected()
        _check_room(ray, share)
        fuse = ray.remote(_in_scratch).options(max_retries=0, **share)
        parcels = [ray.put(parcel.to_bytes(item)) for item in inbox]
        images = None if proxy is None else ray.put(_plain(proxy))
        before = {f"server/{p.name}": p.read_bytes() for p in sorted(work.glob("*.ckpt"))} if work else {}

        def submit(name: str) -> Any:
            return fuse.remote(f"{token}-server", before, _fuse, fusion, parcels, images, seed, where, torch.get_num_threads())

        def deliver(_: str, answer: Answer) -> list[dict[str, Any]]:
            error, (files, sections) = answer
            for name, data in files.items():
                home, _, rest = name.partition("/")
                if home == "server" and work:
                    write_bytes(work / rest, data)
                elif error is None:
                    write_bytes(Path(place) / name, data)
            return sections or []

        finished = _finished(ray, [f"the server rule {fusion.name}"], str, submit, settings.retries, rescue=deliver)
        with contextlib.closing(finished):
            for rule, answer in finished:
                fusion.sections = deliver(rule, answer)
                if answer[0] is not None:
                    raise answer[0]
        return load_predictor(Path(place) / "predictor")


def each_ray(
    function: Callable[[Item], Result], items: Iterable[Item], data: Callable[[Item], DataSettings]
) -> Iterator[tuple[Item, Result]]:
    """``function(item)`` for every item, each in a process of the driver's machine, with its results as they end. What the function does with
    this engine becomes tasks anywhere in the cluster; images are placed here, once, for all of them."""
    settings = RaySettings.read()
    with kept():
        ray = _connected()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # No CPU of its own: it mostly waits for its tasks, and must never keep them from running.
        work = ray.remote(_do).options(max_retries=0, num_cpus=0, scheduling_strategy=here)
        environment = {name: value for name, value in os.environ.items() if name.startswith("FLYBY_")}

        def submit(item: Item) -> Any:
            _place(ray, bundle_of(data(item)))
            return work.remote(os.getcwd(), environment, torch.get_num_threads(), dict(_placed), function, item)

        most = settings.cells or os.cpu_count() or 1
        finished = _finished(ray, items, str, submit, settings.retries, most=most)
        with contextlib.closing(finished):
            for item, (error, result) in finished:
                if error is not None:
                    raise error
                yield item, result


def _finished(
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
    """Submits items, ``most`` at a time, and gives each with its answer as it ends. One whose worker or machine died is submitted again. Whatever
    ends this early, the running tasks are cancelled, and ``rescue`` gets what they still have to say."""
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
                            f"{name(item)} lost its worker {deaths[name(item)]} times (killed, or out of memory: {type(error).__name__}); "
                            "the same command goes on from here (a run with --resume); FLYBY_RAY_RETRIES allows more"
                        ) from None
                    again.append(item)
                    continue
                yield item, answer
    finally:
        for ref in running:
            ray.cancel(ref)
        for ref in ray.wait(list(running), num_returns=len(running), timeout=GRACE)[0] if running else []:
            with contextlib.suppress(RayError):
                rescue(running[ref], ray.get(ref))


def _events(ray: Any, on_epoch: Callable[[Row], None]) -> tuple[Any, Callable[[], None]]:
    """A queue that tasks tell their epochs to, and what passes them on to the driver's progress; a site that begins again is not counted twice."""
    if _quiet:
        return None, lambda: None
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    seen: set[tuple[str, int]] = set()

    def pass_on() -> None:
        for row in queue.get_nowait_batch(queue.qsize()):
            if (mark := (row["site"], row["epoch"])) not in seen:
                seen.add(mark)
                on_epoch(row)

    return queue.actor, pass_on


@contextlib.contextmanager
def _filling(folders: set[Path]) -> Iterator[None]:
    """One trainer a folder of uploads: of two cells that want the same ones the second waits, and finds them there."""
    with contextlib.ExitStack() as stack:
        for folder in sorted(folders):
            folder.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(open(folder / LOCK, "w"))
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(POLL)  # not a blocking lock, so that a cancelled cell ends
        yield


def _token() -> str:
    return f"flyby-ray-{secrets.token_hex(8)}"


# -- the worker's side ------------------------------------------------------------------------------------------------------------------


def _in_scratch(name: str, before: Files, work: Callable[..., Any], *arguments: Any) -> Answer:
    """Do ``work(folder, ...)`` in a scratch folder of this machine that holds the files ``before``; answers with all files that it leaves.
    The folder of a worker that died here is still there, checkpoint and all, and the work goes on from it."""
    folder = Path(tempfile.gettempdir()) / name
    for path, data in before.items() if not folder.exists() else ():
        write_bytes(folder / path, data)
    folder.mkdir(exist_ok=True)
    error, result = None, None
    try:
        result = work(folder, *arguments)
    except (
        FlybyError,
        KeyboardInterrupt,
    ) as raised:  # the same error as in the driver's own process; an interrupted task hands over its checkpoint
        error = raised
    try:
        return error, ({str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}, result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(folder: Path, raw: str, bundle: DataBundle, split: Split, events: Any) -> None:
    job = Job.model_validate_json(raw).model_copy(update={"folder": folder})
    _ready(job.device)
    tell = None if events is None else events.put_nowait.remote
    perform(job, tell, site_of(bundle, split, job.site))


def _fuse(
    folder: Path, fusion: Fusion, parcels: list[Any], proxy: Dataset | None, seed: int, device: str, threads: int
) -> list[dict[str, Any]]:
    import ray

    _ready(device, threads)
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / f"{number}.parcel" for number in range(len(parcels))]
        for path, reference in zip(paths, parcels, strict=True):
            path.write_bytes(ray.get(reference))
        predictor = fusion.fuse(Inbox(paths), proxy=proxy, seed=seed, device=device, work=folder / "server")
    save_predictor(predictor, folder / "predictor", export=False)
    return fusion.sections


def _do(
    cwd: str, environment: dict[str, str], threads: int, placed: dict[tuple[str, bool], Any], function: Callable[[Any], Any], item: Any
) -> Answer:
    global _quiet
    _quiet = True
    os.chdir(cwd)
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        with kept():
            _placed.update(placed)
            return None, function(item)
    except FlybyError as error:
        return error, None


def _ready(device: str, threads: int = 1) -> None:
    """A site trains on one thread and a rule fuses on as many as the driver would: sums are then taken in the order of engine ``inline``."""
    torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"{os.uname().nodename} has no CUDA device for a task; set FLYBY_RAY_GPUS=0, or use --device cpu")
