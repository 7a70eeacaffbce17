"""Windows of constellations: time and memory against the number of satellites, each case in a process of its own.

    python benchmarks/contacts.py                     # all cases, a few minutes on one core
    python benchmarks/contacts.py 1000                # the cases with so many satellites
    python benchmarks/contacts.py --draw              # only the picture, from the rows that are there

Random shells (500 to 600 km, 50 to 98 degrees), 10 s steps. ``find`` is from orbits to windows, ``write`` the plan's
CSV file, both in CPU seconds; ``seconds`` is the whole process by the clock, with Python's start; memory is its largest
resident size. Rows go to results/contacts-growth.jsonl, the picture to docs/images/contacts-growth.png. Exits with 1
where a case with limits breaks them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
ROWS, PICTURE = ROOT / "results" / "contacts-growth.jsonl", ROOT / "docs" / "images" / "contacts-growth.png"
# satellites, hours, longest range in km (0: as far as they see)
CASES = (
    *((n, 24.0, 1000.0) for n in (20, 70, 200, 500, 1000)),
    *((n, 6.0, 1000.0) for n in (1000, 2000, 5000)),
    *((n, 24.0, 0.0) for n in (20, 70, 200)),
)
LIMITS = {(70, 24.0, 0.0): (2.0, 200.0), (70, 24.0, 1000.0): (2.0, 200.0), (1000, 24.0, 1000.0): (30.0, 500.0)}


def one(satellites: int, hours: float, most: float) -> dict[str, Any]:
    """One case, in this process."""
    from flyby.contacts.plan import write_lines
    from flyby.contacts.walker import random_shell
    from flyby.contacts.windows import Rules, find

    orbits = random_shell(satellites, (500, 600), (50, 98), seed=0)
    begin = time.process_time()
    windows, _ = find(orbits, hours * 3600, Rules(max_range=most or None))
    found = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.csv"
        write_lines(path, windows.lines(orbits.names, (), 1.25e6, orbits.epoch, hours * 3600))
        size = path.stat().st_size
    done = time.process_time()
    return {
        "satellites": satellites,
        "hours": hours,
        "range_km": most or None,
        "windows": len(windows),
        "find": round(found - begin, 2),
        "write": round(done - found, 2),
        "file_mb": round(size / 1e6, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def measured(case: tuple[int, float, float]) -> dict[str, Any]:
    """One case in a process of its own, on one core."""
    words = [sys.executable, __file__, "--one", json.dumps(case)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    begin = time.monotonic()
    ran = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    row: dict[str, Any] = json.loads(ran.stdout)
    row |= {"seconds": round(time.monotonic() - begin, 2), "hardware": f"one core ({platform.machine()})"}
    return row | {"date": datetime.now(UTC).date().isoformat()}


def draw(rows: list[dict[str, Any]]) -> bytes:
    from flyby.drawing import PALETTE, Drawing, canvas, place_axes

    @Drawing
    def growth() -> Figure:
        figure = canvas(330)
        for k, (key, title, per) in enumerate(
            (("find", "CPU seconds per hour of the plan", True), ("peak_mb", "largest memory, MB", False))
        ):
            axes = place_axes(figure, 60 + 450 * k, 40, 380, 230)
            for c, (most, hours) in enumerate(((1000.0, 24.0), (1000.0, 6.0), (None, 24.0))):
                mine = sorted(
                    (r for r in rows if (r["range_km"], r["hours"]) == (most, hours)), key=lambda r: r["satellites"]
                )
                line = [r[key] / (r["hours"] if per else 1) for r in mine]
                label = f"{hours:g} h, {'up to 1,000 km' if most else 'as far as they see'}"
                axes.plot([r["satellites"] for r in mine], line, "o-", color=PALETTE[c], label=label, markersize=4)
            axes.set(xscale="log", yscale="log", title=title, xlabel="satellites")
            marks = [20, 70, 200, 500, 1000, 2000, 5000]
            axes.set_xticks(marks, [f"{mark:,}" for mark in marks])
            heights = [0.03, 0.1, 0.3, 1, 3, 10] if per else [50, 100, 200, 500, 1000]
            axes.set_yticks(heights, [f"{height:,g}" for height in heights])
            axes.minorticks_off()
            axes.grid(True)
            if not k:
                axes.legend(frameon=False, fontsize=11)
        return figure

    return growth.png()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("satellites", nargs="*", type=int)
    parser.add_argument("--one")
    parser.add_argument("--draw", action="store_true")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(*json.loads(asked.one))))
        return
    broken = False
    for case in () if asked.draw else CASES:
        if asked.satellites and case[0] not in asked.satellites:
            continue
        row = measured(case)
        seconds, megabytes = LIMITS.get(case, (float("inf"), float("inf")))
        broken |= row["find"] > seconds or row["peak_mb"] > megabytes
        print(json.dumps(row), flush=True)
        with open(ROWS, "a") as file:
            file.write(json.dumps(row) + "\n")
    latest = {(r["satellites"], r["hours"], r["range_km"]): r for r in map(json.loads, ROWS.read_text().splitlines())}
    from flyby.files import write_bytes

    write_bytes(PICTURE, draw(list(latest.values())))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
