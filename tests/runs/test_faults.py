"""What goes wrong in the world: kills, full and read-only disks, clocks that jump, two processes at once. Nothing
half-written, and the same bytes after."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from factories import WAIT, Answer, call, done, finish, make_stripes, members, one_line, same_run, start, wait_for
from flyby import files
from flyby.errors import BadInput
from flyby.runs.folder import Run

KILLS = Path(__file__).parents[2] / "benchmarks" / "kills.py"
QUICK = ("--device", "cpu", "--quiet")
GOES_ON = "give the same command again (flyby run: with --resume), it goes on from what is there"


def run(out: Path, *more: object) -> tuple[object, ...]:
    standard = (
        "--method",
        "fedavg",
        "--data",
        "digits",
        "--clients",
        2,
        "--alpha",
        1,
        "--model",
        "mlp",
        "--epochs",
        2,
        "--engine",
        "inline",
    )
    return ("run", *standard, *QUICK, "--out", out, *more)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "out"
    done(*run(out))
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stripes(tmp_path_factory.mktemp("data") / "stripes.npz", 120)


@pytest.fixture(scope="module")
def parcels(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("parcels") / f"{name}.parcel" for name in ("ann", "bob")]
    for path in paths:
        done(*train(data, path))
    return paths


def train(data: Path, out: Path) -> tuple[object, ...]:
    return ("train", "--data", data, "--out", out, "--model", "mlp", "--epochs", 2, *QUICK)


def fuse(parcels: list[Path], out: Path) -> tuple[object, ...]:
    return ("fuse", *parcels, "--out", out, "--device", "cpu", "--fusion", "ensemble")


def orient(parcels: list[Path], data: Path, out: Path) -> tuple[object, ...]:
    return (
        "orient",
        "--own",
        parcels[0],
        "--received",
        parcels[1].parent,
        "--data",
        data,
        "--out",
        out,
        "--device",
        "cpu",
        "--no-export",
        "--set",
        "epochs=1",
        "--set",
        "orient.distill_epochs=1",
        "--set",
        "orient.distill_steps=0",
    )


def half_written(folder: Path) -> list[str]:
    return [str(p) for p in folder.rglob("*") if p.name.endswith((".part", ".old", ".lock")) and p.name != ".lock"]


# -- kills


def test_killed_at_random_moments_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    words = [
        sys.executable,
        str(KILLS),
        "--trials",
        "4",
        "--cases",
        "inline,train,fuse",
        "--seed",
        "7",
        "--keep",
        str(tmp_path / "failed"),
    ]
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=WAIT, env={**os.environ, "TMPDIR": str(tmp_path)}, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 of 4 killed runs ended with the bytes of the undisturbed one" in ended.stdout
    assert not any(tmp_path.glob("flyby-kills-*"))


def test_workers_end_with_their_parent_and_the_run_goes_on_at_once(tmp_path: Path) -> None:
    words = run(tmp_path / "out", "--engine", "processes", "--clients", 3, "--epochs", 40)
    process = start(*words)
    wait_for(lambda: any((tmp_path / "out" / "parcels").glob("*.parcel")), "parcel", process=process)
    finish(process, signal.SIGKILL, group=False)  # the parent alone: its workers must notice by themselves
    answer = call(*words, "--engine", "inline", "--resume")
    assert answer.code == 0, answer.err
    wait_for(lambda: members(process.pid) == [], "the workers to end")
    done(*run(tmp_path / "calm", "--clients", 3, "--epochs", 40))
    same_run(tmp_path / "out", tmp_path / "calm")
    assert half_written(tmp_path) == []


def test_sweeping_takes_what_nobody_needs_and_nothing_else(tmp_path: Path) -> None:
    for name in (
        "a.parcel",
        "a.jsonl",
        "a.ckpt",
        "b.ckpt",
        "b.jsonl",
        ".b.ckpt.12345678.part",
        "deep/.c.json.abcd_123.part",
    ):
        files.write_text(tmp_path / name, name)
    Run(tmp_path).sweep()
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["a.jsonl", "a.parcel", "b.ckpt", "b.jsonl"]


def test_a_folder_is_never_absent_while_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    if not files._exchange(tmp_path / "one", tmp_path / "two"):
        pytest.skip("this file system cannot exchange two folders in one step")
    out = tmp_path / "out"
    with files.atomic_folder(out) as folder:
        files.write_text(folder / "model.json", "0")
    stop, absent = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                os.stat(out / "model.json")
                continue
            absent.append(1)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(100):
        with files.atomic_folder(out) as folder:
            files.write_text(folder / "model.json", str(number))
    stop.set()
    thread.join()
    assert absent == []
    assert (out / "model.json").read_text() == "99"
    assert half_written(tmp_path) == []


def test_without_that_step_a_folder_is_still_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", lambda left, right: False)
    for text in ("old", "new"):
        with files.atomic_folder(tmp_path / "out") as folder:
            files.write_text(folder / f"{text}.txt", text)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["new.txt"]
    assert half_written(tmp_path) == []


# -- a full disk


class FullDisk:
    """Every write ends with fsync (``files.atomic_open``); the chosen one finds the disk full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes, self.full_at = 0, 0
        real = os.fsync

        def fsync(handle: int) -> None:
            # Written or not as it suits the cache
            cached = os.readlink(f"/proc/self/fd/{handle}").startswith(os.environ["FLYBY_CACHE"])
            self.writes += not cached
            if self.writes == self.full_at and not cached:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)

    def call(self, full_at: int, *words: object) -> Answer:
        self.writes, self.full_at = 0, full_at
        return call(*words)


