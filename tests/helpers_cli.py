"""The command line, called in this process (quick) or in one of its own (real), and small data to call it on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flyby import cli
from helpers_data import make_npz

CLASSES = 3
WAIT = 120.0


@dataclass(frozen=True)
class Answer:
    """What a command left behind: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call(*words: object) -> Answer:
    """``flyby WORDS`` in this process, exit code and all."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["flyby", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
    return Answer(int(left.value.code or 0), out.getvalue(), err.getvalue())


def done(*words: object) -> Answer:
    """A call that must succeed."""
    answer = call(*words)
    assert answer.code == 0, answer.err
    return answer


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "flyby", *map(str, words)]


def execute(*words: object, cwd: Path | None = None) -> Answer:
    """``flyby WORDS`` as a process of its own."""
    ended = subprocess.run(command(*words), capture_output=True, text=True, timeout=WAIT, cwd=cwd, check=False)
    return Answer(ended.returncode, ended.stdout, ended.stderr)


def start(*words: object) -> subprocess.Popen[str]:
    """A process in a session of its own, so that a signal to its group reaches its workers too, as Ctrl-C in a terminal does."""
    return subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = WAIT, process: subprocess.Popen[str] | None = None) -> None:
    """Poll until something holds; a process that ends before it does, or that is waited for too long, does not stay behind."""
    limit = time.monotonic() + seconds
    while not condition():
        if process is not None and (process.poll() is not None or time.monotonic() >= limit):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"no {what} was seen before the process ended with {process.wait()}: {process.communicate()}")
        assert time.monotonic() < limit, f"waited {seconds:g} s for {what}"
        time.sleep(0.005)


def finish(process: subprocess.Popen[str], number: signal.Signals | None = None, *, group: bool = True) -> Answer:
    """Send a signal, if one is given, and wait for the end."""
    if number is not None:
        (os.killpg if group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=WAIT)
    return Answer(process.returncode, out, err)


def members(session: int) -> list[int]:
    """The processes of a session that still run; the dead that nobody has collected yet do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(owner) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def one_line(answer: Answer, code: int = 2) -> str:
    """The single line that a failed command owes; returns it without its prefix."""
    assert answer.code == code, (answer.code, answer.err)
    assert answer.err.endswith("\n"), answer.err
    assert answer.err.count("\n") == 1, answer.err
    assert answer.err.startswith("flyby: "), answer.err
    assert "Traceback" not in answer.err
    return answer.err.removeprefix("flyby: ").strip()


def stripes(count: int, seed: int = 0, size: int = 8) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Grey images of three kinds that are easy to tell apart (rows, columns, checks) under noise, and their labels 0, 1, 2 in turn."""
    random = np.random.RandomState(seed)
    row, column = np.indices((size, size)) // 2 % 2
    kinds = np.stack((row, column, row ^ column)) * 150
    labels = np.arange(count) % CLASSES
    images = kinds[labels] + random.randint(0, 100, (count, size, size))
    return images.astype(np.uint8)[:, :, :, None], labels.astype(np.int64)


def make_stripes(path: Path, count: int = 240, test: int = 60) -> Path:
    """An .npz of stripes with a test split."""
    (x_train, y_train), (x_test, y_test) = stripes(count), stripes(test, seed=1)
    return make_npz(
        path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, class_names=np.array(["rows", "columns", "checks"])
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics without the one number that is a stop-watch's."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "samples_per_second"} for row in rows]


def result_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return loaded


TIMED = ("seconds", "timings", "trained", "peak_memory_mb", "command", "engine")


def same_run(left: Path, right: Path) -> None:
    """Two run folders hold the same numbers, byte for byte where bytes are promised."""
    names = sorted(p.name for p in (left / "parcels").glob("*.parcel"))
    assert names
    assert names == sorted(p.name for p in (right / "parcels").glob("*.parcel"))
    for name in ["split.json", "ledger.json", "global/model.safetensors", *(f"parcels/{n}" for n in names)]:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    assert rows_of(left) == rows_of(right)
    assert {k: v for k, v in result_of(left).items() if k not in TIMED} == {k: v for k, v in result_of(right).items() if k not in TIMED}
