"""Many small clients on one machine: engine ``ray`` against ``processes``, with ``inline`` for scale, all in one run.

python benchmarks/many_clients.py                   # 500 clients on digits, a narrow mlp, 2 epochs

Seconds are of the whole command, from start to exit, and of its training alone. Memory is that of the command and of
every process it started, sampled: PSS counts a page that several processes share once, RSS once for each. The uploads
must be the same bytes everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("inline", "processes", "ray")
PERIOD = 0.5  # seconds between two looks at the memory


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--clients", type=int, default=500)
    words.add_argument("--epochs", type=int, default=2)
    words.add_argument("--engines", default=",".join(ENGINES), help="in this order")
    words.add_argument("--out", type=Path, help="also write the facts to this JSON file")
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = [
            measure(engine, asked.clients, asked.epochs, Path(place) / engine) for engine in asked.engines.split(",")
        ]
    print(f"{'engine':<12}{'seconds':>10}{'training':>10}{'PSS MB':>10}{'RSS MB':>10}{'processes':>11}  same uploads")
    for row in rows:
        same = "yes" if row["uploads"] == rows[0]["uploads"] else "NO"
        print(
            f"{row['engine']:<12}{row['seconds']:>10}{row['training']:>10}{row['pss_mb']:>10}{row['rss_mb']:>10}{row['processes']:>11}"
            f"  {same}"
        )
    facts = {
        "clients": asked.clients,
        "epochs": asked.epochs,
        "engines": rows,
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
    }
    facts["load_average"] = [round(load, 1) for load in os.getloadavg()]
    print(json.dumps(facts))
    if asked.out:
        asked.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if len({row["uploads"] for row in rows}) == 1 else 1


def measure(engine: str, clients: int, epochs: int, out: Path) -> dict[str, Any]:
    """One run as its own command, watched from outside."""
    command = [
        sys.executable,
        "-m",
        "flyby",
        "run",
        "--method",
        "fedavg",
        "--data",
        "digits",
        "--split",
        "iid",
        "--clients",
        str(clients),
        "--epochs",
        str(epochs),
        "--model",
        "mlp",
        "--set",
        "model.width=0.25",
        "--set",
        "locals=false",
        "--device",
        "cpu",
        "--engine",
        engine,
        "--out",
        str(out),
        "--quiet",
        "--json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)  # a local cluster, whose memory counts
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    peak = {"pss_mb": 0, "rss_mb": 0, "processes": 0}
    while process.poll() is None:
        now = memory(process.pid)
        peak = {name: max(value, now[name]) for name, value in peak.items()}
        time.sleep(PERIOD)
    seconds = time.perf_counter() - began
    assert process.stdout is not None
    answer = process.stdout.read()
    if process.returncode:
        sys.exit(f"{engine} ended with {process.returncode}")
    result = json.loads(answer)
    uploads = hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted((out / "parcels").glob("*.parcel")))
    ).hexdigest()[:16]
    return {
        "engine": engine,
        "seconds": round(seconds, 1),
        "training": round(result["timings"]["train"], 1),
        **peak,
        "uploads": uploads,
        "accuracy": result["accuracy"],
    }


def memory(root: int) -> dict[str, int]:
    """Memory of a process, of its descendants and of its session, in megabytes."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                _, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                parents[int(entry.name)] = int(parent), int(session)
    family = {root}
    while more := {
        pid for pid, (parent, session) in parents.items() if pid not in family and (parent in family or session == root)
    }:
        family |= more
    sums = {"Pss": 0, "Rss": 0}
    for pid in family:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in sums:
                    sums[name] += int(rest.split()[0])
    return {"pss_mb": sums["Pss"] // 1024, "rss_mb": sums["Rss"] // 1024, "processes": len(family)}


if __name__ == "__main__":
    sys.exit(main())
