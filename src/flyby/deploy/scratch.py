"""Private temporary folders that hold keys or a site's images, and that nobody is left with: what a killed process
could not take away, the next one does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from flyby.files import open_lock

MARK = ".flyby-owner"  # locked for as long as the folder's process lives: the system lets go of it whatever ends that
PATIENCE = 5.0  # seconds in which a folder must go


class Scratch:
    """A temporary folder of this process, of one ``kind``. On the way in, those of the same kind whose processes are
    dead go."""

    def __init__(self, kind: str) -> None:
        take_dead(kind)
        self.path = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
        self._lock: IO[bytes] = open_lock(self.path / f"{MARK}.new")
        with contextlib.suppress(OSError):  # a file system without locks: nobody will take it for dead
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.replace(self.path / f"{MARK}.new", self.path / MARK)  # nobody sees a mark that is not held yet

    def close(self) -> None:
        """Take the folder away. A program that is just ending may still write into it, so it is tried for a while."""
        limit = time.monotonic() + PATIENCE
        shutil.rmtree(self.path, ignore_errors=True)
        while self.path.exists() and time.monotonic() < limit:
            time.sleep(0.05)
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def take_dead(kind: str) -> list[Path]:
    """Takes away this user's folders of a kind whose mark nobody holds; returns them. A folder without a mark is not
    known to be one of ours, and stays."""
    ours = re.compile(rf"{re.escape(kind)}-[a-z0-9_]{{8}}")
    dead = []
    for folder in Path(tempfile.gettempdir()).iterdir():
        if not ours.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):
            there = folder.lstat()
            if stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid() and _let_go(folder / MARK):
                shutil.rmtree(folder, ignore_errors=True)
                dead.append(folder)
    return dead


def _let_go(mark: Path) -> bool:
    if not mark.is_file() or mark.is_symlink():
        return False
    with open_lock(mark) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # somebody holds it, or nobody can say
            return False
    return True
