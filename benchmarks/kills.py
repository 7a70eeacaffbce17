"""Kill flyby at random moments, give the command again, and compare what comes out with an undisturbed run, byte for
byte.

A trial runs a command in a process group of its own, waits until it holds its lock, lets it work for a random part of
the time that the undisturbed one worked, and sends SIGKILL to the whole group. Every file that then lies there under
its own name must be whole. The command is given again (``flyby run``: with --resume) and with probability 1/3 killed
again, until it ends by itself. Everything but stop-watch numbers must then be equal: parcels, metrics, ledger, result,
the fused model; and nothing may be left over. Checkpoints are written after every epoch here (flyby itself waits 5
seconds), so that kills meet them. Exits with 1 if one trial fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = (
    "1"  # before the imports: a process with threads cannot be forked
)

import matplotlib.backends.backend_svg
import matplotlib.figure  # noqa: F401
import numpy as np
from sklearn.datasets import load_digits

import flyby.engines.preload
import flyby.report.write
import flyby.runs.pipeline  # noqa: F401
from flyby import cli
from flyby.parcels import parcel
from flyby.training import checkpoint

checkpoint.SECONDS = checkpoint.SHARE = 0.0  # at import, so that worker processes do it too

WAIT = 300.0
TIMED = {
    "seconds",
    "timings",
    "trained",
    "peak_memory_mb",
    "command",
    "engine",
    "samples_per_second",
    "images_per_second",
}
AGAIN = 1 / 3
SMALL = ("--data", "digits", "--model", "mlp", "--device", "cpu", "--epochs", "6", "--quiet")


@dataclass(frozen=True)
class Case:
    """A command: its words, given the folder of uploads and the place of its output, and what is added to go on."""

    words: Callable[[Path, Path], list[str]]
    output: str = "out"
    more: tuple[str, ...] = ()
    lock: str = ".{output}.lock"


def run(*words: str) -> Case:
    return Case(lambda _, out: ["run", *SMALL, *words, "--out", str(out)], more=("--resume",), lock="{output}/.lock")


def _parcels(uploads: Path) -> list[str]:
    return [str(path) for path in sorted((uploads / "parcels").glob("*.parcel"))]


CASES = {
    "inline": run("--method", "aurora", "--clients", "3", "--alpha", "1", "--engine", "inline"),
    "processes": run("--method", "fedavg", "--clients", "4", "--alpha", "1", "--engine", "processes"),
    "dense": run(
        "--method", "dense", "--clients", "2", "--alpha", "1", "--engine", "inline", "--set", "fusion.epochs=4"
    ),
    "fol": run(
        "--method",
        "fol",
        "--split",
        "fol",
        "--clients",
        "4",
        "--min-size",
        "10",
        "--engine",
        "inline",
        "--rounds",
        "1",
        "--set",
        "orient.epochs=2",
        "--set",
        "orient.distill_epochs=2",
        "--set",
        "orient.distill_steps=0",
        "--eval-nodes",
        "0,1",
    ),
    "train": Case(
        lambda _, out: ["train", *SMALL, "--method", "aurora", "--force", "--out", str(out)], output="me.parcel"
    ),
    "fuse": Case(
        lambda uploads, out: [
            "fuse",
            *_parcels(uploads),
            "--fusion",
            "ensemble",
            "--device",
            "cpu",
            "--no-export",
            "--out",
            str(out),
        ]
    ),
    "orient": Case(
        lambda uploads, out: [
            "orient",
            "--own",
            _parcels(uploads)[0],
            "--received",
            str(uploads / "parcels"),
            "--data",
            str(uploads.parent / "digits.npz"),
            "--device",
            "cpu",
            "--set",
            "epochs=2",
            "--set",
            "orient.distill_epochs=2",
            "--set",
            "orient.distill_steps=0",
            "--no-export",
            "--out",
            str(out),
        ]
    ),
}


# -- a process and its end


class Child:
    """``flyby WORDS`` in a process group of its own. It is forked from this process, which has imported everything and
    has one thread, so that a trial costs no seconds of importing."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        self.code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1)
                os.dup2(file, 2)
                sys.argv = ["flyby", *words]
                cli.main()
            except SystemExit as left:
                sys.stdout.flush()
                os._exit(int(left.code or 0))
            except BaseException:
                traceback.print_exc()
            os._exit(1)

    def poll(self) -> int | None:
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code

    def ends_within(self, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while self.poll() is None and (left := limit - time.monotonic()) > 0:
            time.sleep(min(0.002, left))
        return self.code is not None

    def end(self) -> None:
        """Wait for it to end by itself, and well."""
        assert self.ends_within(WAIT), "it does not end"
        if self.code != 0:
            raise AssertionError(f"exit code {self.code}: {self.log.read_text().strip()[-600:]}")


def until_locked(process: Child, lock: Path) -> None:
    limit = time.monotonic() + WAIT
    while process.poll() is None and time.monotonic() < limit and not lock.exists():
        time.sleep(0.002)


def kill(process: Child, after: float) -> bool:
    """SIGKILL to the whole group after some time; False if the command had ended by itself before."""
    if process.ends_within(after):
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.ends_within(WAIT)
    while _members(process.pid):  # the workers are not ours to wait for
        time.sleep(0.002)
    return True


def _members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, owner = entry.read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state != "Z":
                found.append(int(entry.parent.name))
    return found


# -- what came out


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMED}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def named_files(output: Path) -> Iterator[Path]:
    """Every file of an output that stands under its own name: what a dot hides is not finished."""
    for path in sorted(output.rglob("*")) if output.is_dir() else [output] * output.exists():
        inside = path.relative_to(output.parent).parts
        if path.is_file() and not any(part.startswith(".") for part in inside):
            yield path


