"""Shake the parcel reader: honest parcels are damaged in many ways and read again, and nothing but a ParcelError may
come of it.

Half of the damage is blind (flipped bits, cuts, splices, other lengths). The other half is a forger's: the manifest,
the table of tensors or the tensors are edited and every length and hash is made right again, so that the edit gets past
the outer checks to those behind.

For each case: the error is a ParcelError of one printable line; an accepted parcel is finite, has the shapes of its
spec and can be rebuilt; nothing is executed, imported or opened for writing (an audit hook watches); no case takes
longer than ``--slowest`` seconds; and the process may take ``--memory`` MiB beside what it starts with (RLIMIT_AS: a
larger request fails, wherever it is made).

    python benchmarks/fuzz.py --cases 1000000 --seed 1

prints one JSON object; what broke a rule is kept as ``SEED-CASE.parcel`` in ``--keep`` and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from forgeries import DAMAGE, costly, flipped, honest

from flyby.parcels import parcel


class Watch:
    """Notes every audit event that a reader has no business with, while it is armed."""

    def __init__(self) -> None:
        self.armed, self.seen = False, Counter[str]()
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed or event == "builtins.id":
            return
        if event == "open" and (
            arguments[1] in ("r", "rb") or not (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        ):
            return
        self.seen[f"{event} {arguments[0] if arguments else ''}"[:200]] += 1


def read_one(data: bytes, path: Path | None, rebuild: bool) -> str:
    """What became of one case: ``accepted``, or the kind of the refusal. Anything else that happens is an exception.
    ``rebuild`` also makes the network of an accepted parcel, and writes and reads the parcel again."""
    try:
        received = parcel.from_bytes(data) if path is None else parcel.read(path)
    except parcel.ParcelError as error:
        message = str(error)
        if not message.isprintable() or len(message) > 1100:
            raise AssertionError(f"a message of {len(message)} characters that is not one printable line") from error
        return type(error).__name__
    shapes = {name: shape for name, (shape, _) in received.manifest.spec.shapes().items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in received.weights.items()}, (
        "other shapes than the spec's"
    )
    assert all(bool(torch.isfinite(t).all()) for t in (*received.weights.values(), *received.extras.values())), (
        "not finite"
    )
    if not rebuild:
        return "accepted"
    received.network()
    try:
        again = parcel.from_bytes(parcel.to_bytes(received))
    except parcel.ParcelError:
        return "accepted"  # numbers that no encoder would have made: readable, but not to be passed on as they are
    assert again.digest == received.digest, "another parcel after a round trip"
    return "accepted"


def tried(
    name: str, data: bytes, path: Path | None, rebuild: bool, slowest: float, keep: Path, watch: Watch
) -> tuple[str, float, list[dict[str, str]]]:
    """One case: its outcome, its seconds, and what broke a rule."""
    findings = []
    watch.armed = True
    tick = time.perf_counter()
    try:
        outcome = read_one(data, path, rebuild)
        if path is not None and outcome == "accepted":
            parcel.read_manifest(path)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"[:300]
        findings.append({"case": name, "what": outcome})
    finally:
        watch.armed = False
    took = time.perf_counter() - tick
    if took > slowest:
        findings.append({"case": name, "what": f"it took {took:.2f} s"})
    if watch.seen:
        findings.append({"case": name, "what": f"events {dict(watch.seen)}"})
        watch.seen.clear()
    if findings:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{name}.parcel").write_bytes(data)
    return outcome, took, findings


def shake(cases: int, seed: int, minutes: float, slowest: float, keep: Path, watch: Watch) -> dict[str, Any]:
    """Random cases; each has a random stream of its own, so that one can be repeated alone."""
    good, findings, worst = honest(), [], 0.0
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for data in good:
        assert read_one(data, None, True) == "accepted"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in range(cases):
            if minutes and time.perf_counter() - began > 60 * minutes:
                break
            chance = random.Random(f"{seed}-{case}")
            damage = chance.choice(DAMAGE)
            data = damage(chance, chance.choice(good), good)
            if data and chance.random() < 0.1:
                data = flipped(chance, data, good)
            path = Path(folder, "case.parcel") if case % 32 == 0 else None
            if path is not None:
                path.write_bytes(data)
            outcome, took, found = tried(f"{seed}-{case}", data, path, case % 8 == 0, slowest, keep, watch)
            worst = max(worst, took)
            findings += found
            outcomes[outcome] += 1
            kinds[damage.__name__] += 1
    return {
        "cases": outcomes.total(),
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "outcomes": dict(outcomes.most_common(30)),
        "damage": dict(kinds.most_common()),
        "slowest_case_s": round(worst, 4),
        "findings": findings[:100],
    }


def weigh(slowest: float, keep: Path, watch: Watch) -> dict[str, Any]:
    """The costly files, one after another."""
    taken, findings = {}, []
    for name, data in costly(honest()[0]):
        outcome, took, found = tried(name, data, None, False, slowest, keep, watch)
        taken[name] = {"bytes": len(data), "seconds": round(took, 2), "outcome": outcome}
        findings += found
    return {"costly": taken, "findings": findings}


def limit_memory(mebibytes: int) -> None:
    """No more address space than the process has now and this much on top."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (mebibytes << 20),) * 2)


def main() -> int:
    words = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    words.add_argument("--cases", type=int, default=20_000)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--minutes", type=float, default=0, help="stop after so many; 0: when all cases are done")
    words.add_argument("--slowest", type=float, default=10.0, help="seconds that one case may take")
    words.add_argument("--memory", type=int, default=512, help="MiB that reading may take")
    words.add_argument("--costly", action="store_true", help="read the dearest files known instead of random ones")
    words.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    asked = words.parse_args()
    torch.set_num_threads(1)
    watch = Watch()
    shake(50, -1, 0, 60, asked.keep, watch)  # whatever is loaded lazily is loaded now
    limit_memory(asked.memory)
    random_cases = (asked.cases, asked.seed, asked.minutes, asked.slowest, asked.keep, watch)
    result = weigh(asked.slowest, asked.keep, watch) if asked.costly else shake(*random_cases)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result | {"peak_rss_mib": round(peak, 1)}, indent=1))
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
