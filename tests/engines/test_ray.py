"""Engine ``ray`` on a real cluster of two machines' worth of processes: the bytes of ``inline``, whoever is killed on
the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import (
    SETTINGS,
    WAIT,
    call,
    done,
    finish,
    jobs_of,
    make_npz,
    make_stripes,
    members,
    one_line,
    result_of,
    same_run,
    start,
    stripes,
    wait_for,
)
from flyby.data.dataset import Dataset
from flyby.engines import cluster as ray_cluster
from flyby.engines.cluster import RaySettings
from flyby.engines.engine import DataSettings, Job, engine_named
from flyby.engines.jobs import bundle_of
from flyby.engines.ray import each_ray, fuse_ray, run_ray
from flyby.errors import BadInput, Diverged, FlybyError
from flyby.fusion import FedAvg, Inbox, Predictor
from flyby.fusion.base import Server
from flyby.study.catalogue import Study
from flyby.study.grid import run_study

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]


def words(
    data: Path | str, out: Path, *more: object, engine: str = "ray", clients: int = 3, epochs: int = 3
) -> list[object]:
    asked = (
        "--split",
        "iid",
        "--clients",
        clients,
        "--epochs",
        epochs,
        "--engine",
        engine,
        "--device",
        "cpu",
        "--method",
        "fedavg",
    )
    return ["run", "--data", data, *asked, *SMALL, "--quiet", "--json", "--out", out, *more]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_stripes(tmp_path / "stripes.npz", count=120, test=30)


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """Two nodes with one core each and a raylet and workers of their own; the second also claims a GPU, which it has
    not. This process stays connected all the time, so that workers that have imported torch serve one test after
    another."""
    if find_spec("ray") is None:
        pytest.skip("the extra `ray` is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_gcs_server_port_wait_time_s", str(int(WAIT)))
        # The rule and the function of this file run in workers.
        places = [*map(str, Path(__file__).parents[:2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
        import ray
        from ray._private import services
        from ray.cluster_utils import Cluster

        patch.setattr(services, "get_node", patient(services.get_node))
        made = Cluster()
        try:
            made.add_node(wait=False, num_cpus=1, num_gpus=0, include_dashboard=False)
            made.add_node(wait=False, num_cpus=1, num_gpus=1)
            made.wait_for_nodes(WAIT)
            ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
    wait_for(lambda: not children(os.getpid(), "raylet"), "the cluster to end")


def patient(look: Callable[..., Any]) -> Callable[..., Any]:
    """Ray gives a node 30 seconds to be seen after its start, and no setting to change that; this look waits longer."""

    def wait_and_look(*where: Any) -> Any:
        limit = time.monotonic() + WAIT
        while True:
            try:
                return look(*where)
            except RuntimeError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.1)

    return wait_and_look


@pytest.fixture
def cluster(machines: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RAY_ADDRESS", machines.address)
    return machines


def children(parent: int, name: str) -> list[int]:
    """The processes that a parent started and whose command line has ``name`` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(owner) == parent and state != "Z" and name in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
    return found


def working() -> dict[int, int]:
    """Worker processes of this test's cluster that have a task of a run right now, with the node that each belongs
    to."""
    return {pid: node for node in children(os.getpid(), "raylet") for pid in children(node, "ray::_in_scratch")}


