"""Engines: the same bytes wherever a site trains, and honest ends when one fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import SETTINGS, call, done, jobs_of, make_stripes, one_line, same_run, wait_for
from flyby.data.splits import Split, SplitSettings, make_split
from flyby.engines import forkserver, processes
from flyby.engines.engine import DataSettings, Job, engine_named
from flyby.engines.forkserver import without_interrupts
from flyby.engines.jobs import views_by_batch
from flyby.engines.processes import run_processes
from flyby.errors import BadInput, Diverged, FlybyError
from flyby.names import check_name


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_stripes(tmp_path / "stripes.npz", count=120, test=30)


def test_every_engine_gives_the_same_bytes(data: Path, tmp_path: Path) -> None:
    """Three sites on two workers: the last one waits, and runs in a process that has trained another site before."""
    words = (
        "run",
        "--data",
        data,
        "--split",
        "dirichlet",
        "--alpha",
        1,
        "--clients",
        3,
        "--epochs",
        3,
        "--device",
        "cpu",
        "--quiet",
    )
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    for engine in ("inline", "processes"):  # tests/test_ray.py has the third
        assert done(*words, *sets, "--engine", engine, "--out", tmp_path / engine, "--json").json["engine"] == engine
    same_run(tmp_path / "inline", tmp_path / "processes")


def test_inline_leaves_the_thread_count_as_it_was(data: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        seen = []
        engine_named("inline")(
            jobs_of(data, tmp_path, epochs=1), lambda row: seen.append((row["site"], torch.get_num_threads()))
        )
        assert seen == [("site-0", 1), ("site-1", 1), ("site-2", 1)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_job_is_plain_data_and_knows_when_it_is_done(data: Path, tmp_path: Path) -> None:
    jobs = jobs_of(data, tmp_path)
    job = jobs[0]
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert not job.done()
    engine_named("inline")(jobs[:1], lambda row: None)
    assert job.done()
    assert sorted(p.name for p in job.folder.iterdir()) == ["site-0.jsonl", "site-0.key", "site-0.parcel"]
    assert not jobs[1].done()
    other = jobs_of(data, tmp_path, codec="fp16")[0]
    assert other.key != job.key
    with pytest.raises(BadInput, match="made by other settings"):
        other.done()


def test_views_are_counted_by_the_size_of_batches(data: Path, tmp_path: Path) -> None:
    jobs = jobs_of(data, tmp_path, "train.batch=8", epochs=3)
    images = [len(Split.load(job.split).shares[job.site].train) for job in jobs]
    assert views_by_batch(jobs) == {8: 3 * sum(images)}, "plain training has one view per image"
    mixed = [jobs[0], *jobs_of(data, tmp_path, "train.batch=4", "views.views=2", epochs=1)[1:]]
    assert views_by_batch(mixed) == {8: 3 * images[0], 4: 2 * sum(images[1:])}


def test_a_key_names_all_that_decides_the_bytes(data: Path, tmp_path: Path) -> None:
    job = jobs_of(data, tmp_path)[0]
    again = jobs_of(data, tmp_path)[0]
    assert job.key == again.key
    bundle = DataSettings(name=str(data)).load()
    hashes = [make_split(bundle.train, SplitSettings(name="iid", clients=3), seed).hash for seed in (0, 1)]
    keys = {job.recipe.key(h) for h in hashes} | {jobs_of(data, tmp_path, f"train.lr={lr}")[0].key for lr in (0.1, 0.2)}
    assert job.key in keys
    assert len(keys) == 4


def test_an_unknown_engine_suggests_a_known_one() -> None:
    with pytest.raises(BadInput, match="did you mean 'inline'"):
        engine_named("inlin")


def test_no_jobs_start_no_process() -> None:
    run_processes([], lambda row: pytest.fail("nothing was to be done"))
    assert multiprocessing.active_children() == []


def test_an_error_in_a_worker_is_the_run_s_own(data: Path, tmp_path: Path) -> None:
    jobs = jobs_of(data, tmp_path, "train.lr=1e30")
    with pytest.raises(Diverged, match=r"site-[012] diverged in epoch"):
        run_processes(jobs[:1], lambda row: None)
    assert not jobs[0].parcel_path.exists()
    wait_for(lambda: multiprocessing.active_children() == [], "the workers to end")


def test_a_killed_worker_fails_the_run_with_its_name_and_the_rest_can_go_on(data: Path, tmp_path: Path) -> None:
    jobs = jobs_of(data, tmp_path, epochs=200)
    victims: list[int] = []

    def kill(_row: dict[str, Any]) -> None:
        if not victims:
            victims.extend(child.pid for child in multiprocessing.active_children() if child.pid)
            os.kill(victims[0], signal.SIGKILL)

    with pytest.raises(
        FlybyError, match=r"a worker process died .* site-[012] unfinished; run again with --resume"
    ) as caught:
        run_processes(jobs, kill, workers=2)
    assert caught.value.exit_code == 2
    assert len(victims) == 2
    wait_for(lambda: multiprocessing.active_children() == [], "the workers to end")
    assert not any(job.done() for job in jobs)


def test_workers_are_started_deaf_to_ctrl_c() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with without_interrupts():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert signal.SIGINT not in before


def test_ctrl_c_while_the_pool_is_made_leaves_no_semaphore_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Context:
        def Queue(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            made.append("whole")

    def pool(*_: object, **__: object) -> None:
        made.append("pool")

    monkeypatch.setattr(forkserver, "context_for", lambda device: Context())
    monkeypatch.setattr(processes, "ProcessPoolExecutor", pool)
    with pytest.raises(KeyboardInterrupt):
        next(processes.spread(str, [1], "cpu"))
    assert made == ["whole", "pool"]


def test_sites_with_impossible_names_are_refused_before_training(tmp_path: Path) -> None:
    words = (
        "train",
        "--data",
        "digits",
        "--site",
        ".hidden",
        "--epochs",
        1,
        "--quiet",
        "--out",
        tmp_path / "out.parcel",
    )
    assert "a site cannot be called" in one_line(call(*words))
    assert not list(tmp_path.iterdir())
    for name in ("site-0", "Zürich".encode().hex(), "a.b_c:d@e+f-g", "x" * 128):
        check_name(name)
    for name in ("", ".hidden", "..", "a b", "a/b", "a\n", "é", "x" * 129):
        with pytest.raises(BadInput, match="a site cannot be called"):
            check_name(name)
