"""Files as transport: wait at a folder until enough parcels lie in it whole, then say who came.

For people whose parcels travel by scp, rsync, object storage or a delay-tolerant network. The folder is only looked at,
never written to, and is looked at again and again (remote file systems tell nobody of changes). What is there now
decides, nothing is remembered on disk: a watch that was killed goes on when the same command is given again.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyby.errors import BadInput
from flyby.names import printable
from flyby.parcels.container import Truncated
from flyby.parcels.parcel import Manifest

Check = Callable[[Path], Manifest]
Stamp = tuple[int, int, int, int]

SUFFIX = ".parcel"
QUICK = 0.1  # seconds between looks while something happens
REMIND = 60.0  # seconds between plain lines while nothing does
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

log = logging.getLogger(__name__)


def seconds(text: str, option: str = "--deadline") -> float:
    """A duration such as ``90s``, ``10m``, ``2h``, ``1d`` or ``1h30m``, in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    total = sum(float(number) * UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not 0 < total < 1e9:
        raise BadInput(f"{option} {text!r} is not a duration; write 90s, 10m, 2h, 1d or 1h30m")
    return total


@dataclass(frozen=True)
class Quorum:
    """Who is awaited: ``names`` or at least ``number`` senders end the wait at once; ``least`` senders are enough at
    the deadline, and before it (``soon``) where nobody said how many there will be."""

    number: int | None = None
    names: frozenset[str] = frozenset()
    least: int = 1
    soon: bool = False

    @classmethod
    def of(cls, expect: str | None, least: int | None) -> Quorum:
        """From ``--expect N`` or ``--expect a,b,c`` and ``--min-sites``; without the latter all who are expected must
        come."""
        words = [word.strip() for word in (expect or "").split(",") if word.strip()]
        names = frozenset() if len(words) == 1 and words[0].isdecimal() else frozenset(words)
        number = len(names) if names else int(words[0]) if words else None
        if number == 0 or (expect is not None and number is None):
            raise BadInput(f"--expect {expect!r} names nobody; give a number of sites, or their names with commas")
        if least is not None and not 1 <= least <= (number or least):
            raise BadInput(
                f"--min-sites {least} must be at least 1"
                + (f" and at most the {number} that are expected" if number else "")
            )
        return cls(number, names, least or number or 1, soon=number is None and least is not None)

    def complete(self, senders: set[str]) -> bool:
        return self.number is not None and len(senders) >= self.number

    def enough(self, senders: set[str]) -> bool:
        """Whether the wait may end once nothing more arrives."""
        return self.soon and len(senders) >= self.least

    def missing(self, senders: set[str]) -> list[str]:
        return sorted(self.names - senders)


@dataclass
class Arrivals:
    """What lies in the inbox: ``parcels`` that may be used, in file-name order; ``refused`` files and ``unfinished``
    ones with the reason."""

    inbox: Path
    parcels: dict[Path, Manifest] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    rejected: list[Path] = field(default_factory=list)
    seen: frozenset[str] = frozenset()
    waited: float = 0.0

    @property
    def senders(self) -> list[str]:
        return [manifest.sender for manifest in self.parcels.values()]

    def files(self, rejected: bool = False) -> list[Path]:
        """What may be used; with ``rejected`` also the files that the check refused, for whoever puts such files
        aside."""
        return [*self.parcels, *(self.rejected if rejected else ())]

    def late(self) -> list[str]:
        """Parcel files that appeared after the wait ended; they took no part."""
        try:
            return sorted(printable(name) for name in set(_names(self.inbox)) - self.seen)
        except OSError:
            return []

    def row(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "inbox": str(self.inbox),
            "senders": self.senders,
            "refused": self.refused,
            "unfinished": self.unfinished,
            "late": self.late(),
            "seconds": round(self.waited, 3),
        }


class Watched:
    """A folder under watch. Every look judges only what is new or changed: a file's inode, size and times say which."""

    def __init__(self, folder: Path, check: Check, names: frozenset[str] = frozenset()) -> None:
        self.folder, self.check, self.names = folder, check, names
        self.trouble = ""
        self._stamps: dict[str, Stamp] = {}
        self._found: dict[str, Manifest] = {}
        self._refused: dict[str, str] = {}
        self._unfinished: dict[str, str] = {}
        self._unreadable: set[str] = set()
        self._rejected: set[str] = set()

    def look(self) -> bool:
        """Bring the picture up to date; whether anything in the folder changed since the last look."""
        try:
            stamps = {
                name: status for name in _names(self.folder) if (status := _status(self.folder / name)) is not None
            }
            self.trouble = ""
        except OSError as error:
            # A network folder that is away for a while; what was seen stays seen until it can be read again.
            self.trouble = f"{self.folder} cannot be read ({error.strerror or error})"
            return False
        changed = False
        for name in [name for name in self._stamps if name not in stamps]:
            self._forget(name)
            changed = True
        for name, (kind, stamp) in stamps.items():
            new = self._stamps.get(name) != stamp
            # The system's trouble is over one day, and the file need not change for that.
            if new or name in self._unreadable:
                changed = changed or new
                self._forget(name)
                self._stamps[name] = stamp
                self._judge(name, kind)
        return changed

    def _forget(self, name: str) -> None:
        for known in (self._stamps, self._found, self._refused, self._unfinished):
            known.pop(name, None)
        self._unreadable.discard(name)
        self._rejected.discard(name)

    def _judge(self, name: str, kind: str) -> None:
        if kind != "file":  # opening a pipe would wait for ever, and a link leads out of the inbox
            self._refused[name] = f"{printable(name)} is a {kind}, which is never opened; put the parcel itself there"
            return
        try:
            manifest = self.check(self.folder / name)
        except BadInput as error:
            if _causes(error, OSError):
                self._unreadable.add(name)
            if name in self._unreadable or _causes(error, Truncated):
                self._unfinished[name] = str(error)
            else:
                self._refused[name] = str(error)
                self._rejected.add(name)
            return
        if self.names and manifest.sender not in self.names:
            self._refused[name] = (
                f"{printable(name)} comes from {manifest.sender}, who is not expected; add the name to --expect"
            )
        else:
            self._found[name] = manifest

    def arrivals(self) -> Arrivals:
        """One parcel per sender, the first by file name; others of the same sender are refused here, for as long as the
        first one stays."""
        made = Arrivals(self.folder, unfinished=dict(sorted(self._unfinished.items())), seen=frozenset(self._stamps))
        first: dict[str, str] = {}
        refused = dict(self._refused)
        for name, manifest in sorted(self._found.items()):
            if manifest.sender in first:
                other = printable(first[manifest.sender])
                same = (
                    "the same parcel as"
                    if manifest.digest == made.parcels[self.folder / first[manifest.sender]].digest
                    else "another parcel than"
                )
                refused[name] = (
                    f"{printable(name)} is {same} {other}, from the same sender {manifest.sender}; each model crosses"
                    " once"
                )
            else:
                first[manifest.sender] = name
                made.parcels[self.folder / name] = manifest
        made.refused = {printable(name): reason for name, reason in sorted(refused.items())}
        made.rejected = [self.folder / name for name in sorted(self._rejected)]
        made.unfinished = {printable(name): reason for name, reason in made.unfinished.items()}
        return made


def gather(
    folder: Path,
    check: Check,
    quorum: Quorum,
    *,
    deadline: float | None = None,
    poll: float = 5.0,
    settle: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Arrivals:
    """Wait until the quorum is complete, or enough are there and nothing changed in the folder for ``settle`` seconds
    (others may be on their way), or the deadline has passed; and return what lies in the folder then. ``check`` reads
    a parcel and refuses it by raising BadInput; a file that is refused because it ends too soon (Truncated) is not
    whole yet and is tried again when it changes.

    ``deadline`` is in seconds of a monotonic clock, so a system clock that is set meanwhile changes nothing. Looks
    follow each other quickly while something happens and are ``poll`` seconds apart at the most. Too few at the
    deadline is a BadInput that says who came.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; make it, or name the folder in which the .parcel files arrive")
    if deadline is None and quorum.number is None and not quorum.soon:
        raise BadInput(
            "nothing would end the wait; add --deadline 2h, --min-sites N, or --expect with the number or the names of"
            " the sites"
        )
    inbox = Watched(folder, check, quorum.names)
    began, pause = clock(), QUICK
    still = began  # since when nothing has changed
    with _status_line(quorum) as tell:
        while True:
            # Before the look: one that begins at the deadline still counts.
            over = deadline is not None and clock() - began >= deadline
            changed = inbox.look()
            made = inbox.arrivals()
            still = clock() if changed else still
            made.waited = clock() - began
            tell(made, None if deadline is None else max(0.0, deadline - made.waited), inbox.trouble)
            senders, ready = set(made.senders), clock() - still >= settle and not inbox.trouble
            if quorum.complete(senders) or (quorum.enough(senders) and ready):
                return made
            if over:
                return _enough(made, quorum, made.waited, inbox.trouble)
            pause = QUICK if changed else min(2 * pause, poll)
            ends = [] if deadline is None else [began + deadline]
            ends += [still + settle] if quorum.enough(senders) and not inbox.trouble else []
            sleep(max(0.0, min(pause, poll, *(end - clock() for end in ends))))


@dataclass(frozen=True)
class Waiting:
    """A wait as the command line words it: ``--deadline``, ``--expect``, ``--min-sites``, ``--poll``, ``--settle``."""

    quorum: Quorum
    deadline: float | None
    poll: float
    settle: float = 10.0

    @classmethod
    def of(
        cls, watch: bool, deadline: str | None, expect: str | None, least: int | None, poll: str, settle: str = "10s"
    ) -> Waiting | None:
        """None without ``--watch``, which the other options belong to."""
        if not watch:
            if any(option is not None for option in (deadline, expect, least)):
                raise BadInput(
                    "--deadline, --expect and --min-sites say how long to wait for whom, so they need --watch"
                )
            return None
        ends = None if deadline is None else seconds(deadline)
        return cls(Quorum.of(expect, least), ends, seconds(poll, "--poll"), seconds(settle, "--settle"))

    def gather(self, folder: Path, check: Check) -> Arrivals:
        return gather(folder, check, self.quorum, deadline=self.deadline, poll=self.poll, settle=self.settle)


def _enough(made: Arrivals, quorum: Quorum, waited: float, trouble: str) -> Arrivals:
    if trouble:
        raise BadInput(f"{trouble}; the deadline is over, so mend that and give the same command again")
    if len(made.parcels) >= quorum.least:
        return made
    came = ", ".join(made.senders) or "nobody"
    others = [f"missing: {', '.join(missing)}"] if (missing := quorum.missing(set(made.senders))) else []
    others += [f"not whole: {', '.join(made.unfinished)}"] if made.unfinished else []
    others += [f"refused: {', '.join(made.refused)} ({next(iter(made.refused.values()))})"] if made.refused else []
    fewer = f", or --min-sites {len(made.parcels)} to go on without the others" if made.parcels else ""
    raise BadInput(
        f"{len(made.parcels)} of at least {quorum.least} sites came within {duration(waited)}:"
        f" {'; '.join([came, *others])}. Give the same command again to wait longer{fewer}"
    )


# -- looking at a folder


def _names(folder: Path) -> list[str]:
    """Files that are called parcels, in name order. Transfers in progress have other names: rsync's begin with a dot,
    others end in .part or the like."""
    return sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX) and not name.startswith("."))


def _status(path: Path) -> tuple[str, Stamp] | None:
    """What kind of thing it is, without following or opening it, and what changes whenever it does; None if it has just
    gone."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    kinds = {stat.S_ISREG: "file", stat.S_ISLNK: "symbolic link", stat.S_ISDIR: "folder", stat.S_ISFIFO: "named pipe"}
    kind = next((kind for test, kind in kinds.items() if test(status.st_mode)), "device or socket")
    return kind, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _causes(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an error is of a kind, or was raised on account of one that is."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, kind):
            return True
        link = link.__cause__ or link.__context__
    return False


# -- telling people

Tell = Callable[[Arrivals, float | None, str], None]


def duration(value: float) -> str:
    """Seconds for people: ``45 s``, ``12 min``, ``1 h 59 min``."""
    if value < 59.5:
        return f"{value:.0f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def summary(made: Arrivals, quorum: Quorum, left: float | None, trouble: str = "") -> str:
    """One line: who is there, who is missing, how long there is."""
    goal = f" of {quorum.number}" if quorum.number else f", {quorum.least} needed"
    missing = quorum.missing(set(made.senders))
    parts = [f"{len(made.parcels)}{goal} there{_some(made.senders)}"]
    parts += [f"missing{_some(missing)}"] if missing else []
    parts += [f"{len(made.unfinished)} not whole yet"] if made.unfinished else []
    parts += [f"{len(made.refused)} refused"] if made.refused else []
    parts += [trouble] if trouble else []
    return "; ".join([*parts, "no deadline" if left is None else f"{duration(left)} left"])


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f": {', '.join(names[:most])}{more}" if names else ""


@contextmanager
def _status_line(quorum: Quorum) -> Iterator[Tell]:
    """A living line on a terminal, plain lines elsewhere; either way one line for everything that arrives or is
    refused."""
    told: dict[str, str] = {}
    spoken = [-REMIND]

    def news(made: Arrivals) -> list[str]:
        now = {
            f"{path.name} {manifest.digest}": f"{manifest.sender} is there: {printable(path.name)}"
            for path, manifest in made.parcels.items()
        }
        now |= {f"{name} {reason}": f"refused: {reason}" for name, reason in made.refused.items()}
        fresh = [line for key, line in now.items() if key not in told]
        told.clear()
        told.update(now)
        return fresh

    def plain(made: Arrivals, left: float | None, trouble: str) -> None:
        fresh = news(made)
        if fresh or time.monotonic() - spoken[0] >= REMIND:
            spoken[0] = time.monotonic()
            for line in [*fresh, f"waiting: {summary(made, quorum, left, trouble)}"]:
                log.info(line)

    if not sys.stderr.isatty():
        yield plain
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with console.status("") as status:

        def living(made: Arrivals, left: float | None, trouble: str) -> None:
            for line in news(made):
                console.print(Text(line))
            status.update(Text(summary(made, quorum, left, trouble)))

        yield living
