"""What AURORA's learned alignment costs over FAFI's plain SALT, per step, both in one run and interleaved.

python benchmarks/aurora_overhead.py                # on a GPU: resnet18, 32x32, batch 512 x 2 views; on a CPU:
cnn-small, batch 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

import torch

from flyby.data.site import Part, Site
from flyby.data.views import SALT, augment
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES
from flyby.rng import generator
from flyby.training.optim import make_optimizer
from flyby.training.settings import TrainSettings
from flyby.training.steps import Step, batches, one_epoch


def main() -> None:
    cuda = torch.cuda.is_available()
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--model", default="resnet18" if cuda else "cnn-small")
    words.add_argument("--batch", type=int, default=512 if cuda else 64)
    words.add_argument("--steps", type=int, default=12)
    words.add_argument("--repeats", type=int, default=9)
    asked = words.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(1)
    n = asked.batch * asked.steps
    rng = generator("overhead")
    part = Part(
        torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=rng),
        torch.randint(0, 10, (n,), generator=rng),
    ).to(device)
    site = Site("bench", part, part, part, tuple("0123456789"))
    settings = TrainSettings(clip=1.0, batch=asked.batch)
    loops = {}
    for name in ("salt", "aurora"):
        kind = OBJECTIVES[name]
        chosen = kind.settings_type()
        spec = kind.adapt_spec(ModelSpec(name=asked.model, classes=10, size=(32, 32)), chosen)
        model = spec.build(generator("model")).to(device)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        objective = kind(chosen).to(device)
        objective.prepare(model, site, 0)
        view = partial(
            augment,
            settings=SALT,
            mean=spec.statistics(device)[0],
            std=spec.statistics(device)[1],
            rng=generator("views", device=device),
        )
        optimizer = make_optimizer(model, objective, settings)
        step = Step(model, objective, optimizer, part, view, settings, 2, view.keywords["rng"])

        def epoch(step: Step = step) -> float:
            order = batches(n, asked.batch, generator("order"), device)
            began = time.perf_counter()
            one_epoch(step, order, 0.5)
            step.means()  # waits for the device
            steps: int = asked.steps
            return (time.perf_counter() - began) / steps

        loops[name] = epoch
    for epoch in loops.values():
        epoch()
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(asked.repeats):
        for name, epoch in loops.items():
            seconds[name].append(epoch())
    medians = {name: statistics.median(v) for name, v in seconds.items()}
    ratio = statistics.median(a / s for a, s in zip(seconds["aurora"], seconds["salt"], strict=True))
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if cuda else "cpu",
                "model": asked.model,
                "batch": asked.batch,
                "views": 2,
                "milliseconds_per_step": {k: round(1e3 * v, 3) for k, v in medians.items()},
                "samples_per_second": {k: round(asked.batch / v) for k, v in medians.items()},
                "aurora_over_salt": round(ratio, 4),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
