"""A whole Flower federation on this machine: a SuperLink and its SuperNodes as real processes over TLS with
authenticated nodes.

For a try before three hosts are involved, and for the tests. Everything lives in one private folder, talks over
127.0.0.1 alone and ends with the ``with`` block, however that is left; what a killed one
left goes when the next begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from flyby.deploy.app_folder import write_app
from flyby.deploy.credentials import LOCAL, write_certificates, write_node_keys
from flyby.deploy.round import NodeSettings, Round, must_be_new
from flyby.deploy.scratch import Scratch
from flyby.deploy.server import MARK
from flyby.errors import BadInput
from flyby.files import write_text
from flyby.runs.folder import Run

HOST = "127.0.0.1"
STARTUP = 180.0  # seconds within which a SuperLink or a SuperNode must be listening, on a busy machine too
PATIENCE = 10.0  # seconds that processes get to end by themselves
AGAIN = 0.5  # seconds until an interrupt that was not heard is tried again
PORTS = 3  # tries at a free port: another program may take it between our asking and Flower's binding
LIBC = ctypes.CDLL(None)
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",  # several sites share this machine; and one thread gives the bytes of flyby run
}


def check_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise BadInput("this needs Flower; install it with: pip install 'flyby[flower]'")


class Federation:
    """A SuperLink, started on entry, and the SuperNodes that :meth:`add` starts; on exit not one of their processes is
    left."""

    def __init__(self, tell: Callable[[str], None] = lambda line: None) -> None:
        check_flower()
        self.tell = tell
        self._scratch = Scratch("flyby-flower")
        self.folder = self._scratch.path
        # A proxy that this host must use is not for its own nodes.
        unproxied = ",".join(filter(None, [os.environ.get("NO_PROXY"), *LOCAL]))
        self.environment = {
            **os.environ,
            **SETTINGS,
            "NO_PROXY": unproxied,
            "no_proxy": unproxied,
            "FLWR_HOME": str(self.folder / "home"),
            # Flower starts its own programs by name.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: dict[str, list[str]] = {}
        self.ports: dict[str, int] = {}

    def __enter__(self) -> Federation:
        try:
            self.certificates = write_certificates(self.folder / "certificates")
            self._launch(
                "superlink",
                [
                    "flower-superlink",
                    "--enable-supernode-auth",
                    "--ssl-ca-certfile",
                    str(self.certificates["ca"]),
                    "--ssl-certfile",
                    str(self.certificates["certificate"]),
                    "--ssl-keyfile",
                    str(self.certificates["key"]),
                    "--host",
                    HOST,
                    "--port",
                ],
            )
            self._await("superlink")
            connection = {
                "address": f"{HOST}:{self.ports['superlink']}",
                "root-certificates": str(self.certificates["ca"]),
            }
            lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in connection.items())
            write_text(
                self.folder / "home" / "config.toml", f'[superlink]\ndefault = "flyby"\n\n[superlink.flyby]\n{lines}'
            )
        except BaseException:
            self.close()
            raise
        self.tell(f"SuperLink at {HOST}:{self.ports['superlink']}, TLS, nodes authenticated")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, *nodes: NodeSettings, registered: bool = True) -> None:
        """A SuperNode a site, started side by side. One that is not registered has a key like the others, and the
        SuperLink refuses it."""
        keys = {node.site: write_node_keys(self.folder / "keys", node.site) for node in nodes}
        if registered:
            self._register(keys)
        for node in nodes:
            told = self.folder / "nodes" / f"{node.site}.toml"
            work = node.work or str(self.folder / "work" / node.site)
            write_text(told, node.model_copy(update={"work": work}).toml())
            self._launch(
                node.site,
                [
                    "flower-supernode",
                    "--superlink",
                    f"{HOST}:{self.ports['superlink']}",
                    "--root-certificates",
                    str(self.certificates["ca"]),
                    "--auth-supernode-private-key",
                    str(keys[node.site]["key"]),
                    "--node-config",
                    str(told),
                    "--host",
                    HOST,
                    "--port",
                ],
            )
        for node in nodes if registered else ():
            self._await(node.site)
            self.tell(f"{node.site} is up")

    def run(self, asked: Round) -> dict[str, Any]:
        """One round, from ``flwr run`` to result.json. Raises what the server wrote as its error."""
        asked = asked.check().model_copy(update={"out": str(Path(asked.out).expanduser().absolute())})
        app = Path(tempfile.mkdtemp(prefix="round-", dir=self.folder)) / "app"
        write_app(app, asked)
        result, log = Run(asked.out).result_path, self.log("run")
        must_be_new(result.parent)
        process, ended = self._start("run", ["flwr", "run", str(app), "flyby", "--stream"]), None
        with log.open() as lines:
            while not result.exists() and (
                process.poll() is None or (ended := self._verdict(log.read_text(errors="replace"))) is None
            ):
                self._relay(lines)
                self._alive("superlink")
                time.sleep(0.2)
            self._relay(lines)
        if not result.exists():
            raise BadInput(f"the round ended without a result: {ended}")
        found: dict[str, Any] = json.loads(result.read_bytes())
        if "error" in found:
            raise BadInput(found["error"])
        return found

    def _register(self, keys: dict[str, dict[str, Path]]) -> None:
        """Tell the SuperLink the nodes' public keys and names."""
        asked = {
            site: self._start(
                f"register-{site}", ["flwr", "supernode", "register", str(pair["public"]), "flyby", "--name", site]
            )
            for site, pair in keys.items()
        }
        for site, process in asked.items():
            if process.wait():
                raise BadInput(f"{site} could not be registered: {self.last_words(f'register-{site}')}")

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def last_words(self, *names: str) -> str:
        return " / ".join(
            _tail(self.log(name).read_text(errors="replace")) for name in names if self.log(name).exists()
        )

    def close(self) -> None:
        """End every process, gently and then not, and take the folder away. Interrupts wait until it is done."""
        with _uninterrupted():
            for number in (signal.SIGTERM, signal.SIGKILL):
                for process in self.processes.values():
                    if process.poll() is None:  # the number of one that has ended may be somebody else's by now
                        _signal_group(process.pid, number)
                limit = time.monotonic() + PATIENCE
                while (left := self.members()) and time.monotonic() < limit:
                    for pid in left if number == signal.SIGKILL else ():  # what Flower detached is in no group of ours
                        with contextlib.suppress(OSError):
                            os.kill(pid, signal.SIGKILL)
                    for process in self.processes.values():
                        process.poll()
                    time.sleep(0.05)
            for process in self.processes.values():
                process.wait()
            self._scratch.close()

    def members(self) -> list[int]:
        """The living processes of this federation, Flower's detached ones too: those that have its private home in
        their environment."""
        mark = f"FLWR_HOME={self.environment['FLWR_HOME']}".encode()
        found = [process.pid for process in self.processes.values() if process.poll() is None]
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) not in found:
                    found.append(int(entry.name))
        return found

    def _launch(self, name: str, command: list[str]) -> None:
        """Start a process that will listen on a free port, the last word of its command."""
        self.commands[name], self.ports[name] = command, _free_port()
        self._start(name, [*command, str(self.ports[name])])

    def _await(self, name: str) -> None:
        """Wait until a launched process listens; that another program took its port is no reason to give up."""
        for _ in range(PORTS):
            limit = time.monotonic() + STARTUP
            while self.processes[name].poll() is None and time.monotonic() < limit:
                if _answers(self.ports[name]):
                    return
                time.sleep(0.05)
            if self.processes[name].poll() is None or "address already in use" not in self.log(name).read_text(
                errors="replace"
            ):
                break
            self._launch(name, self.commands[name])
        raise BadInput(f"{name} did not start: {self.last_words(name)}")

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self.log(name).parent.mkdir(exist_ok=True)
        if shutil.which(command[0], path=self.environment["PATH"]) is None:
            raise BadInput(
                f"{command[0]} is not installed beside this Python; mend it with: pip install 'flyby[flower]'"
            )
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        return self.processes[name]

    def _verdict(self, said: str) -> str | None:
        """How the round ended, after ``flwr run`` has; None while it goes on, which that program may have lost sight of
        on a busy machine."""
        found = re.search(r"Successfully started run (\d+)", said)
        if found is None:
            return _tail(said)
        self._start("list", ["flwr", "list", "flyby", "--run-id", found[1], "--format", "json"]).wait()
        try:
            run = json.loads(self.log("list").read_bytes())["runs"][0]
        except (ValueError, LookupError):
            return None  # the SuperLink has no time to answer
        return f"{run['status']} ({run['status-details']})" if run["status"].startswith("finished") else None

    def _alive(self, name: str) -> None:
        if self.processes[name].poll() is not None:
            raise BadInput(f"the {name} ended unexpectedly: {self.last_words(name)}")

    def _relay(self, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith(MARK):
                self.tell(line.removeprefix(MARK).rstrip())


def _end_with_parent() -> None:
    """In the child, before it becomes Flower: Linux ends it when this process is killed, so that not even ``kill -9``
    leaves one behind."""
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


def _tail(text: str, lines: int = 3) -> str:
    return " | ".join(line.strip() for line in text.strip().splitlines()[-lines:]) or "(nothing)"


@contextmanager
def _uninterrupted() -> Iterator[None]:
    with _handling(signal.SIG_IGN):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """A ``kill`` counts as Ctrl-C in here, so that it too takes everything down."""
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        # Where Python drops an exception (in a finaliser, at a fork), the next one is heard.
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        raise KeyboardInterrupt

    with _handling(interrupt):
        yield
    if asked:
        raise KeyboardInterrupt


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    try:
        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        signal.setitimer(signal.ITIMER_REAL, 0)
    except ValueError:  # not the main thread: signals are not ours to handle
        before = {}
    try:
        yield
    finally:
        if before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in before.items():
            signal.signal(number, old)