@pytest.mark.usefixtures("undrawn")
def test_whichever_write_of_a_run_finds_the_disk_full(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    assert disk.call(0, *run(tmp_path / "calm")).code == 0
    writes = disk.writes
    assert writes > 10
    for number in range(1, writes + 1):
        out = tmp_path / str(number)
        message = one_line(disk.call(number, *run(out)))
        assert "no room left on the disk of" in message
        assert message.endswith(GOES_ON)
        assert half_written(tmp_path) == []
        assert disk.call(0, *run(out, "--resume")).code == 0
        same_run(reference, out)


@pytest.mark.parametrize("command", ["train", "fuse", "orient"])
def test_whichever_write_of_a_command_finds_the_disk_full(
    command: str, data: Path, parcels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    words: dict[str, Callable[[Path], tuple[object, ...]]] = {
        "train": lambda out: train(data, out / "me.parcel"),
        "fuse": lambda out: fuse(parcels, out / "model"),
        "orient": lambda out: orient(parcels, data, out / "model"),
    }
    assert disk.call(0, *words[command](tmp_path / "calm")).code == 0
    writes = disk.writes
    assert writes >= 1
    kept = [
        p.relative_to(tmp_path / "calm")
        for p in (tmp_path / "calm").rglob("*")
        if p.suffix in (".parcel", ".safetensors")
    ]
    assert kept
    for number in range(1, writes + 1):
        out = tmp_path / str(number)
        answer = disk.call(number, *words[command](out))
        if number == writes:  # the page about it: the work is done by then
            assert answer.code == 0
            assert "note: no room left on the disk of" in answer.err
            continue
        assert "no room left on the disk of" in one_line(answer)
        assert not out.exists() or list(out.iterdir()) == [], "nothing, not even half of it"
        assert disk.call(0, *words[command](out)).code == 0
        for name in kept:
            assert (out / name).read_bytes() == (tmp_path / "calm" / name).read_bytes(), name


@contextlib.contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """A small file system in memory, where this user may mount one."""
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "none", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system may be mounted here ({made.stderr.strip()})")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("engine", ["inline", "processes"])
@pytest.mark.parametrize("kilobytes", [100, 300])
@pytest.mark.usefixtures("undrawn")
def test_a_disk_that_is_really_full(engine: str, kilobytes: int, reference: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "-o", f"size={kilobytes}k"):
        message = one_line(call(*run(disk / "out", "--engine", engine)))
        assert f"no room left on the disk of {disk}" in message
        assert half_written(disk) == []
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert done(*run(disk / "out", "--engine", engine, "--resume")).code == 0
        same_run(reference, disk / "out")


def test_a_copy_of_an_upload_is_whole_or_absent(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the store lies on another disk its uploads are copied into the run's folder."""

    class Upload:
        site, parcel_path = "site-0", reference / "parcels" / "site-0.parcel"

    def no_links(*_: object) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", no_links)
    with monkeypatch.context() as full:
        disk = FullDisk(full)
        disk.full_at = 1
        with pytest.raises(BadInput, match="no room left"):
            Run(tmp_path).collect([Upload()])  # type: ignore[list-item]
    assert list((tmp_path / "parcels").iterdir()) == []
    (path,) = Run(tmp_path).collect([Upload()])  # type: ignore[list-item]
    assert path.read_bytes() == Upload.parcel_path.read_bytes()


# -- a disk that cannot be written


def commands(folder: Path, data: Path, parcels: list[Path]) -> dict[str, tuple[object, ...]]:
    return {
        "run": run(folder / "out"),
        "train": train(data, folder / "me.parcel"),
        "fuse": fuse(parcels, folder / "model"),
        "orient": orient(parcels, data, folder / "mine"),
    }


def test_a_file_in_place_of_the_folder(data: Path, parcels: list[Path], tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("mine")
    for words in commands(place, data, parcels).values():
        assert "cannot write" in one_line(call(*words))
    assert place.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["place"]


def test_a_read_only_disk(data: Path, parcels: list[Path], tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-o", "ro"):
        for words in commands(tmp_path / "disk", data, parcels).values():
            assert "Read-only file system" in one_line(call(*words))


# -- clocks


def test_no_number_depends_on_the_time_of_day(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [1.0e9]

    def jumping() -> float:
        moment[0] = 4.0e9 - moment[0] + 1e6  # now in 2096, now in 2001
        return moment[0]

    monkeypatch.setattr("time.time", jumping)
    monkeypatch.setattr("time.time_ns", lambda: int(jumping() * 1e9))
    done(*run(tmp_path / "out"))
    same_run(reference, tmp_path / "out")


# -- two at once


def test_one_process_an_output(data: Path, parcels: list[Path], tmp_path: Path) -> None:
    for name, words in commands(tmp_path, data, parcels).items():
        lock = {"run": "out/.lock", "train": ".me.parcel.lock", "fuse": ".model.lock", "orient": ".mine.lock"}[name]
        (tmp_path / lock).parent.mkdir(exist_ok=True)
        with (tmp_path / lock).open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            assert "another flyby process is working in" in one_line(call(*words))
        done(*words)  # a lock file that nobody holds, as a kill leaves it, is no obstacle
        assert not (tmp_path / lock).exists() or name == "run"


def test_a_writer_takes_away_what_a_killed_one_left_of_the_same_output_only(tmp_path: Path) -> None:
    mine = (".out.abcd_123.part", ".out.abcd1234.old", "..out.abcd1234.part.01234567.part")
    others = (
        ".out.b.abcd1234.part",
        ".out2.abcd1234.part",
        "..out.abcd1234.part",
        ".out.server",
        "out.part",
        ".out.0123456789abcdef",
    )
    for name in (*mine[:1], *others):
        (tmp_path / name).write_text("")
    for name in mine[1:]:
        files.write_text(tmp_path / name / "model.json", "")
    with files.sole_writer(tmp_path / "out"):
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, ".out.lock"])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


def test_a_file_system_without_locks_is_used_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: object, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.sole_writer(tmp_path / "new" / "out"):
        pass
    assert list(tmp_path.iterdir()) == [], "a folder that was made for the lock alone goes too"
