"""Cells of several studies on one GPU, from one queue: each worker is a process that compiles a network once for all of
its jobs, and keeps beside the rows what clients said that send ``moments`` (``rule_forms.py``).

    python benchmarks/study_queue.py queue.jsonl --root work --data-root data --workers 2

A line of the queue is a job: {"name": "a", "seconds": 180, "study": "summit-cifar10", "change": {"methods": ["fafi"]}}.
``change`` replaces keys of the study, so that a job is a part of its grid; "seconds", what it is expected to take, may
be left out; "voices": false keeps rows alone. Rows go to ROOT/results/WORKER/STUDY.jsonl, for ``flyby study STUDY
--merge``. Datasets are files or folders in the data root, and jobs wait until theirs are there, but for those that come
with flyby. Lines may be added while it runs.

On a machine that ends what a command leaves behind, or ends commands after some minutes: --leave-after 500 starts all
this apart, and returns after so many seconds with the rows so far in --copy FOLDER; the same command again goes on
waiting. ``benchmarks/queues/`` has the queues that are next.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from rule_forms import keep

from flyby.data.sources import SOURCES
from flyby.errors import FlybyError
from flyby.settings import build
from flyby.study.catalogue import Study, read_study
from flyby.study.grid import cells, run_study

log = logging.getLogger("queue")
FEW = 6  # voices that are copied: of some machines only a handful of files comes back, and the rows must be among them


def take(queue: Path, data_root: Path) -> dict[str, Any] | None:
    """The first job whose data is there, which leaves the queue; an empty one where all others still wait."""
    with queue.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        for place, line in enumerate(lines):
            job: dict[str, Any] = json.loads(line)
            try:
                ready = all(name in SOURCES or (data_root / name).exists() for name in grid_of(job).data)
            except FlybyError:
                ready = True  # whoever takes it will say what is wrong, and go on with the next
            if ready:
                file.seek(0)
                file.truncate()
                file.write("".join(f"{other}\n" for other in (*lines[:place], *lines[place + 1 :])))
                return job
    return {} if lines else None


def grid_of(job: dict[str, Any]) -> Study:
    whole = read_study(job["study"])[1].model_dump(exclude_unset=True)
    return build(Study, {**whole, **job.get("change", {})}, "study")


def expected(queue: Path, workers: int) -> str:
    """How much there is to do, and how long it is expected to take."""
    jobs = [json.loads(line) for line in queue.read_text().splitlines()]
    known = [job["seconds"] for job in jobs if "seconds" in job]
    long = f", about {max(sum(known) / workers, *known):.0f} s" if known and len(known) == len(jobs) else ""
    return f"{queue.name}: jobs {len(jobs)}, workers {workers}{long}"


def work(name: str, words: argparse.Namespace) -> None:
    root, data_root = words.root, words.data_root
    waits = False
    while (job := take(words.queue, data_root)) is not None:
        if not job:
            if not waits:
                log.info("%s: what is left needs datasets that are not in %s; waiting for them", name, data_root)
            waits = True
            time.sleep(2)
            continue
        waits = False
        began = time.perf_counter()
        try:
            grid = grid_of(job)
            rows = root / "results" / name / f"{job['study']}.jsonl"
            run_study(grid, rows, root / "work", data_root=data_root, engine="inline", device=words.device, quiet=True)
            asked = job.get("voices", True) and any("moments" in setting for setting in grid.settings)
            if asked:  # what clients said is of use with moments alone
                first = next(iter(cells(grid, data_root)))
                keep(root / "work" / "runs" / first.key, root / "voices" / f"{job['name']}.npz", words.device)
            log.info("%s: %s, %.0f s", name, job["name"], time.perf_counter() - began)
        except Exception:  # the others go on
            log.exception("%s: %s failed", name, job["name"])


def copy(root: Path, out: Path, most: int) -> None:
    """Rows and log of all that is done so far, in one file, and the newest few voices of up to so many bytes each."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "rows.part", "w:gz") as packed:
        for path in sorted([*root.glob("results/*/*.jsonl"), *root.glob("*.log")]):
            packed.add(path, path.relative_to(root))
    (out / "rows.part").rename(out / "rows.tgz")
    said = [path for path in root.glob("voices/*.npz") if not path.name.endswith(".part.npz")]
    fit = sorted((path for path in said if path.stat().st_size <= most), key=lambda path: path.stat().st_mtime)
    for path in fit[:-FEW]:
        (out / path.name).unlink(missing_ok=True)
    for path in fit[-FEW:]:
        (out / path.name).write_bytes(path.read_bytes())


def me(words: argparse.Namespace, queue: Path) -> list[str]:
    """The command for a process that works here too."""
    place = ["--root", words.root, "--data-root", words.data_root, "--device", words.device]
    return [sys.executable, __file__, str(queue), *map(str, place)]


def watch(words: argparse.Namespace) -> None:
    """Start the queue in a session of its own, or find it at work, and come back in time with what there is."""
    root: Path = words.root
    root.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + words.leave_after
    if not (root / "queue.log").exists():
        crew = [*me(words, words.queue), "--workers", str(words.workers)]
        crew += ["--first", str(words.first)] if words.first else []
        with (root / "queue.log").open("w") as file:
            subprocess.Popen(crew, stdout=file, stderr=file, start_new_session=True)
    done, seen = root / "done", -1
    while True:
        rows = sum(path.stat().st_size for path in root.glob("results/*/*.jsonl"))
        over = done.exists() or time.monotonic() >= end
        if words.copy is not None and (rows != seen or over):
            copy(root, words.copy, words.copy_most)
        if over:
            break
        seen = rows
        time.sleep(2)
    print((root / "queue.log").read_text()[-8000:])
    print("all is done" if done.exists() else "it goes on; the same command waits for it again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--first", type=Path, help="a queue that one worker does before, with the machine to itself")
    parser.add_argument("--worker", default="", help="be this one worker")
    parser.add_argument("--leave-after", type=float, metavar="SECONDS", help="see above")
    parser.add_argument("--copy", type=Path, help="where --leave-after puts what is done")
    parser.add_argument("--copy-most", type=int, default=16_000_000, help="bytes of a file of voices that is copied")
    words = parser.parse_args()
    for queue in filter(None, (words.queue, words.first)):
        if not queue.is_file():
            parser.error(f"{queue} is not a file; write the jobs into one, a line each")
    if words.leave_after is not None:
        watch(words)
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if words.worker:
        work(words.worker, words)
        return
    for queue, workers in ((words.first, 1), (words.queue, words.workers)):
        if queue is not None:
            log.info("%s", expected(queue, workers))
    codes = [subprocess.call([*me(words, words.first), "--worker", "first"])] if words.first else []
    crew = [subprocess.Popen([*me(words, words.queue), "--worker", f"w{i}"]) for i in range(words.workers)]
    codes += [one.wait() for one in crew]
    words.root.mkdir(parents=True, exist_ok=True)
    (words.root / "done").touch()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