@contextlib.contextmanager
def killer(times: int) -> Iterator[list[int]]:
    """As long as the block lasts, SIGKILL to workers that have a task, one after another, until so many are dead; gives
    who they were."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while len(killed) < times and not over.wait(0.05):
            for pid in sorted(working().keys() - set(killed))[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def uploads_of(jobs: list[Job]) -> list[bytes]:
    return [job.parcel_path.read_bytes() for job in jobs]


# -- settings, without a cluster


def test_shares_of_a_machine_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RaySettings.read()
    assert plain.share(plain.device("cpu")) == {"num_cpus": 1, "num_gpus": 0}
    assert plain.share(plain.device("cuda:1")) == {"num_cpus": 1, "num_gpus": 1}
    monkeypatch.setenv("FLYBY_RAY_CPUS", "0.5")
    monkeypatch.setenv("FLYBY_RAY_GPUS", "0.25")
    eager = RaySettings.read()
    assert eager.device("cpu") == "cuda"  # a driver without a GPU may use those of the cluster
    assert eager.share("cuda") == {"num_cpus": 0.5, "num_gpus": 0.25}
    monkeypatch.setenv("FLYBY_RAY_GPUS", "0")
    assert RaySettings.read().device("cuda") == "cpu"
    for name, value, said in (
        ("CPUS", "none", "FLYBY_RAY.cpus = 'none'"),
        ("GPUS", "1.5", "whole ones"),
        ("RETRIES", "-1", "FLYBY_RAY.retries"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"FLYBY_RAY_{name}", value)
            with pytest.raises(BadInput, match=said):
                RaySettings.read()


def test_without_ray_the_extra_is_named_before_anything_is_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'flyby[ray]'" in one_line(call(*words(data, tmp_path / "out")))
    assert not (tmp_path / "out").exists()


@needs_ray
def test_an_address_that_cannot_serve_is_one_line(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    assert "Ray Client address" in one_line(call(*words(data, tmp_path / "client")))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1" in one_line(call(*words(data, tmp_path / "nobody")))


@needs_ray
def test_a_cluster_that_is_too_slow_to_start_is_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", slow)
    assert "does not start (The current node timed out during startup.)" in one_line(call(*words(data, tmp_path / "x")))


# -- the bytes


def test_sites_and_server_on_two_machines_give_the_bytes_of_inline(cluster: Any, data: Path, tmp_path: Path) -> None:
    """A rule that trains on the server, with proxy images and a section for the report, and snapshots that come back
    too."""
    proxy = make_npz(tmp_path / "proxy.npz", images=stripes(30, seed=9)[0], labels=stripes(30)[1])
    rule = ("--fusion", "feddf", "--set", f"proxy={proxy}", "--set", "fusion.epochs=2", "--set", "train.snapshots=2")
    for engine in ("inline", "ray"):
        assert done(*words(data, tmp_path / engine, *rule, engine=engine)).json["engine"] == engine
    left, right = tmp_path / "inline", tmp_path / "ray"
    same_run(left, right)
    assert result_of(left)["checkpoints"]
    names = sorted(str(p.relative_to(left)) for p in left.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(right)) for p in right.rglob("*") if p.is_file())
    sections = [json.loads((folder / "extra.json").read_text()) for folder in (left, right)]
    assert [section["title"] for section in sections[0]] == [section["title"] for section in sections[1]]


class WhereAmI(FedAvg):
    """FedAvg that notes its process."""

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        server.report.append({"title": "process", "text": str(os.getpid())})
        return super().combine(parcels, server)


def test_a_server_rule_runs_in_a_worker(cluster: Any, data: Path, tmp_path: Path) -> None:
    jobs = jobs_of(data, tmp_path)
    engine_named("inline")(jobs, lambda row: None)
    inbox = Inbox([job.parcel_path for job in jobs])
    rule = WhereAmI()
    server = Server()
    there, here = fuse_ray(rule, inbox, server), FedAvg().fuse(inbox)
    assert server.report[0]["text"] != str(os.getpid())
    assert there.kind == here.kind
    assert all(torch.equal(there.state_dict()[name], tensor) for name, tensor in here.state_dict().items())


def test_only_the_driver_needs_the_files(cluster: Any, tmp_path: Path) -> None:
    """Data, split and run folder under a name that means nothing to any other process: what a worker needs, it was
    sent."""
    make_stripes(tmp_path / "stripes.npz", count=120, test=30)
    expected = jobs_of(tmp_path / "stripes.npz", tmp_path / "there")
    engine_named("inline")(expected, lambda row: None)
    handle = os.open(tmp_path, os.O_RDONLY)
    mine = Path(f"/proc/self/fd/{handle}")
    jobs = [
        job.model_copy(
            update={
                "data": DataSettings(name=str(mine / "stripes.npz")),
                "split": mine / "there" / "split.json",
                "folder": mine / "here",
            }
        )
        for job in expected
    ]
    try:
        run_ray(jobs, lambda row: None)
        assert uploads_of(jobs) == uploads_of(expected)
    finally:
        os.close(handle)
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == sorted(p.name for p in expected[0].folder.iterdir())


def test_images_are_placed_once_and_read_in_place(cluster: Any, data: Path, tmp_path: Path) -> None:
    with engine_named("ray").kept():
        run_ray(jobs_of(data, tmp_path / "a", epochs=1), lambda row: None)
        (first,) = ray_cluster.placed.values()
        run_ray(jobs_of(data, tmp_path / "b", "train.lr=0.01", epochs=1), lambda row: None)
        (second,) = ray_cluster.placed.values()
        assert first == second
        import ray

        look = ray.remote(
            lambda bundle: (bundle.train.images.flags.owndata, bundle.train.images.flags.writeable, bundle.test)
        )
        assert ray.get(look.remote(first)) == (False, False, None)
    assert not ray_cluster.placed
    assert ray.is_initialized()  # what it did not start it leaves alone


# -- deaths, errors, interruptions


def test_a_killed_worker_is_replaced_and_nothing_shows_it(cluster: Any, data: Path, tmp_path: Path) -> None:
    expected = jobs_of(data, tmp_path / "inline", epochs=60)
    engine_named("inline")(expected, lambda row: None)
    jobs = jobs_of(data, tmp_path / "ray", epochs=60)
    rows: list[tuple[str, int]] = []
    killed: list[int] = []

    def on_epoch(row: dict[str, Any]) -> None:
        if row["epoch"] > 1 and not killed:
            killed.extend(list(working())[:1])
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        rows.append((row["site"], row["epoch"]))

    run_ray(jobs, on_epoch)
    assert len(killed) == 1
    assert len(rows) == len(set(rows))  # a site that began again is not counted twice
    assert uploads_of(jobs) == uploads_of(expected)


def test_a_site_that_always_loses_its_worker_is_named(
    cluster: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYBY_RAY_RETRIES", "1")
    jobs = jobs_of(data, tmp_path, epochs=100_000)[:1]
    with (
        killer(times=2) as killed,
        pytest.raises(FlybyError, match=r"^site-0 lost its worker 2 times \(killed, or out of memory") as caught,
    ):
        run_ray(jobs, lambda row: None)
    assert caught.value.exit_code == 2
    assert len(killed) == 2
    assert not jobs[0].done()


@pytest.mark.parametrize(("setting", "code"), [("train.patience=1", 2), ("train.lr=1e30", 3)])
def test_an_error_in_a_task_is_the_one_of_inline(
    cluster: Any, data: Path, tmp_path: Path, setting: str, code: int
) -> None:
    said = {
        engine: call(*words(data, tmp_path / engine, "--set", setting, engine=engine, clients=1))
        for engine in ("inline", "ray")
    }
    assert one_line(said["inline"], code) == one_line(said["ray"], code)
    left, right = (sorted(p.name for p in (tmp_path / engine / "parcels").glob("*")) for engine in said)
    assert left == right


def test_a_share_that_no_machine_has_is_refused(
    cluster: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYBY_RAY_CPUS", "64")
    assert "no machine of the Ray cluster has 64 CPUs and 0 GPUs" in one_line(call(*words(data, tmp_path / "out")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the task would find a GPU, and train")
def test_a_gpu_share_decides_where_a_task_goes(
    cluster: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second machine claims a GPU, so the task gets there, looks, and says what it found."""
    monkeypatch.setenv("FLYBY_RAY_GPUS", "0.5")
    assert "has no CUDA device for a task; set FLYBY_RAY_GPUS=0" in one_line(
        call(*words(data, tmp_path / "out", clients=1))
    )


