"""What bounds the ordinary DataLoader script that ``flyby bench`` compares with: its data alone, its step alone, and
both.

python benchmarks/script_parts.py --device cuda                  # resnet18, 32x32, 512 x 2 views, 16 workers
python benchmarks/script_parts.py --workers 1,2,4,8,16
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from flyby.bench.measure import Wanted
from flyby.bench.script import Images, Script, contrastive_view
from flyby.rng import generator


def rate(once: Callable[[], object], samples: int, device: str, seconds: float) -> float:
    """Samples a second, after one call that does not count."""
    once()
    if device != "cpu":
        torch.cuda.synchronize()
    began, done = time.perf_counter(), 0
    while not done or time.perf_counter() - began < seconds:
        once()
        done += samples
        if device != "cpu":
            torch.cuda.synchronize()
    return done / (time.perf_counter() - began)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--workers", default="")
    words.add_argument("--steps", type=int, default=40)
    words.add_argument("--seconds", type=float, default=3.0)
    asked = words.parse_args()
    work = next(w for w in Wanted(asked.device).cases(["salt"]) if w.way == "script")
    part = work.part(work.batch * asked.steps)
    data = Images(part.images.numpy(), part.labels.numpy(), contrastive_view, work.views.views)
    for workers in [int(w) for w in asked.workers.split(",") if w] or [work.workers]:
        script = Script(work.spec().build(generator("bench", "model")), data, work.batch, work.device, workers)

        def load(script: Script = script) -> None:
            for _ in script.loader:
                pass

        samples = work.batch * asked.steps
        views, labels = (tensor.to(work.device) for tensor in next(iter(script.loader)))
        script.loader, loader = [(views, labels)] * asked.steps, script.loader  # type: ignore[assignment]
        facts = {
            "workers": workers,
            "step alone": rate(script.epoch, samples, asked.device, asked.seconds),
        }
        script.loader = loader
        facts["data alone"] = rate(load, samples, asked.device, asked.seconds)
        facts["both"] = rate(script.epoch, samples, asked.device, asked.seconds)
        print(json.dumps({name: round(value) for name, value in facts.items()}), flush=True)


if __name__ == "__main__":
    main()