def content(output: Path, whole: bool = False) -> dict[str, Any]:
    """All that is promised to be equal: bytes, and JSON without stop-watch numbers. ``whole`` only checks what can be
    checked alone."""
    found: dict[str, Any] = {}
    for path in named_files(output):
        name = str(path.relative_to(output.parent))
        if path.suffix == ".parcel":
            parcel.read(path)
        if path.suffix == ".json":
            found[name] = without_times(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            found[name] = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>"), f"{name} is not whole"
            found[name] = "a report"
        elif path.suffix != ".ckpt" or not whole:
            found[name] = path.read_bytes()
    return {name: value for name, value in found.items() if "/server/" not in name}


def difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    names = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    return f"{', '.join(names[:5])} differ" if names else ""


def leftovers(folder: Path) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name.endswith((".part", ".old", ".ckpt")) and "server" not in path.parts
    ]


def stage(output: Path) -> str:
    """How far a killed command had come, by what it left."""
    if not output.is_dir():
        return (
            "done"
            if output.exists()
            else "checkpoint"
            if any(output.parent.glob(f".{output.name}.*/*.ckpt"))
            else "before any"
        )
    uploads = list((output / "parcels").glob("*.parcel"))
    for name in ("report.html", "result.json", "global", "nodes", "ledger.json", "metrics.jsonl", "model.json"):
        if (output / name).exists():
            return f"after {name}"
    checkpoint = any((output / "parcels").glob("*.ckpt"))
    return f"{len(uploads)} uploads" + (", a checkpoint" if checkpoint else "")


# -- trials


def undisturbed(case: Case, uploads: Path, folder: Path) -> tuple[dict[str, Any], float]:
    """The reference, and the seconds between lock and end of a second, warm run of the same."""
    seconds = 0.0
    for turn in ("first", "second"):
        output, log = folder / turn / case.output, folder / f"{turn}.log"
        output.parent.mkdir(parents=True)
        process = Child(case.words(uploads, output), log)
        until_locked(process, output.parent / case.lock.format(output=case.output))
        began = time.monotonic()
        process.end()
        seconds = time.monotonic() - began
    one, other = (content(folder / turn / case.output) for turn in ("first", "second"))
    assert not difference(one, other), f"two undisturbed runs: {difference(one, other)}"
    assert one
    return one, seconds


def trial(
    case: Case, uploads: Path, folder: Path, reference: dict[str, Any], seconds: float, rng: random.Random
) -> list[str]:
    """One command, killed at least once, then given again until it ends; returns where the kills met it."""
    output, log = folder / case.output, folder.with_suffix(".log")
    folder.mkdir(parents=True)
    lock = folder / case.lock.format(output=case.output)
    met: list[str] = []
    escapes = 0
    words = case.words(uploads, output)
    while not met or rng.random() < AGAIN:
        lock.unlink(missing_ok=True)  # only to see the new one appear: a lock file that nobody holds is nothing
        process = Child(words, log)
        until_locked(process, lock)
        if kill(process, rng.uniform(0, seconds)):
            met.append(stage(output))
            content(output, whole=True)
        elif met:
            break  # it had little left to do and was faster than the kill
        else:
            escapes += 1
            assert escapes < 20, "it always ends before it is killed"
            shutil.rmtree(folder)
            folder.mkdir()
            continue
        words = case.words(uploads, output) + list(case.more)
    Child(words, log).end()
    wrong = difference(content(output), reference)
    assert not wrong, wrong
    assert not leftovers(folder), f"left over: {', '.join(leftovers(folder))}"
    return met


def make_uploads(root: Path) -> None:
    """Digits in a file, and three sites' parcels of them in ``root/uploads/parcels``, for the commands that begin with
    parcels."""
    digits = load_digits()
    np.savez(root / "digits.npz", images=(digits.images * 15.9).astype(np.uint8), labels=digits.target)
    words = [
        "run",
        *SMALL,
        "--data",
        str(root / "digits.npz"),
        "--method",
        "aurora",
        "--clients",
        "3",
        "--alpha",
        "1",
        "--engine",
        "inline",
    ]
    Child([*words, "--out", str(root / "uploads")], root / "uploads.log").end()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=100, help="over all cases together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default="inline,processes", help=f"some of {', '.join(CASES)}, with commas")
    parser.add_argument("--keep", type=Path, help="a folder for what failed; by default nothing is kept")
    words = parser.parse_args()
    names = words.cases.split(",")
    failed = 0
    kills: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="flyby-kills-") as temporary:
        root = Path(temporary)
        make_uploads(root)
        references = {name: undisturbed(CASES[name], root / "uploads", root / name) for name in dict.fromkeys(names)}
        for number in range(words.trials):
            name = names[number % len(names)]
            folder = root / name / f"trial-{number}"
            try:
                met = trial(
                    CASES[name], root / "uploads", folder, *references[name], random.Random(f"{words.seed} {number}")
                )
                kills.update(f"{name}: {where}" for where in met)
                print(f"{number + 1:>4} {name:<10} killed {len(met)} time(s) ({'; '.join(met)}): the same", flush=True)
            except Exception as error:
                failed += 1
                print(f"{number + 1:>4} {name:<10} FAILED: {type(error).__name__}: {error}", flush=True)
                if words.keep:
                    shutil.copytree(folder, words.keep / f"{name}-{number}", dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    for where, count in sorted(kills.items()):
        print(f"{count:>6} kills at {where}")
    print(
        f"{words.trials - failed} of {words.trials} killed runs ended with the bytes of the undisturbed one"
        f" ({kills.total()} kills, seed {words.seed})"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