def test_what_an_interrupted_task_reached_is_handed_over(cluster: Any, data: Path, tmp_path: Path) -> None:
    expected = jobs_of(data, tmp_path / "inline", epochs=200)[:1]
    engine_named("inline")(expected, lambda row: None)
    jobs = jobs_of(data, tmp_path / "ray", epochs=200)[:1]

    def interrupt(row: dict[str, Any]) -> None:
        if row["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ray(jobs, interrupt)
    assert [p.name for p in jobs[0].folder.iterdir()] == ["site-0.ckpt"]
    rows: list[int] = []
    run_ray(jobs, lambda row: rows.append(row["epoch"]))
    assert min(rows) > 3
    assert uploads_of(jobs) == uploads_of(expected)
    assert sorted(p.name for p in jobs[0].folder.iterdir()) == ["site-0.jsonl", "site-0.key", "site-0.parcel"]


def test_ctrl_c_ends_the_tasks_and_resume_skips_what_is_finished(cluster: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "ray"
    process = start(*words(data, out, epochs=150))
    wait_for(lambda: any(out.glob("parcels/*.parcel")), "a finished site", process=process)
    answer = finish(process, signal.SIGINT)
    if "likely discovered a bug in Ray" not in answer.err:  # Ray 2.60 aborts where a task ends while it is cancelled
        assert "with --resume goes on from here" in one_line(answer, 130)
    finished = len(list(out.glob("parcels/*.parcel")))
    assert 1 <= finished < 3
    wait_for(lambda: not working(), "the tasks to end")
    assert done(*words(data, out, "--resume", epochs=150)).json["trained"] == 3 - finished
    done(*words(data, tmp_path / "inline", engine="inline", epochs=150))
    same_run(tmp_path / "inline", out)


@needs_ray
def test_a_local_cluster_is_quiet_and_gone_afterwards(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", str(int(WAIT)))
    for attempt in range(5):  # Ray gives up after 30 seconds; what a busy machine has read by then is quick to start
        process = start(*words(data, tmp_path / f"out-{attempt}", epochs=1))
        answer = finish(process)
        if "a local Ray cluster does not start" not in answer.err:
            break
    assert (answer.code, answer.err) == (0, "")
    assert answer.json["engine"] == "ray"
    wait_for(lambda: members(process.pid) == [], "the cluster to end")


# -- studies


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    timed = {"seconds", "timings", "trained", "date", "diverged"}  # which site diverges first is a matter of time too
    rows = [json.loads(line) for line in (folder / "results" / "tiny.jsonl").read_text().splitlines()]
    return {row["key"]: {name: value for name, value in row.items() if name not in timed} for row in rows}


def test_the_cells_of_a_study_run_at_once_and_give_the_rows_of_inline(cluster: Any, tmp_path: Path) -> None:
    """Two sets of uploads under two rules. One diverges, and that is a row too."""
    study = Study(
        title="Tiny",
        methods=["fedavg", "fafi"],
        fusions=["fedavg", "ensemble"],
        clients=[3],
        model="mlp",
        epochs=2,
        settings=["locals=false", "train.lr=1e4"],
    )
    for engine in ("inline", "ray"):
        folder = tmp_path / engine
        options: dict[str, Any] = {"engine": engine, "device": "cpu", "quiet": True}
        assert run_study(study, folder / "results" / "tiny.jsonl", folder / "work", **options) == (4, 0)
    assert rows_of(tmp_path / "inline") == rows_of(tmp_path / "ray")
    assert sum(row["accuracy"] is None for row in rows_of(tmp_path / "ray").values()) == 2
    stores = [
        {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.parcel")}
        for folder in (tmp_path / e / "work" / "uploads" for e in ("inline", "ray"))
    ]
    assert stores[0] == stores[1]
    assert stores[0]


def _square(number: int) -> tuple[int, int]:
    if number == 7:
        raise Diverged("seven left the finite numbers")
    return number * number, os.getpid()


def test_each_gives_every_item_its_result_and_an_error_ends_it(cluster: Any, data: Path) -> None:
    where = DataSettings(name=str(data))
    answers = dict(each_ray(_square, range(5), lambda number: where))
    assert {number: square for number, (square, _) in answers.items()} == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16}
    assert os.getpid() not in {pid for _, pid in answers.values()}
    with pytest.raises(Diverged, match=r"^seven left the finite numbers$"):
        list(each_ray(_square, [6, 7], lambda number: where))
    assert isinstance(bundle_of(where).train, Dataset)
