"""What a change that is not meant to alter numbers must leave alone: hashes of a few runs, through the command line
only.

``python tests/runs/golden.py OUT.json`` does the runs and writes their hashes; ``test_golden.py`` compares them with
``golden.json``. Floating-point sums differ between kinds of CPU, so the file also names the arithmetic (``probe``):
equal probes must give equal hashes, byte for byte; elsewhere the accuracies must agree closely.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Command = Callable[..., object]
STOPWATCH = {
    "seconds",
    "timings",
    "trained",
    "peak_memory_mb",
    "command",
    "engine",
    "versions",
    "hardware",
    "schema_version",
    "test_images",
}
UNSEEN = {"samples_per_second", "lambda_bound", "lambda_peak"}  # of metrics.jsonl: the clock, and what is logged since
SMALL = ["--data", "digits", "--clients", "3", "--alpha", "0.3", "--epochs", "2", "--seed", "7", "--quiet"]
RUNS: dict[str, list[str]] = {
    "demo": ["--method", "local,fedavg,ensemble,fafi,aurora", *SMALL],
    "prototypes": ["--method", "fafi-anneal,fedetf,fedproto", *SMALL],
    "weights": ["--method", "fedlpa,maecho,ot", *SMALL, "--set", "train.batch=32"],
    "iffi": ["--method", "aurora", "--fusion", "iffi", *SMALL, "--set", "codec=int8", "--set", "train.snapshots=1"],
    "dense": [
        "--method",
        "dense",
        *SMALL,
        "--set",
        "fusion.epochs=2",
        "--set",
        "fusion.steps=3",
        "--set",
        "fusion.batch=32",
    ],
    "noisy": [
        "--method",
        "fafi",
        *SMALL,
        "--set",
        "counts=noisy",
        "--set",
        "split.val=0.2",
        "--set",
        "train.patience=1",
    ],
    "attack": ["--method", "ensemble", *SMALL, "--set", "attack.kind=random", "--set", "admission=default"],
    "fol": [
        *(
            "--method",
            "fol,fol-n,gossip",
            "--data",
            "digits",
            "--split",
            "fol",
            "--min-size",
            "40",
            "--clients",
            "8",
            "--alpha",
            "0.7",
        ),
        *(
            "--rounds",
            "2",
            "--buffer",
            "3",
            "--top",
            "2",
            "--model",
            "mlp",
            "--set",
            "data.holdout=0",
            "--epochs",
            "3",
            "--quiet",
        ),
        *("--set", "orient.epochs=2", "--set", "orient.distill_epochs=2", "--set", "orient.distill_steps=0"),
        *("--eval-nodes", "0,3", "--seed", "3"),
    ],
}


def process(*words: str) -> None:
    """The command line in a process of its own; a test may call it in another way."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "flyby", *words], check=True, env=environment, stdout=subprocess.DEVNULL)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def of_json(value: Any) -> str:
    return sha(json.dumps(value, sort_keys=True).encode())


def of_parcel(path: Path) -> str:
    """All bytes but the versions that wrote them: the manifest without them, which has the hash of every tensor."""
    data = path.read_bytes()
    start = data.index(b"{")
    manifest, _ = json.JSONDecoder().raw_decode(data[start:].decode("utf-8", "surrogateescape"))
    manifest["provenance"].pop("versions", None)
    return of_json(manifest)


def of_run(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    kept = {name: value for name, value in result.items() if name not in STOPWATCH}
    found: dict[str, Any] = {
        "accuracy": result["accuracy"],
        "result": of_json(kept),
        "metrics": of_json([{k: v for k, v in row.items() if k not in UNSEEN} for row in rows]),
        "parcels": {path.stem: of_parcel(path) for path in sorted((folder / "parcels").glob("*.parcel"))},
    }
    for name in ("split.json", "global/model.safetensors"):
        if (folder / name).exists():
            found[name] = sha((folder / name).read_bytes())
    crossings = json.loads((folder / "ledger.json").read_text())["crossings"]  # a digest covers the versions too
    found["ledger.json"] = of_json(
        [{k: v for k, v in one.items() if k not in ("digest", "weights")} for one in crossings]
    )
    for path in sorted((folder / "personal").glob("*/model.safetensors")):
        found[f"personal/{path.parent.name}"] = sha(path.read_bytes())
    return found


def of_sites(folder: Path, flyby: Command) -> dict[str, Any]:
    """Two real sites and a server, one command each."""
    common = ["--data", "digits", "--method", "aurora", "--epochs", "2", "--quiet", "--seed", "1"]
    common += ["--holdout", "0"]  # all images, as sites of a run without validation images
    paths = [folder / "a.parcel", folder / "b.parcel"]
    for path in paths:
        flyby("train", *common, "--out", str(path))
    flyby("fuse", *map(str, paths), "--fusion", "experts", "--out", str(folder / "global"))
    flyby(
        *("orient", "--own", str(paths[0]), "--received", str(folder), "--data", "digits", "--out", str(folder / "me")),
        *("--set", "epochs=1", "--set", "distill_epochs=1", "--set", "distill_steps=0", "--method", "fol-n"),
    )
    return {
        **{path.stem: of_parcel(path) for path in paths},
        **{name: sha((folder / name / "model.safetensors").read_bytes()) for name in ("global", "me")},
    }


def probe() -> str:
    """A hash of small sums as this CPU takes them: convolution, product and their gradients, as training does."""
    import torch

    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, 12, 12, generator=rng).to(memory_format=torch.channels_last)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1600, 10))
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=rng) * 0.1
    torch.nn.functional.cross_entropy(net(x), torch.arange(32) % 10).backward()
    values = [v for p in net.parameters() for v in p.grad.flatten().tolist()]  # type: ignore[union-attr]
    return f"{torch.__version__.split('+')[0]} {sha(struct.pack(f'{len(values)}f', *values))}"


def measure(folder: Path, flyby: Command = process) -> dict[str, Any]:
    found: dict[str, Any] = {"probe": probe(), "sites": of_sites(folder / "sites", flyby)}
    for name, words in RUNS.items():
        flyby("run", *words, "--out", str(folder / name))
        inside = folder / name
        methods = words[1].split(",")
        found[name] = {m: of_run(inside / m) for m in methods} if len(methods) > 1 else of_run(inside)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        Path(sys.argv[1]).write_text(json.dumps(measure(Path(temporary)), indent=1) + "\n")
