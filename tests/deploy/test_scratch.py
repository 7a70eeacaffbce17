"""Temporary folders with keys and images in them: whatever ends a process, nobody is left with its folder for long."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from factories import WAIT
from flyby.deploy import local
from flyby.deploy.local import Federation
from flyby.deploy.scratch import MARK, Scratch, take_dead

FEDERATION = """
import os, signal
from flyby.deploy import local
from flyby.deploy.credentials import write_node_keys
local.check_flower = lambda: None  # its folder and its keys need no Flower
federation = local.Federation()
write_node_keys(federation.folder / "keys", "a")
print(federation.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary ones that is the test's own, and its children's too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def killed(code: str) -> Path:
    """What a process that ends itself the hard way said before: the folder it leaves."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return Path(ended.stdout.strip())


def test_the_keys_of_a_killed_federation_go_when_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed(FEDERATION)
    assert (left / "keys" / "a-node.key").exists()
    monkeypatch.setattr(local, "check_flower", lambda: None)
    following = Federation()
    assert not left.exists()
    assert following.folder.exists()
    following.close()
    assert not following.folder.exists()


def test_a_living_one_is_left_alone(place: Path) -> None:
    with Scratch("flyby-sites") as one, Scratch("flyby-sites") as two:
        (one / "images.npz").write_bytes(b"private")
        assert take_dead("flyby-sites") == []
        assert (one / "images.npz").exists()
        assert one.stat().st_mode & 0o777 == two.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []


def test_only_dead_folders_of_the_kind_go(place: Path) -> None:
    precious = place / "precious"
    precious.mkdir()
    (precious / MARK).write_text("")
    (place / "flyby-sites-linked_1").symlink_to(precious)  # as ours are called, and a link
    for name in ("flyby-sites-x", "flyby-sites-abcdefgh.old", "other-abcdefgh", "flyby-site-abcdefgh"):
        (place / name).mkdir()
        (place / name / MARK).write_text("")
    (place / "flyby-sites-nomarkyt").mkdir()  # not known to be ours
    (place / "flyby-sites-linkmark").mkdir()
    (place / "flyby-sites-linkmark" / MARK).symlink_to(precious / MARK)
    (place / "flyby-sites-filefile").write_text("a file")
    os.mkfifo(place / "flyby-sites-pipepipe")
    before = sorted(path.name for path in place.iterdir())
    (place / "flyby-sites-deaddead").mkdir()
    (place / "flyby-sites-deaddead" / MARK).write_text("")
    assert [path.name for path in take_dead("flyby-sites")] == ["flyby-sites-deaddead"]
    assert sorted(path.name for path in place.iterdir()) == before
    assert (precious / MARK).exists()


def test_another_users_folder_is_not_touched(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = place / "flyby-sites-deaddead"
    left.mkdir()
    (left / MARK).write_text("")
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    assert take_dead("flyby-sites") == []
    assert left.exists()


def test_a_folder_that_somebody_still_writes_into_goes_when_he_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    removed, late = shutil.rmtree, [1, 2]

    def hindered(path: Path, **words: bool) -> None:
        removed(path, **words)
        if late and late.pop():
            path.mkdir()
            (path / "state.db").touch()

    monkeypatch.setattr(shutil, "rmtree", hindered)
    one = Scratch("flyby-sites")
    one.close()
    assert not one.path.exists()
    assert not late
