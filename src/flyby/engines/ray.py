"""Engine ``ray``: sites, server rules and study cells as tasks of a Ray cluster, on one machine or many.

The cluster is the one that ``RAY_ADDRESS`` names, else a local one for the time of the work. A task gets the images
from the object store, where they are placed once, and everything else with its call; it works in a scratch folder of
its own machine, and all files it leaves there come back to the driver, which alone writes the run folder: machines need
not share a disk. A task whose worker dies is given to another one.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from flyby.data.dataset import DataBundle, Dataset
from flyby.data.settings import DataSettings
from flyby.data.site import site_of
from flyby.data.splits import Split
from flyby.engines import cluster
from flyby.engines.cluster import POLL, Answer, RaySettings, kept
from flyby.engines.jobs import Job, bundle_of, perform, samples_of, split_at
from flyby.errors import BadInput, FlybyError
from flyby.files import open_lock, write_bytes
from flyby.fusion.base import Fusion, Server
from flyby.fusion.predictor import Predictor, load_predictor, save_predictor
from flyby.machine import keep_memory
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.training.loop import Row

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Files = dict[str, bytes]

SCRATCH = "flyby-ray-"  # scratch folders begin so; what is left of one after a DAY is taken away by the next task
DAY = 86_400.0
LOCK = ".lock"  # in a folder of uploads, held by the process that has them trained

_quiet = False  # in the task of a study cell nobody watches the epochs


# -- the driver's side


def run_ray(jobs: Sequence[Job], on_epoch: Callable[[Row], None]) -> None:
    """Every site a task; its parcel and rows come back as bytes and are written here. Same bytes as ``inline`` on a
    CPU."""
    if not jobs:
        return
    settings = RaySettings.read()
    with kept(), _filling({job.folder for job in jobs}):
        jobs = sorted(
            (job for job in jobs if not job.done()), key=samples_of, reverse=True
        )  # another cell may have trained them meanwhile
        if not jobs:
            return
        ray = cluster.connected()
        device, token = settings.device(jobs[0].device), _token()
        share = settings.share(device)
        cluster.check_room(ray, share)
        train = ray.remote(_in_scratch).options(max_retries=0, **share)
        events, pass_on = _events(ray, on_epoch)

        def submit(job: Job) -> Any:
            split = split_at(job.split)
            mine = replace(split, shares={job.site: split.shares[job.site]}, counts={})
            before = {p.name: p.read_bytes() for p in [job.checkpoint_path] if p.exists()}
            sent = job.model_copy(update={"device": device}).model_dump_json()
            return train.remote(
                f"{token}-{job.site}", before, _train, sent, cluster.place(ray, bundle_of(job.data)), mine, events
            )

        def deliver(job: Job, answer: Answer) -> None:
            error, (files, _) = answer
            for name in sorted(
                files, key=lambda name: (name == job.parcel_path.name, name)
            ):  # the parcel last: it says that all is there
                write_bytes(job.folder / name, files[name])
            if error is None:
                job.checkpoint_path.unlink(missing_ok=True)

        finished = cluster.finished(
            ray, jobs, lambda job: job.site, submit, settings.retries, watch=pass_on, rescue=deliver
        )
        with contextlib.closing(finished):
            for job, answer in finished:
                deliver(job, answer)
                if answer[0] is not None:
                    raise answer[0]


def fuse_ray(fusion: Fusion, inbox: Inbox, server: Server) -> Predictor:
    """The server rule as a task. Parcels go there as the bytes they are, the predictor comes back as its deployable
    folder."""
    settings = RaySettings.read()
    where, token = settings.device(str(server.device)), _token()
    share, work = settings.share(where), server.work
    with kept(), tempfile.TemporaryDirectory() as place:
        ray = cluster.connected()
        cluster.check_room(ray, share)
        fuse = ray.remote(_in_scratch).options(max_retries=0, **share)
        parcels = [ray.put(parcel.to_bytes(item)) for item in inbox]
        images = None if server.proxy is None else ray.put(cluster.plain(server.proxy))
        before = {f"work/{p.name}": p.read_bytes() for p in sorted(work.glob("*.ckpt"))} if work else {}

        def submit(name: str) -> Any:
            seed, threads = server.seed, torch.get_num_threads()
            return fuse.remote(f"{token}-server", before, _fuse, fusion, parcels, images, seed, where, threads)

        def deliver(_: str, answer: Answer) -> list[dict[str, Any]]:
            files, sections = answer[1]
            for name, data in files.items():
                if name.startswith("predictor/"):
                    write_bytes(Path(place) / name, data)
                elif work:  # its checkpoints, for the same call to go on from
                    write_bytes(work / name.removeprefix("work/"), data)
            return sections or []

        finished = cluster.finished(
            ray, [f"the server rule {fusion.name}"], str, submit, settings.retries, rescue=deliver
        )
        with contextlib.closing(finished):
            for rule, answer in finished:
                server.report[:] = deliver(rule, answer)
                if answer[0] is not None:
                    raise answer[0]
        return load_predictor(Path(place) / "predictor", limits=None)


def each_ray(
    function: Callable[[Item], Outcome], items: Iterable[Item], data: Callable[[Item], DataSettings]
) -> Iterator[tuple[Item, Outcome]]:
    """``function(item)`` for every item, each in a process of the driver's machine, with its results as they end. What
    the function does with this engine becomes tasks anywhere in the cluster; images are placed here, once, for all of
    them."""
    settings = RaySettings.read()
    with kept():
        ray = cluster.connected()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # No CPU of its own: it mostly waits for its tasks, and must never keep them from running.
        work = ray.remote(_do).options(max_retries=0, num_cpus=0, scheduling_strategy=here)
        environment = {name: value for name, value in os.environ.items() if name.startswith("FLYBY_")}

        def submit(item: Item) -> Any:
            cluster.place(ray, bundle_of(data(item)))
            return work.remote(os.getcwd(), environment, torch.get_num_threads(), dict(cluster.placed), function, item)

        most = settings.cells or os.cpu_count() or 1
        finished = cluster.finished(ray, items, str, submit, settings.retries, most=most)
        with contextlib.closing(finished):
            for item, (error, result) in finished:
                if error is not None:
                    raise error
                yield item, result


def _events(ray: Any, on_epoch: Callable[[Row], None]) -> tuple[Any, Callable[[], None]]:
    """A queue that tasks tell their epochs to, and what passes them on to the driver's progress; a site that begins
    again is not counted twice."""
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
            while (handle := _lock(folder / LOCK)) is None:
                time.sleep(POLL)  # not a blocking lock, so that a cancelled cell ends
            stack.enter_context(handle)
            stack.callback((folder / LOCK).unlink, missing_ok=True)
        yield


def _lock(path: Path) -> IO[bytes] | None:
    handle = open_lock(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle.fileno()), path.stat()):
            return handle
    except (BlockingIOError, FileNotFoundError):  # somebody holds it, or was just taking it away
        pass
    handle.close()
    return None


def _token() -> str:
    return f"{SCRATCH}{secrets.token_hex(8)}"


# -- the worker's side


def _in_scratch(name: str, before: Files, work: Callable[..., Any], *arguments: Any) -> Answer:
    """Do ``work(folder, ...)`` in a scratch folder of this machine that holds the files ``before``; answers with all
    files that it leaves. The folder of a worker that died here is still there, checkpoint and all, and the work goes on
    from it."""
    folder = Path(tempfile.gettempdir()) / name
    for old in folder.parent.glob(f"{SCRATCH}*"):  # of workers that died and were replaced elsewhere
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > DAY:
                shutil.rmtree(old, ignore_errors=True)
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
        return error, (
            {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()},
            result,
        )
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
        server = Server(proxy, seed, device, folder / "work")
        predictor = fusion.fuse(Inbox(paths), server)
    save_predictor(predictor, folder / "predictor", export=False)
    return server.report


def _do(
    cwd: str,
    environment: dict[str, str],
    threads: int,
    placed: dict[tuple[str, bool], Any],
    function: Callable[[Any], Any],
    item: Any,
) -> Answer:
    global _quiet
    _quiet = True
    os.chdir(cwd)
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        with kept():
            cluster.placed.update(placed)
            return None, function(item)
    except FlybyError as error:
        return error, None


def _ready(device: str, threads: int = 1) -> None:
    """A site trains on one thread and a rule fuses on as many as the driver would: sums are then taken in the order of
    engine ``inline``."""
    torch.set_num_threads(threads)
    keep_memory(device == "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput(
            f"{os.uname().nodename} has no CUDA device for a task; set FLYBY_RAY_GPUS=0, or use --device cpu"
        )
