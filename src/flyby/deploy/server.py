"""Where the parcels meet: the Flower ServerApp. It asks every node once, checks and counts what comes, and fuses at the
deadline at the latest.

Deadline and quorum are explicit. Nobody is waited for beyond the deadline: each answer is fetched in a thread of its
own, so that neither a dead node, which Flower notices after about a minute, nor a broken upload, which it gives up
after three, holds anything up.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyby.deploy.client import PARCEL, SERIAL, SITE
from flyby.deploy.round import Round, must_be_new, read_round
from flyby.errors import BadInput, FlybyError
from flyby.files import write_bytes, write_json
from flyby.machine import versions
from flyby.names import check_name, printable
from flyby.parcels import parcel
from flyby.parcels.gate import Gate, open_gate
from flyby.parcels.ledger import SecondCrossing
from flyby.runs.folder import Run
from flyby.runs.server import SERVER, Order, fuse_parcels

POLL = 1.0  # seconds between two looks for new nodes and new answers
GRACE = 60.0  # seconds for which Flower keeps a message beyond the deadline
MOST_WORDS = 500  # characters of a node's excuse that are kept
MARK = "flyby: "  # begins the lines meant for people in Flower's log
NODE_UNAVAILABLE = 5  # Flower's error code for a node whose heartbeats stopped


def make_app() -> Any:
    """The ServerApp that Flower runs: one round, then it ends."""
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        conduct(grid, read_round(context.run_config))

    return app


@dataclass
class Roll:
    """Who came, who was late and who failed, each a row for result.json. The gate checks what comes and refuses a
    second parcel of anybody."""

    gate: Gate
    inbox: Path
    came: list[dict[str, Any]] = field(default_factory=list)
    late: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return len(self.came) + len(self.failed)


def conduct(grid: Any, asked: Round) -> dict[str, Any]:
    """The whole round on the server: collect, fuse, write ``out``. Its result.json appears last, also when too few
    came."""
    started = time.monotonic()
    roll = prepare(asked)
    out, gate = Path(asked.out).expanduser().absolute(), roll.gate
    result: dict[str, Any] = {
        "status": "fused",
        "method": asked.method,
        "fusion": asked.rule,
        "seed": asked.seed,
        "seconds": {},
    }
    trouble: Exception | None = None
    try:
        collect(grid, asked, roll)
        collected = time.monotonic()
        result["seconds"]["collect"] = round(collected - started, 3)
        if len(gate.waiting) < asked.quorum:
            gate.settle()  # for the ledger: they did cross
            raise BadInput(
                f"{len(roll.came)} of at least {asked.quorum} parcels came within {asked.deadline}{_why(roll)}"
            )
        order = Order(
            out,
            asked.rule,
            asked.fusion_settings(),
            proxy=asked.config("data").proxy,
            min_sites=asked.quorum,
            seed=asked.seed,
            export=asked.export,
            device=asked.device,
        )
        result["model"] = fuse_parcels([], order, gate)
        result["seconds"]["fuse"] = round(time.monotonic() - collected, 3)
    except Exception as error:  # what came is kept and told whatever happened: no site can be asked twice
        trouble = error
        result["status"] = "too few" if len(gate.waiting) < asked.quorum else "failed"
        result["error"] = str(error) if isinstance(error, FlybyError) else repr(error)
    _regroup(roll)
    _keep(roll, out)
    result |= {
        "sites": asked.sites,
        "min_sites": asked.quorum,
        "deadline": asked.deadline,
        "came": roll.came,
        "late": roll.late,
        "failed": roll.failed,
        "absent": max(0, asked.sites - roll.answered - len(roll.late)),
        "uploads": gate.ledger.uploads(SERVER),
        "bytes_up": gate.ledger.bytes_up(SERVER),
        "notes": gate.notes,
        "versions": versions(),
    }
    write_json(Run(out).result_path, result)
    _tell(f"{result['status']}: {len(roll.came)} came, {len(roll.late)} late, {len(roll.failed)} failed; {out}")
    if trouble is not None:
        raise trouble
    return result


def prepare(asked: Round) -> Roll:
    """Refuse before anybody trains what would fail afterwards."""
    out = Path(asked.check().out).expanduser().absolute()
    inbox = out.parent / f".{out.name}.inbox"
    must_be_new(out)
    if inbox.exists():
        raise BadInput(
            f"{inbox} holds parcels of a round that was cut short; use them with flyby fuse, or take them away"
        )
    gate = open_gate(
        SERVER,
        out,
        trust=Path(asked.trust).expanduser() if asked.trust else None,
        require_signed=asked.require_signed,
        quarantine=inbox / "refused",
        max_bytes=asked.max_bytes,
    )
    return Roll(gate, inbox)


def collect(grid: Any, asked: Round, roll: Roll) -> None:
    """Ask every node that is or gets connected, once, and take in what comes until all expected sites have answered or
    the deadline is over."""
    started = time.monotonic()
    names: dict[int, str] = {}  # every node that was asked, by the name it was registered with
    silent: set[int] = set()
    answers: queue.Queue[tuple[int, Any]] = queue.Queue()
    over = threading.Event()
    while (left := asked.seconds - (time.monotonic() - started)) > 0 and not (
        asked.sites and roll.answered >= asked.sites and not silent
    ):
        for node in grid.get_nodes():
            if node.node_id not in names:
                names[node.node_id] = node.name
                silent.add(node.node_id)
                _ask(grid, asked, node.node_id, answers, over)
                _tell(f"asked {_called(node.name, node.node_id)}")
        try:
            node_id, reply = answers.get(timeout=min(POLL, left))
        except queue.Empty:
            continue
        silent.discard(node_id)
        _take_in(reply, node_id, names, roll, time.monotonic() - started)
    over.set()
    if silent:
        connected = {node.node_id for node in grid.get_nodes()}
        for node_id in sorted(silent):
            state = "still connected" if node_id in connected else "no longer connected"
            roll.late.append({**_row(names[node_id], node_id), "reason": f"no answer within {asked.deadline}; {state}"})


def _ask(grid: Any, asked: Round, node_id: int, answers: queue.Queue[tuple[int, Any]], over: threading.Event) -> None:
    """One message to one node, and one thread that waits for its one answer."""
    from flwr.app import Message, RecordDict

    (message_id,) = grid.push_messages([Message(RecordDict(), node_id, "train", ttl=asked.seconds + GRACE)])

    def fetch() -> None:
        try:
            while not over.wait(POLL):
                if replies := list(grid.pull_messages([message_id])):
                    answers.put((node_id, replies[0]))
                    return
        except Exception as error:  # a malformed answer may break Flower's reader in any way
            answers.put((node_id, error))

    threading.Thread(target=fetch, daemon=True).start()


def _take_in(reply: Any, node_id: int, names: dict[int, str], roll: Roll, after: float) -> None:
    """Check an answer as one checks a stranger's file; what is wrong with it becomes the node's row, never the round's
    end."""
    name = names[node_id]
    path = roll.inbox / f"{name or node_id}.parcel"
    try:
        data = _parcel_bytes(reply)
        check_name(name or str(node_id))  # before it is part of any path: ../x would be a file outside the inbox
        if path.exists():
            raise SecondCrossing(
                f"{path.stem} has sent its parcel already; each model crosses once, so give every node a name of"
                " its own"
            )
        write_bytes(path, data)
        with contextlib.suppress(parcel.ParcelError):  # the gate will say what is wrong with it
            sender = parcel.read_manifest(path).sender
            if sender != name if name else sender in names.values():  # a name that was registered is its node's alone
                path.unlink()
                raise BadInput(
                    f"it was registered {f'as {name}' if name else 'without a name'} and sent a parcel of {sender}"
                )
        manifest = roll.gate.check(path).manifest
    except Exception as error:
        reason = (
            str(error).replace(f"{roll.inbox}/", "")
            if isinstance(error, FlybyError)
            else f"its answer cannot be read ({type(error).__name__})"
        )
        roll.failed.append({**_row(name, node_id), "reason": reason})
        _tell(f"{_called(name, node_id)} failed: {reason}")
        return
    row = {
        "bytes": len(data),
        "digest": roll.gate.waiting[-1].digest,
        "samples": manifest.samples,
        "seconds": round(after, 3),
    }
    roll.came.append({**_row(manifest.sender, node_id), **row})
    _tell(f"{manifest.sender} came: {len(data):,} bytes after {after:.1f} s")


def _parcel_bytes(reply: Any) -> bytes:
    if isinstance(reply, Exception):
        raise reply
    if reply.has_error():
        lost = reply.error.code == NODE_UNAVAILABLE
        raise BadInput(
            "it disconnected while it was at work" if lost else f"Flower says: {_one_line(reply.error.reason)}"
        )
    content = reply.content
    if SITE in content.config_records and "error" in content[SITE]:
        raise BadInput(_one_line(content[SITE]["error"]))
    if PARCEL not in content.array_records or content[PARCEL][PARCEL].stype != SERIAL:
        raise BadInput("its answer holds no parcel; every host needs the same flyby")
    data: bytes = content[PARCEL][PARCEL].data
    return data


def _one_line(text: object) -> str:
    """A stranger's words, short and without line breaks or control characters."""
    return printable(" ".join(str(text).split())[:MOST_WORDS])


