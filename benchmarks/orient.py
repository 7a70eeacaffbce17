"""Adapting Q neighbours together against one by one, in one run: the same data, the same steps, every way there is.

    python benchmarks/orient.py                      # small, on a CPU
    python benchmarks/orient.py --device cuda        # vgg-wildfire at full width, 29 neighbours, batch 32

``plain`` is an ordinary PyTorch loop (a module, autograd, torch.optim.SGD) over one neighbour after another; ``one by
one`` is flyby's own loop with together: false; the others put all neighbours into one step. The ratio is against the
faster of the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from flyby.bench.neighbours import made_up, plain, seconds_of, stacked
from flyby.data.views import STANDARD
from flyby.meeting import OrientSettings
from flyby.models import ModelSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="vgg-wildfire")
    parser.add_argument("--models", type=int, default=None, help="neighbours (29 on a GPU, 4 on a CPU)")
    parser.add_argument("--size", type=int, default=None, help="pixels a side (64 on a GPU, 16 on a CPU)")
    parser.add_argument("--width", type=float, default=None)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=2)
    words = parser.parse_args()
    device, gpu = torch.device(words.device), words.device.startswith("cuda")
    models, size = words.models or (29 if gpu else 4), words.size or (64 if gpu else 16)
    width, samples = words.width or (1.0 if gpu else 0.25), words.samples or (640 if gpu else 64)
    spec = ModelSpec(name=words.model, classes=2, channels=3, size=(size, size), width=width)
    site = made_up(samples, size, device)
    torch.backends.cudnn.benchmark = True
    print(
        f"{words.model} (width {width:g}), {models} neighbours, {samples} images of {size}x{size}, batch {words.batch},"
        f" {torch.cuda.get_device_name() if gpu else 'CPU'}"
    )

    def settings(**changes: object) -> OrientSettings:
        return OrientSettings(
            **{"batch": words.batch, "patience": 10_000, "views": STANDARD, "graph": False, **changes}
        )

    ways: dict[str, tuple[Callable[..., None], OrientSettings]] = {
        "plain": (plain, settings()),
        "one by one": (stacked, settings(together=False)),
        "together, vmap": (stacked, settings(backend="vmap")),
        "together, matmul": (stacked, settings(backend="matmul")),
        "together, loop": (stacked, settings(backend="loop")),
    }
    if gpu:
        ways["one by one, graph"] = (stacked, settings(together=False, graph=True))
        ways |= {
            f"together, {b}, graph": (stacked, settings(backend=b, graph=True)) for b in ("vmap", "matmul", "loop")
        }
    steps = words.epochs * -(-samples // words.batch)
    base = float("inf")
    for name, (work, how) in ways.items():
        try:
            spent = seconds_of(partial(work, site, spec, models, settings=how, device=device), words.epochs, device)
        except Exception as error:  # one way that this device cannot go is no reason to lose the others
            print(f"{name:<26} failed: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        if name in ("plain", "one by one"):
            base = min(base, spent)
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:5.1f} GiB" if gpu else ""
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.empty_cache()
        print(
            f"{name:<26} {spent / steps * 1000:9.2f} ms a step of all {models}   ratio {base / spent:5.2f}{memory}",
            flush=True,
        )


if __name__ == "__main__":
    main()
