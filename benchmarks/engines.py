"""Engine ``processes`` against ``inline``: the same ``flyby run``, from the start of the process to its end, in both
orders, in one run.

    python benchmarks/engines.py                          # eight clients of digits under fafi, 20 epochs
    python benchmarks/engines.py --clients 4 --epochs 60 --repeats 5

Three ratios: of the whole process (imports, report and all), of the run as result.json has it, and of the training
alone. The uploads of both engines are compared byte for byte. Use it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("inline", "processes")


def once(engine: str, words: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "flyby",
        "run",
        "--method",
        words.method,
        "--data",
        words.data,
        "--clients",
        str(words.clients),
        "--epochs",
        str(words.epochs),
        "--seed",
        "0",
        "--device",
        "cpu",
        "--engine",
        engine,
        "--out",
        str(folder),
        "--quiet",
        "--json",
    ]
    started = time.perf_counter()
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    wall = time.perf_counter() - started
    result = json.loads(done.stdout)
    return {
        "process": wall,
        "run": result["seconds"],
        "training": result["timings"]["train"],
        "peak_mb": result["peak_memory_mb"],
        "uploads": [p.read_bytes() for p in sorted((folder / "parcels").glob("*.parcel"))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fafi")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for repeat in range(words.repeats):
        for engine in ENGINES if repeat % 2 == 0 else ENGINES[::-1]:
            with tempfile.TemporaryDirectory(prefix="flyby-engines-") as folder:
                found[engine].append(once(engine, words, Path(folder) / "run"))
            row = found[engine][-1]
            print(
                f"{engine:<10} {row['process']:6.2f} s, run {row['run']:6.2f} s, training {row['training']:6.2f} s",
                file=sys.stderr,
                flush=True,
            )
    same = all(row["uploads"] == found["inline"][0]["uploads"] for rows in found.values() for row in rows)
    print(
        f"{words.method} on {words.data}, {words.clients} clients, {words.epochs} epochs; {os.cpu_count()} CPU cores,"
        f" load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        f"| {'':<9} | {'inline':>9} | {'processes':>9} | {'ratio':>5} |\n| {'-' * 9} | {'-' * 8}: | {'-' * 8}: |"
        f" {'-' * 4}: |"
    )
    ratios = {}
    for key in ("process", "run", "training"):
        left, right = (statistics.median(row[key] for row in found[engine]) for engine in ENGINES)
        ratios[key] = statistics.median(a[key] / b[key] for a, b in zip(*found.values(), strict=True))
        print(f"| {key:<9} | {left:>7.2f} s | {right:>7.2f} s | {ratios[key]:>5.2f} |")
    peaks = {engine: max(row["peak_mb"] for row in rows) for engine, rows in found.items()}
    print(f"\nsame uploads, byte for byte: {'yes' if same else 'NO'}; peak MB {peaks}")
    print(json.dumps({"ratios": {k: round(v, 3) for k, v in ratios.items()}, "same_uploads": same, "peak_mb": peaks}))


if __name__ == "__main__":
    main()
