"""The memory of a large ensemble at the server: DENSE over many ResNet-18 teachers, all at once and one at a time over
a cached batch.

python benchmarks/teachers.py                  # 50 teachers, one at a time
python benchmarks/teachers.py --resident all   # the same, all activations at once
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

from flyby.fusion import Inbox
from flyby.fusion.base import Server
from flyby.fusion.distilled.dense import Dense, DenseSettings
from flyby.fusion.distilled.teachers import memory_of
from flyby.models import ModelSpec
from flyby.parcels import parcel
from flyby.rng import generator


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--teachers", type=int, default=50)
    words.add_argument("--model", default="resnet18")
    words.add_argument("--images", type=int, default=16)
    words.add_argument("--resident", choices=("one", "all"), default="one")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = words.parse_args()
    torch.set_num_threads(1)
    spec = ModelSpec(name=asked.model, classes=10, size=(32, 32))
    weights, activations = memory_of(spec)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for k in range(asked.teachers):
            state = spec.build(generator("teacher", k)).state_dict()
            made = parcel.make(
                sender=f"site-{k}",
                method="supervised",
                spec=spec,
                class_names=tuple("0123456789"),
                weights=state,
                samples=10,
            )
            paths.append(Path(folder) / f"site-{k}.parcel")
            parcel.write(made, paths[-1])
        before = peak()
        settings = DenseSettings(images=asked.images, steps=1, epochs=1, batch=asked.images, resident=asked.resident)
        began = time.perf_counter()
        Dense(settings).fuse(Inbox(paths), Server(device=asked.device))
        seconds = time.perf_counter() - began
    facts = {
        "teachers": asked.teachers,
        "model": asked.model,
        "images": asked.images,
        "resident": asked.resident,
        "device": asked.device,
        "one_teacher_mib": {
            "weights": round(weights / 2**20, 1),
            "activations": round(asked.images * activations / 2**20, 1),
        },
        "peak_mib": round(peak(), 0),
        "peak_before_mib": round(before, 0),
        "seconds": round(seconds, 1),
    }
    if asked.device.startswith("cuda"):
        facts["device_peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
