"""The suite itself: a worker that dies, or a test that nothing stops, ends the run soon and with a failure; Ctrl-C is
heard where whoever started the run does not hear it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from factories import WAIT

HERE = Path(__file__).parent
KILLED = """
import os, pathlib, signal
def test_killed():
    pathlib.Path(__file__).with_suffix(".over").touch()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        pathlib.Path(__file__).with_suffix(".deaf").touch()
    os.kill(os.getpid(), 9)
"""
LONG = "import time\ndef test_long(): time.sleep(3000)"
DEAF = """
import ctypes, pathlib, signal
def test_deaf():
    pathlib.Path(__file__).with_suffix(".over").touch()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    ctypes.PyDLL(None).sleep(3000)  # no other thread runs meanwhile
"""


@pytest.mark.slow
@pytest.mark.parametrize("files", [(KILLED, LONG), (DEAF, LONG)], ids=["killed", "deaf"])
def test_a_run_that_lost_a_worker_ends_within_a_minute(
    tmp_path: Path, files: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """As a script starts it with ``&``, where nobody hears Ctrl-C."""
    assert request.config.pluginmanager.has_plugin("ending"), "conftest.py has it too"
    shutil.copy(HERE / "ending.py", tmp_path / "conftest.py")
    for number, code in enumerate(files):
        (tmp_path / f"test_{number}.py").write_text(code)
    words = ["-c", HERE.parent / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider", "-n", 2, tmp_path]
    quick = ["-o", "timeout=2", "-o", "faulthandler_timeout=4"] if DEAF in files else []
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *quick, *map(str, words)],
        env={name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    seconds = time.time() - min(path.stat().st_mtime for path in tmp_path.glob("*.over"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "died in test_" in ended.stdout
    assert seconds < 60
    assert not list(tmp_path.glob("*.deaf")), "Ctrl-C is not heard"