def _regroup(roll: Roll) -> None:
    """Those that the gate refused when it saw all of them together did come, and failed."""
    kept = {one.manifest.sender for one in roll.gate.waiting}
    reasons = {one.sender: one.reason for one in roll.gate.refused}
    for row in [row for row in roll.came if row["site"] not in kept]:
        roll.came.remove(row)
        roll.failed.append(
            {"site": row["site"], "node": row["node"], "reason": reasons[row["site"]].replace(f"{roll.inbox}/", "")}
        )


def _keep(roll: Roll, out: Path) -> None:
    """The parcels and the ledger join the model in ``out``; without a model they are there alone,
    for ``flyby fuse``."""
    out.mkdir(parents=True, exist_ok=True)
    if roll.inbox.exists():
        os.replace(roll.inbox, out / "parcels")
    roll.gate.ledger.save(out / "ledger.json")


def _row(name: str, node_id: int) -> dict[str, Any]:
    return {"site": name or None, "node": str(node_id)}


def _called(name: str, node_id: int) -> str:
    return printable(name) or f"node {node_id}"


def _why(roll: Roll) -> str:
    """Late and failed nodes in one breath, for the one line that a round without a quorum owes."""
    rows = [f"{row['site'] or row['node']}: {row['reason']}" for row in [*roll.failed, *roll.late]]
    return f" ({'; '.join(rows)})" if rows else "; no node was connected" if not roll.came else ""


def _tell(line: str) -> None:
    print(f"{MARK}{line}", flush=True)
