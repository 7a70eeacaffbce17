"""Peaks of host memory where they could hurt: seventy nodes of a data set as large as CIFAR-10, a thousand parcels
fused, a thousand judged.

    python benchmarks/memory.py                 # all three: some minutes, and 3 GB of disk while it runs
    python benchmarks/memory.py nodes --clients 70

Each case runs in a process of its own; its peak is the largest sum of the resident memory of that process and all its
children, sampled twenty times a second (pages that they share are counted once: PSS), beside the largest single process
as the kernel has it. Exits with 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GB = 1e9
LIMITS = {"nodes": 8 * GB, "fedavg": 1 * GB, "experts": 1 * GB}


def family(pid: int) -> list[int]:
    """A process and all that descend from it, now."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [one for child in path.read_text().split() for one in family(int(child))]
        except OSError:
            continue
    return found


def resident(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def watch(command: list[str]) -> tuple[float, float, str]:
    """Run a command; returns the peak of its family in bytes, its seconds and its output."""
    started = time.perf_counter()
    peak = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        while process.poll() is None:
            peak = max(peak, sum(resident(pid) for pid in family(process.pid)))
            time.sleep(0.05)
        said = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return peak, time.perf_counter() - started, said


def nodes(folder: Path, words: argparse.Namespace) -> tuple[float, float, str]:
    """All nodes pretrained in one run over 50,000 made-up images of 32x32x3."""
    import numpy as np

    random = np.random.RandomState(0)
    images = random.randint(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    np.savez(
        folder / "data.npz",
        x_train=images,
        y_train=np.arange(50_000) % 10,
        x_test=images[:1000],
        y_test=np.arange(1000) % 10,
    )
    return watch(
        [
            sys.executable,
            "-m",
            "flyby",
            "run",
            "--method",
            "fedavg",
            "--data",
            str(folder / "data.npz"),
            "--clients",
            str(words.clients),
            "--split",
            "iid",
            "--model",
            words.model,
            "--epochs",
            "1",
            "--engine",
            "processes",
            "--device",
            "cpu",
            "--set",
            "locals=false",
            "--set",
            "objective.calibrate=false",
            *(["--set", f"model.width={words.width}"] if words.width != 1 else []),
            "--out",
            str(folder / "run"),
            "--quiet",
            "--json",
        ]
    )


def make_parcels(folder: Path, count: int, model: str, width: float) -> list[Path]:
    from flyby.models import ModelSpec
    from flyby.parcels import parcel
    from flyby.rng import generator

    spec = ModelSpec(name=model, classes=10, channels=3, size=(32, 32), width=width, head="prototype")
    paths = []
    for k in range(count):
        weights = dict(spec.build(generator("memory", k)).state_dict())
        made = parcel.make(
            sender=f"site-{k}",
            method="salt",
            spec=spec,
            class_names=tuple("0123456789"),
            samples=100,
            counts=[10] * 10,
            counts_kind="exact",
            weights=weights,
        )
        paths.append(folder / f"site-{k}.parcel")
        parcel.write(made, paths[-1])
    return paths


def fuse(folder: Path, words: argparse.Namespace, rule: str) -> tuple[float, float, str]:
    """``words.parcels`` parcels fused by one rule and judged on 1,000 images, in a process of its own."""
    make_parcels(folder, words.parcels, "resnet18", words.parcel_width)
    return watch([sys.executable, __file__, "--child", rule, str(folder)])


def child(rule: str, folder: Path) -> None:
    import torch

    from flyby.fusion import FUSIONS, Inbox
    from flyby.fusion.evaluation import scores_of

    torch.set_num_threads(1)
    paths = sorted(folder.glob("*.parcel"))
    predictor = FUSIONS[rule]().fuse(Inbox(paths))
    images = torch.randint(0, 256, (64, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scores = scores_of(predictor, images)
    print(
        json.dumps(
            {
                "parcels": len(paths),
                "bytes": sum(p.stat().st_size for p in paths),
                "streamed": predictor.shelf is not None,
                "mean": float(scores.mean()),
            }
        )
    )


CASES: dict[str, Callable[[Path, argparse.Namespace], tuple[float, float, str]]] = {
    "nodes": nodes,
    "fedavg": lambda folder, words: fuse(folder, words, "fedavg"),
    "experts": lambda folder, words: fuse(folder, words, "experts"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", default=[], metavar="CASE", help="nodes, fedavg, experts; all of them by default"
    )
    parser.add_argument("--clients", type=int, default=70)
    parser.add_argument("--model", default="cnn-small")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--parcels", type=int, default=1000)
    parser.add_argument("--parcel-width", type=float, default=0.25, help="of resnet18: 0.25 makes parcels of 2.8 MB")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.child:
        child(words.child[0], Path(words.child[1]))
        return 0
    fine, rows = True, []
    for name in words.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="flyby-memory-") as folder:
            peak, seconds, said = CASES[name](Path(folder), words)
        facts: dict[str, Any] = json.loads(said)
        fine = fine and peak < LIMITS[name]
        rows.append(
            {"case": name, "peak_gb": round(peak / GB, 3), "limit_gb": LIMITS[name] / GB, "seconds": round(seconds, 1)}
        )
        rows[-1] |= {
            key: facts[key]
            for key in ("parcels", "bytes", "streamed", "peak_memory_mb", "clients", "model")
            if key in facts
        }
        print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows, "within_limits": fine}, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
