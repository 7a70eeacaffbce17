"""Cells of several studies on one GPU, from one queue: each worker is a process that compiles a network once for all of
its jobs, and keeps beside the rows what clients said that send ``moments`` (``rule_forms.py``).

    python benchmarks/study_queue.py queue.jsonl --root work --data-root data --workers 2

A line of the queue is a job: {"name": "a", "study": "summit-cifar10", "change": {"methods": ["fafi"]}}. ``change``
replaces keys of the study, so that a job is a part of its grid; rows go to ROOT/results/WORKER/STUDY.jsonl,
for ``flyby study STUDY --merge``. Datasets are files or folders in the data root, and jobs wait until theirs
are there. Lines may be added while it runs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rule_forms import keep

from flyby.settings import build
from flyby.study.catalogue import Study, read_study
from flyby.study.grid import cells, run_study

log = logging.getLogger("queue")


def take(queue: Path, data_root: Path) -> dict[str, Any] | None:
    """The first job whose data is there, which leaves the queue; an empty one where all others still wait."""
    with queue.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        for place, line in enumerate(lines):
            job: dict[str, Any] = json.loads(line)
            if all((data_root / name).exists() for name in grid_of(job).data):
                file.seek(0)
                file.truncate()
                file.write("".join(f"{other}\n" for other in (*lines[:place], *lines[place + 1 :])))
                return job
    return {} if lines else None


def grid_of(job: dict[str, Any]) -> Study:
    whole = read_study(job["study"])[1].model_dump(exclude_unset=True)
    return build(Study, {**whole, **job.get("change", {})}, "study")


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
            if any("moments" in setting for setting in grid.settings):  # what clients said is of use with these alone
                first = next(iter(cells(grid, data_root)))
                keep(root / "work" / "runs" / first.key, root / "voices" / f"{job['name']}.npz", words.device)
            log.info("%s: %s, %.0f s", name, job["name"], time.perf_counter() - began)
        except Exception:  # the others go on
            log.exception("%s: %s failed", name, job["name"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worker", default="", help="be this one worker")
    words = parser.parse_args()
    if not words.queue.is_file():
        parser.error(f"{words.queue} is not a file; write the jobs into one, a line each")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if words.worker:
        work(words.worker, words)
        return
    crew = [subprocess.Popen([sys.executable, *sys.argv, "--worker", f"w{i}"]) for i in range(words.workers)]
    sys.exit(max(one.wait() for one in crew))


if __name__ == "__main__":
    main()
