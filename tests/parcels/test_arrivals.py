"""Waiting at a folder: what is whole is taken, what grows is awaited, what is wrong is named, and every wait ends by
itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import WAIT, Answer, call, done, finish, make_stripes, one_line, start, wait_for
from flyby.errors import BadInput
from flyby.models import ModelSpec
from flyby.parcels import arrivals as watch
from flyby.parcels import parcel
from flyby.parcels.arrivals import Arrivals, Quorum, Waiting, Watched, gather, seconds
from flyby.parcels.parcel import Manifest
from flyby.rng import generator


def check(path: Path) -> Manifest:
    return parcel.read(path).manifest


def made(sender: str, seed: int = 0) -> bytes:
    """A real, small parcel as bytes."""
    spec = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8))
    weights = spec.build(generator(seed, "shared", "init")).state_dict()
    return parcel.to_bytes(
        parcel.make(
            sender=sender,
            method="supervised",
            spec=spec,
            class_names=("a", "b", "c"),
            weights=weights,
            samples=10,
            counts=(5, 3, 2),
        )
    )


BYTES = {name: made(name) for name in ("ann", "bob", "cid")}


class Clock:
    """A clock that moves only when somebody sleeps, and does something at given times."""

    def __init__(self, *events: tuple[float, Callable[[], object]]) -> None:
        self.now, self.events, self.sleeps = 100.0, sorted(events, key=lambda event: event[0]), list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, pause: float) -> None:
        assert pause >= 0
        self.sleeps.append(pause)
        self.now += max(pause, 1e-6)
        while self.events and 100.0 + self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


def wait(
    inbox: Path, quorum: Quorum, clock: Clock | None = None, deadline: float | None = 60.0, poll: float = 5.0
) -> Arrivals:
    clock = clock or Clock()
    return gather(inbox, check, quorum, deadline=deadline, poll=poll, clock=clock, sleep=clock.sleep)


def put(inbox: Path, sender: str, name: str = "") -> Path:
    path = inbox / (name or f"{sender}.parcel")
    path.write_bytes(BYTES[sender])
    return path


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


# -- words


def test_durations() -> None:
    assert [seconds(text) for text in ("90s", "10m", "2h", "1d", "1h30m", "0.5s")] == [90, 600, 7200, 86400, 5400, 0.5]
    for text in ("", "90", "2 h", "h", "-1s", "0s", "1w", "1h30", "nan", "99999999d"):
        with pytest.raises(BadInput, match="is not a duration; write 90s, 10m, 2h"):
            seconds(text)
    assert [watch.duration(n) for n in (0.4, 59, 59.9, 60, 7140, 7199, 86400)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 min",
        "1 h 59 min",
        "2 h 00 min",
        "24 h 00 min",
    ]


def test_who_is_awaited() -> None:
    assert Quorum.of(None, None) == Quorum(None, frozenset(), 1)
    assert Quorum.of("5", None) == Quorum(5, frozenset(), 5)
    assert Quorum.of("5", 3) == Quorum(5, frozenset(), 3)
    assert Quorum.of("ann, bob", 1) == Quorum(2, frozenset({"ann", "bob"}), 1)
    assert Quorum.of("7,", None).number == 7
    for expect, least in (("0", None), ("", None), (",", None), ("2", 3), ("ann", 2), (None, 0)):
        with pytest.raises(BadInput, match=r"--expect|--min-sites"):
            Quorum.of(expect, least)


@given(st.lists(st.sampled_from("smhd"), min_size=1, max_size=4, unique=True), st.integers(1, 99))
def test_a_duration_is_the_sum_of_its_parts(units: list[str], number: int) -> None:
    assert seconds("".join(f"{number}{unit}" for unit in units)) == sum(number * watch.UNITS[unit] for unit in units)


# -- one look


def test_partial_names_are_ignored_and_whole_files_taken(inbox: Path) -> None:
    put(inbox, "ann")
    for name in (
        ".bob.parcel.Xy12Ab",
        "bob.parcel.part",
        "bob.parcel.filepart",
        ".bob.parcel",
        "bob.parcel~",
        "notes.txt",
    ):
        put(inbox, "bob", name)
    arrivals = wait(inbox, Quorum(1))
    assert arrivals.senders == ["ann"]
    assert (arrivals.refused, arrivals.unfinished, arrivals.waited) == ({}, {}, 0)


def test_a_file_that_grows_is_not_whole_until_its_last_byte(inbox: Path) -> None:
    seen = Watched(inbox, check)
    path = inbox / "ann.parcel"
    whole = BYTES["ann"]
    for size in (0, 1, 8, 27, 28, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert seen.look()
        assert not seen.look(), "nothing changed"
        arrivals = seen.arrivals()
        assert (arrivals.senders, list(arrivals.unfinished), arrivals.refused) == ([], ["ann.parcel"], {})
    path.write_bytes(whole)
    assert seen.look()
    assert seen.arrivals().senders == ["ann"]
    assert seen.arrivals().unfinished == {}


def test_a_corrupt_file_is_refused_and_not_read_again_until_it_changes(inbox: Path) -> None:
    read: list[str] = []

    def counting(path: Path) -> Manifest:
        read.append(path.name)
        return check(path)

    seen = Watched(inbox, counting)
    broken = bytearray(BYTES["ann"])
    broken[-1] ^= 1
    (inbox / "ann.parcel").write_bytes(broken)
    (inbox / "cat.parcel").write_bytes(b"\xff\xd8\xff a picture")
    (inbox / "long.parcel").write_bytes(BYTES["bob"] + b"x")
    for _ in range(3):
        seen.look()
    assert sorted(read) == ["ann.parcel", "cat.parcel", "long.parcel"], "once each"
    refused = seen.arrivals().refused
    assert "SHA-256 differs" in refused["ann.parcel"]
    assert "looks like a JPEG" in refused["cat.parcel"]
    assert "bytes after its end" in refused["long.parcel"]
    assert len(seen.arrivals().rejected) == 3
    put(inbox, "ann")
    seen.look()
    assert seen.arrivals().senders == ["ann"]
    assert "ann.parcel" not in seen.arrivals().refused


def test_what_is_no_file_is_never_opened(inbox: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.parcel"
    outside.write_bytes(BYTES["ann"])
    (inbox / "link.parcel").symlink_to(outside)
    (inbox / "loop.parcel").symlink_to(inbox / "loop.parcel")
    (inbox / "folder.parcel").mkdir()
    os.mkfifo(inbox / "pipe.parcel")  # opening it would wait for a writer for ever
    with socket.socket(socket.AF_UNIX) as plug:
        here = os.open(inbox, os.O_RDONLY)
        try:
            plug.bind(f"/proc/self/fd/{here}/plug.parcel")  # a short name: a socket's may have 107 bytes
        finally:
            os.close(here)
        opened: list[Path] = []
        seen = Watched(inbox, lambda path: opened.append(path) or check(path))  # type: ignore[func-returns-value]
        seen.look()
    assert opened == []
    arrivals = seen.arrivals()
    assert arrivals.parcels == {}
    assert arrivals.rejected == []
    kinds = {name: reason.split(" is a ")[1].split(",")[0] for name, reason in arrivals.refused.items()}
    assert kinds == {
        "folder.parcel": "folder",
        "link.parcel": "symbolic link",
        "loop.parcel": "symbolic link",
        "pipe.parcel": "named pipe",
        "plug.parcel": "device or socket",
    }


def test_two_files_of_one_sender_count_once(inbox: Path) -> None:
    put(inbox, "ann", "2.parcel")
    put(inbox, "ann", "1.parcel")
    (inbox / "3.parcel").write_bytes(made("ann", seed=1))
    seen = Watched(inbox, check)
    seen.look()
    arrivals = seen.arrivals()
    assert [path.name for path in arrivals.parcels] == ["1.parcel"]
    assert "the same parcel as 1.parcel" in arrivals.refused["2.parcel"]
    assert "another parcel than 1.parcel" in arrivals.refused["3.parcel"]
    (inbox / "1.parcel").unlink()
    seen.look()
    assert [path.name for path in seen.arrivals().parcels] == ["2.parcel"], "what is there decides"


def test_a_file_that_goes_away_or_is_cut_short_again_no_longer_counts(inbox: Path) -> None:
    seen = Watched(inbox, check)
    put(inbox, "ann")
    put(inbox, "bob")
    seen.look()
    assert seen.arrivals().senders == ["ann", "bob"]
    (inbox / "ann.parcel").unlink()
    (inbox / "bob.parcel").write_bytes(BYTES["bob"][:100])
    seen.look()
    assert seen.arrivals().senders == []


def test_trouble_of_the_system_is_tried_again_though_the_file_did_not_change(inbox: Path) -> None:
    troubles = [True, True, False]

    def flaky(path: Path) -> Manifest:
        if troubles.pop(0):
            try:
                raise OSError(5, "Input/output error")
            except OSError:
                raise BadInput(f"cannot read {path}") from None
        return check(path)

    put(inbox, "ann")
    seen = Watched(inbox, flaky)
    for expected in ([], [], ["ann"], ["ann"]):
        seen.look()
        assert seen.arrivals().senders == expected


def test_names_of_strangers_are_printed_on_one_line(inbox: Path) -> None:
    (inbox / "a\nb\x1b[2J.parcel").write_bytes(b"no")
    seen = Watched(inbox, check)
    seen.look()
    ((name, reason),) = seen.arrivals().refused.items()
    assert (name + reason).isprintable()


# -- a wait


def test_it_ends_as_soon_as_all_who_are_expected_are_there(inbox: Path) -> None:
    put(inbox, "ann")
    clock = Clock(
        (20, lambda: put(inbox, "bob", ".bob.parcel.part")),
        (30, lambda: (inbox / ".bob.parcel.part").rename(inbox / "bob.parcel")),
    )
    arrivals = wait(inbox, Quorum.of("2", None), clock, deadline=3600)
    assert arrivals.senders == ["ann", "bob"]
    assert 30 <= arrivals.waited <= 35.1
    assert max(clock.sleeps) <= 5, "--poll is the longest pause"
    assert clock.sleeps[0] == pytest.approx(0.1), "short pauses while something happens"


def test_expected_names_keep_strangers_out(inbox: Path) -> None:
    put(inbox, "cid", "aaa.parcel")
    put(inbox, "ann")
    arrivals = wait(inbox, Quorum.of("ann,bob", None), Clock((3, lambda: put(inbox, "bob"))))
    assert arrivals.senders == ["ann", "bob"]
    assert "comes from cid, who is not expected" in arrivals.refused["aaa.parcel"]
    assert arrivals.files(rejected=True) == arrivals.files(), "it passed the check, so it is nobody's to put aside"


def test_at_the_deadline_the_quorum_is_enough_and_what_is_late_is_named(inbox: Path) -> None:
    put(inbox, "ann")
    put(inbox, "bob")
    (inbox / "cid.parcel").write_bytes(BYTES["cid"][:300])
    arrivals = wait(inbox, Quorum.of("3", 2), deadline=60)
    assert arrivals.senders == ["ann", "bob"]
    assert list(arrivals.unfinished) == ["cid.parcel"]
    assert arrivals.waited == pytest.approx(60, abs=0.01)
    assert arrivals.late() == []
    put(inbox, "cid", "dan.parcel")
    assert arrivals.late() == ["dan.parcel"]
    assert arrivals.row()["late"] == ["dan.parcel"]


def test_enough_end_the_wait_once_nothing_more_comes(inbox: Path) -> None:
    clock = Clock(*((at, lambda name=name: put(inbox, name)) for at, name in ((20, "ann"), (30, "bob"), (37, "cid"))))
    arrivals = wait(inbox, Quorum.of(None, 2), clock, deadline=7200)
    assert arrivals.senders == ["ann", "bob", "cid"], "one that comes while it settles is taken along"
    assert 47 <= arrivals.waited <= 53, "ten seconds after the last, not two hours"
    assert wait(inbox, Quorum.of(None, 2), deadline=None).waited == pytest.approx(10, abs=0.01), "it needs no deadline"


def test_a_file_that_grows_puts_off_the_end_and_the_deadline_does_not_wait_for_it(inbox: Path) -> None:
    put(inbox, "ann")
    whole, slow = BYTES["bob"], inbox / "bob.parcel"
    parts = [(at, lambda n=n: slow.write_bytes(whole[: 100 * n])) for n, at in enumerate((5, 12, 19), 1)]
    arrivals = wait(inbox, Quorum.of(None, 1), Clock(*parts, (26, lambda: slow.write_bytes(whole))), deadline=3600)
    assert arrivals.senders == ["ann", "bob"]
    slow.write_bytes(whole[:300])
    growing = Clock(*((at, lambda n=at: slow.write_bytes(whole[: 300 + n])) for at in range(1, 60, 4)))
    arrivals = wait(inbox, Quorum.of(None, 1), growing, deadline=30)
    assert (arrivals.senders, list(arrivals.unfinished)) == (["ann"], ["bob.parcel"])
    assert arrivals.waited == pytest.approx(30, abs=0.01)


def test_too_few_wait_for_the_whole_deadline_and_who_says_nothing_does_too(inbox: Path) -> None:
    put(inbox, "ann")
    with pytest.raises(BadInput, match="1 of at least 2 sites came"):
        wait(inbox, Quorum.of(None, 2), deadline=60)
    assert wait(inbox, Quorum.of(None, None), deadline=60).waited == pytest.approx(60, abs=0.01)
    away = Clock((9, lambda: (inbox / "ann.parcel").unlink()), (40, lambda: put(inbox, "bob")))
    arrivals = wait(inbox, Quorum.of(None, 1), away, deadline=3600)
    assert (arrivals.senders, 50 <= arrivals.waited <= 56) == (["bob"], True), "one that is taken back no longer counts"


def test_what_is_there_at_the_very_deadline_still_counts(inbox: Path) -> None:
    arrivals = wait(inbox, Quorum.of(None, 1), Clock((60, lambda: put(inbox, "ann"))), deadline=60)
    assert arrivals.senders == ["ann"]


def test_too_few_at_the_deadline_is_one_line_that_says_who_came(inbox: Path) -> None:
    put(inbox, "ann")
    (inbox / "bob.parcel").write_bytes(BYTES["bob"][:300])
    (inbox / "cat.parcel").write_bytes(b"no parcel")
    with pytest.raises(BadInput) as caught:
        wait(inbox, Quorum.of("ann,bob,cid", 2), deadline=90)
    message = str(caught.value)
    assert message.startswith(
        "1 of at least 2 sites came within 2 min: ann; missing: bob, cid; not whole: bob.parcel; refused: cat.parcel ("
    )
    assert "\n" not in message


def test_a_wait_that_nothing_would_end_is_refused(inbox: Path) -> None:
    with pytest.raises(BadInput, match="nothing would end the wait; add --deadline 2h, --min-sites N, or --expect"):
        wait(inbox, Quorum(), deadline=None)
    with pytest.raises(BadInput, match="is not a folder"):
        wait(inbox / "absent", Quorum(1))
    with pytest.raises(BadInput, match="they need --watch"):
        Waiting.of(False, "2h", None, None, "5s")
    assert Waiting.of(False, None, None, None, "5s") is None


def test_a_folder_that_is_away_for_a_while_is_looked_at_again(inbox: Path) -> None:
    put(inbox, "ann")
    away = inbox.with_name("away")
    back = Clock((1, lambda: inbox.rename(away)), (20, lambda: away.rename(inbox)), (30, lambda: put(inbox, "bob")))
    assert wait(inbox, Quorum.of("2", None), back).senders == ["ann", "bob"]
    with pytest.raises(BadInput, match="cannot be read"):
        wait(inbox, Quorum.of("3", 1), Clock((1, lambda: inbox.rename(away))))


def test_a_clock_that_is_set_changes_nothing(inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([0.0, 4e9, -4e9] * 1000)
    monkeypatch.setattr("time.time", lambda: next(jumps))
    monkeypatch.setattr("time.time_ns", lambda: int(next(jumps) * 1e9))
    put(inbox, "ann")
    os.utime(inbox / "ann.parcel", (4e9, 4e9))  # from the year 2096
    arrivals = gather(inbox, check, Quorum.of("2", 1), deadline=0.3)
    assert arrivals.senders == ["ann"]
    assert 0.3 <= arrivals.waited < 30


def test_plain_lines_where_there_is_no_terminal(inbox: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flyby")
    put(inbox, "ann")
    (inbox / "x.parcel").write_bytes(b"no")
    wait(inbox, Quorum.of("ann,bob", None), Clock((5, lambda: put(inbox, "bob"))))
    lines = caplog.messages
    assert lines[:2] == ["ann is there: ann.parcel", f"refused: {inbox}/x.parcel is not a parcel"]
    assert lines[2] == "waiting: 1 of 2 there: ann; missing: bob; 1 refused; 1 min left"
    assert lines[3:] == [
        "bob is there: bob.parcel",
        f"waiting: 2 of 2 there: ann, bob; 1 refused; {lines[4].split('; ')[-1]}",
    ]


def test_a_living_line_on_a_terminal(inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    put(inbox, "ann")
    wait(inbox, Quorum.of("ann", None))
    assert "ann is there: ann.parcel" in screen.getvalue()


# -- the commands, with real processes


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three sites' trained parcels and their data."""
    folder = tmp_path_factory.mktemp("sent")
    data = make_stripes(folder / "stripes.npz", 120)
    for name in ("ann", "bob", "cid"):
        done(
            "train",
            "--data",
            data,
            "--out",
            folder / f"{name}.parcel",
            "--model",
            "mlp",
            "--epochs",
            2,
            "--quiet",
            "--device",
            "cpu",
        )
    return folder


def fuse(inbox: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("fuse", "--watch", inbox, "--out", out, "--no-export", "--device", "cpu", "--poll", "0.2s", *more)


SLOWLY = """
import sys, time
data = open(sys.argv[1], "rb").read()
with open(sys.argv[2], "wb") as file:
    for i in range(0, len(data), len(data) // 20):
        file.write(data[i : i + len(data) // 20]); file.flush(); time.sleep(0.05)
"""


def test_fuse_waits_for_a_file_that_another_process_writes_slowly(inbox: Path, sent: Path, tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        (inbox / f"{name}.parcel").write_bytes((sent / f"{name}.parcel").read_bytes())
    writer = subprocess.Popen([sys.executable, "-c", SLOWLY, str(sent / "cid.parcel"), str(inbox / "cid.parcel")])
    try:
        answer = done(*fuse(inbox, tmp_path / "global", "--expect", "ann,bob,cid", "--deadline", "10m", "--json"))
    finally:
        assert writer.wait(WAIT) == 0
    assert answer.json["sites"] == 3
    assert answer.json["watch"]["senders"] == ["ann", "bob", "cid"]
    assert answer.json["watch"]["refused"] == {}
    plain = done(
        "fuse",
        *(sent / f"{n}.parcel" for n in ("ann", "bob", "cid")),
        "--out",
        tmp_path / "plain",
        "--no-export",
        "--device",
        "cpu",
    )
    assert plain.code == 0
    for name in ("model.safetensors", "model.json", "ledger.json"):
        assert (tmp_path / "global" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), (
            "a watch changes no number"
        )


def test_fuse_goes_on_with_a_quorum_and_names_what_it_left_out(inbox: Path, sent: Path, tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        (inbox / f"{name}.parcel").write_bytes((sent / f"{name}.parcel").read_bytes())
    (inbox / "cid.parcel").write_bytes((sent / "cid.parcel").read_bytes()[:-5])
    broken = bytearray((sent / "cid.parcel").read_bytes())
    broken[-1] ^= 1
    (inbox / "dan.parcel").write_bytes(broken)
    os.mkfifo(inbox / "pipe.parcel")
    before = sorted((p.name, p.lstat().st_mtime_ns) for p in inbox.iterdir())
    words = ("--deadline", "0.5s", "--min-sites", 2, "--quarantine", tmp_path / "aside", "--json")
    answer = done(*fuse(inbox, tmp_path / "global", *words))
    assert answer.json["sites"] == 2
    assert sorted(answer.json["watch"]["refused"]) == ["dan.parcel", "pipe.parcel"]
    assert list(answer.json["watch"]["unfinished"]) == ["cid.parcel"]
    assert "note: not whole in time: cid.parcel" in answer.err
    assert "dan.parcel" in "".join(p.name for p in (tmp_path / "aside").iterdir()), (
        "the gate put aside what the watch refused"
    )
    after = sorted((p.name, p.lstat().st_mtime_ns) for p in inbox.iterdir())
    assert after == [entry for entry in before if entry[0] != "dan.parcel"], "else the inbox is only looked at"


def test_too_few_is_exit_code_2_and_a_misspelt_rule_does_not_wait(inbox: Path, sent: Path, tmp_path: Path) -> None:
    (inbox / "ann.parcel").write_bytes((sent / "ann.parcel").read_bytes())
    answer = call(*fuse(inbox, tmp_path / "global", "--deadline", "0.3s", "--min-sites", 2))
    assert answer.code == 2
    last = answer.err.splitlines()[-1]
    assert last.startswith("flyby: 1 of at least 2 sites came within 0 s: ann. ")
    assert last.endswith("wait longer, or --min-sites 1 to go on without the others"), last
    assert not (tmp_path / "global").exists()
    assert "did you mean" in one_line(
        call(*fuse(inbox, tmp_path / "global", "--deadline", "9d", "--fusion", "fedavgg"))
    )
    assert "and not both" in one_line(call(*fuse(inbox, tmp_path / "global", sent / "ann.parcel", "--deadline", "9d")))
    assert "--watch" in one_line(call("fuse", sent / "ann.parcel", "--out", tmp_path / "global", "--deadline", "9d"))


def test_ctrl_c_leaves_everything_as_it_was_and_the_same_command_goes_on(
    inbox: Path, sent: Path, tmp_path: Path
) -> None:
    (inbox / "ann.parcel").write_bytes((sent / "ann.parcel").read_bytes())
    out = tmp_path / "global"
    words = fuse(inbox, out, "--expect", 2, "--deadline", "10m")
    process = start(*words)
    wait_for(lambda: (tmp_path / ".global.lock").exists(), "lock", process=process)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("ann is there")
    assert "another flyby process is working" in one_line(call(*words)), "one process an output"
    answer: Answer = finish(process, signal.SIGINT)
    assert answer.code == 130
    assert answer.err.splitlines()[-1] == "flyby: interrupted; the same command goes on from here"
    assert [p.name for p in inbox.iterdir()] == ["ann.parcel"]
    assert [p.name for p in tmp_path.iterdir()] == ["inbox"], "no lock and no half-written folder is left"
    (inbox / "bob.parcel").write_bytes((sent / "bob.parcel").read_bytes())
    assert "from 2 sites" in done(*words).out


def test_orient_waits_for_neighbours_and_does_not_count_itself(inbox: Path, sent: Path, tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        (inbox / f"{name}.parcel").write_bytes((sent / f"{name}.parcel").read_bytes())
    words = (
        "orient",
        "--own",
        sent / "ann.parcel",
        "--received",
        inbox,
        "--data",
        sent / "stripes.npz",
        "--out",
        tmp_path / "mine",
        "--no-export",
        "--device",
        "cpu",
        "--set",
        "epochs=1",
        "--set",
        "orient.distill_epochs=1",
        "--set",
        "orient.distill_steps=0",
        "--watch",
        "--poll",
        "0.2s",
    )
    short = call(*words, "--deadline", "0.3s", "--min-sites", 2)
    assert short.code == 2
    assert "1 of at least 2 sites came within 0 s: bob; refused: ann.parcel" in short.err
    os.mkfifo(inbox / "pipe.parcel")
    (inbox / "cid.parcel").write_bytes((sent / "cid.parcel").read_bytes())
    answer = done(*words, "--expect", 2, "--deadline", "10m", "--json")
    assert answer.json["used"] == 2
    assert answer.json["watch"]["senders"] == ["bob", "cid"]
