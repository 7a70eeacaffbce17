"""Many sites through hubs into one server, on one machine: the same model as one site with all their images.

    python benchmarks/hubs.py                        # 100, 1,000, 10,000 and 100,000 sites of 20 images
    python benchmarks/hubs.py 1000 --width 1280      # as wide as EfficientNet-Lite's features

Every site sums up its features and writes the parcel of ``flyby train --method ridge``; its hub lets the parcels in
and adds them up as ``flyby fuse --partial`` does; the server fuses the hubs' parcels as ``flyby fuse`` does. Only
images are made up, and a small fixed network, built once, stands in for a backbone. One hub's parcels are on disk at a
time. A second process gives all images to one site; ``w_difference`` is the largest difference between the two ridge
heads in float64, in units of their largest number. Stages are in CPU seconds; memory is the process's largest resident
size. Exits with 1 where heads differ by more than 1e-10 (float64; float32 sums are rounded once per site, and only
shown).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flyby.data.site import Part, Site
from flyby.drawing import PALETTE, WIDTH, Drawing, canvas, place_axes
from flyby.files import write_bytes
from flyby.fusion import Server
from flyby.fusion.closed.base import ClosedForm, Contributions, Linear
from flyby.fusion.closed.kept import read_kept
from flyby.fusion.predictor import load_predictor
from flyby.models import ModelSpec
from flyby.parcels import parcel
from flyby.parcels.gate import Gate
from flyby.parcels.inbox import Inbox
from flyby.parcels.ledger import Ledger
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.runs.server import Order, fuse_parcels, make_region, rule_named
from flyby.statistics.catalogue import computed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = tuple("abcdefghij")
IMAGES, SIDE = 20, 8  # per site; images are grey
EXACT = 1e-10
# As many hubs as there are hundreds of sites, and 300 at the most.
HUBS = {100: 4, 1_000: 10, 10_000: 100, 100_000: 300}


def images_of(site: int) -> Part:
    """A site's own images, of two or three classes: a smooth picture for every class, with noise."""
    rng = np.random.default_rng([7, site])
    labels = rng.choice(rng.permutation(len(CLASSES))[: 2 + site % 2], IMAGES)
    x = np.linspace(0, 2 * np.pi, SIDE)
    waves = np.sin(x * (1 + labels[:, None] % 5))[:, :, None] + np.cos(x * (1 + labels[:, None] // 2))[:, None, :]
    pixels = 128 + 40 * waves + rng.normal(0, 40, (IMAGES, SIDE, SIDE))
    images = torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)[..., None])
    return Part(images, torch.from_numpy(labels.astype(np.int64)))


class Sender:
    """What a site sends under ``--method ridge``, over a small network with random weights that gives ``width``
    features. All sites start from the same weights, so one network serves them all."""

    def __init__(self, width: int, dtype: str) -> None:
        widths = {"fc1": 16, "fc2": width}
        self.spec = ModelSpec(name="mlp", classes=len(CLASSES), channels=1, size=(SIDE, SIDE), widths=widths)
        self.send = f"feature-sums:dtype={dtype};least=1"
        self.network = self.spec.build(generator(0, "shared", "init")).eval()

    def parcel_of(self, name: str, train: Part) -> Parcel:
        none = Part(train.images[:0], train.labels[:0])
        site = Site(name, train, none, none, CLASSES)
        return parcel.make(
            sender=name,
            method="ridge",
            spec=self.spec,
            class_names=CLASSES,
            samples=len(train),
            counts=site.counts,
            weights=self.network.state_dict(),
            extras=computed(self.send, self.network, site, 0),
        )


def through_hubs(
    sites: int, hubs: int, sender: Sender, folder: Path, keep: str = "sites"
) -> tuple[Path, dict[str, float]]:
    """The model folder that the server ends with, and the CPU seconds of each stage."""
    seconds = dict.fromkeys(("sites", "hubs", "server"), 0.0)
    regions = []
    for hub, members in enumerate(np.array_split(np.arange(sites), hubs)):
        with tempfile.TemporaryDirectory(dir=folder) as inbox:
            started = time.process_time()
            paths = []
            for site in members:
                paths.append(Path(inbox) / f"site-{site}.parcel")
                parcel.write(sender.parcel_of(f"site-{site}", images_of(int(site))), paths[-1])
            sent = time.process_time()
            regions.append(folder / f"hub-{hub}.parcel")
            make_region(paths, regions[-1], Order(regions[-1], device="cpu"), Gate(receiver=f"hub-{hub}"))
            seconds["sites"] += sent - started
            seconds["hubs"] += time.process_time() - sent
    started = time.process_time()
    out = folder / "global"
    fuse_parcels(regions, Order(out, assignments=[f"keep={keep}"], export=False, device="cpu"))
    seconds["server"] = time.process_time() - started
    return out, seconds


def in_one_place(sites: int, sender: Sender) -> Inbox:
    """The parcel of one site that holds everybody's images."""
    parts = [images_of(site) for site in range(sites)]
    whole = Part(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
    return Inbox([sender.parcel_of("all", whole)])


def solved(inbox: Inbox) -> Linear:
    """The ridge head in float64, as the server has it before it is rounded into a network."""
    rule = rule_named("ridge")
    assert isinstance(rule, ClosedForm)
    return rule.solve(Contributions(inbox, "ridge"), Server(seed=0))


def head_of(model: Path) -> Linear:
    """The same, from the sums that a model folder keeps."""
    network: Any = load_predictor(model).networks[0]
    return solved(Inbox(read_kept(model, network).items))


def far(one: Linear, other: Linear) -> float:
    pairs = ((one.weight, other.weight), (one.bias, other.bias))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


# -- processes of their own, so that each has a peak of memory


def child(what: str, words: argparse.Namespace) -> dict[str, Any]:
    sites, sender = words.sites[0], Sender(words.width, words.dtype)
    started, busy, facts = time.perf_counter(), time.process_time(), dict[str, Any]()
    logging.getLogger("flyby").setLevel(logging.WARNING)
    if what == "hubs":
        with tempfile.TemporaryDirectory(prefix="flyby-hubs-") as folder:
            model, seconds = through_hubs(sites, words.hubs, sender, Path(folder), words.keep)
            facts["peak_mb"] = peak_mb()
            ledger = Ledger.load(model / "ledger.json")
            facts |= {"stages": {name: round(value, 2) for name, value in seconds.items()}}
            facts |= {"parcels_at_server": ledger.uploads(), "sites_at_server": ledger.sites()}
            facts |= {"bytes_at_server": ledger.bytes_up()}
            head = head_of(model)
    else:
        inbox = in_one_place(sites, sender)
        facts["peak_mb"] = peak_mb()
        head = solved(inbox)
    torch.save({"weight": head.weight, "bias": head.bias}, words.head)
    return facts | {
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(time.process_time() - busy, 2),
    }


def peak_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def asked(what: str, sites: int, hubs: int, dtype: str, words: argparse.Namespace, head: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, str(sites), "--child", what, "--hubs", str(hubs), "--dtype", dtype]
    command += ["--width", str(words.width), "--head", str(head), "--keep", words.keep]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(sites: int, dtype: str, words: argparse.Namespace) -> dict[str, Any]:
    hubs = words.hubs or HUBS.get(sites, min(300, max(1, sites // 100)))
    with tempfile.TemporaryDirectory(prefix="flyby-heads-") as place:
        heads = [Path(place) / name for name in ("hubs", "one")]
        found = asked("hubs", sites, hubs, dtype, words, heads[0])
        whole = asked("one", sites, hubs, "float64", words, heads[1])
        one, other = (Linear(**torch.load(path, weights_only=True)) for path in heads)
    return {
        "sites": sites,
        "hubs": hubs,
        "images": IMAGES * sites,
        "features": words.width,
        "dtype": dtype,
        "w_difference": far(one, other),
        **found,
        "one_site": whole,
        "hardware": f"one core ({platform.machine()})",
        "date": time.strftime("%Y-%m-%d"),
    }


@Drawing
def growth(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Seconds by stage and memory, against the number of sites."""
    figure = canvas(330)
    half = (WIDTH - 150) / 2
    places = sorted({row["sites"] for row in rows})
    lines: Iterator[tuple[Any, str, dict[str, list[float]]]] = iter(
        (
            (place_axes(figure, 60, 34, half, 240), "CPU seconds, one core", times_of(rows)),
            (place_axes(figure, 120 + half, 34, half, 240), "largest memory of the process, MB", peaks_of(rows)),
        )
    )
    for axes, title, values in lines:
        for (name, heights), colour in zip(values.items(), PALETTE, strict=False):
            axes.plot(places, heights, color=colour, marker="o", markersize=4, label=name)
        axes.set_title(title)
        axes.set_xlabel(f"sites of {IMAGES} images")
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.minorticks_off()
        axes.grid(axis="y")
        axes.legend(frameon=False)
    seconds, memory = figure.axes
    seconds.set_yscale("log")
    memory.set_ylim(bottom=0)
    for axes in figure.axes:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.minorticks_off()
    return figure


def times_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    ordered = sorted(rows, key=lambda row: row["sites"])
    names = {"sites": "all sites", "hubs": "all hubs", "server": "server"}
    return {text: [row["stages"][stage] for row in ordered] for stage, text in names.items()}


def peaks_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    ordered = sorted(rows, key=lambda row: row["sites"])
    return {
        "through hubs": [row["peak_mb"] for row in ordered],
        "all images at one site": [row["one_site"]["peak_mb"] for row in ordered],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sites", nargs="*", type=int, help="how many; 100, 1000, 10000 and 100000 by default")
    parser.add_argument("--hubs", type=int, help="by default one per hundred sites, at most 300")
    parser.add_argument("--width", type=int, default=64, help="features per image")
    parser.add_argument("--dtype", default="float64,float32", help="of the sums that sites send")
    parser.add_argument("--keep", default="sites", help="what the model folder keeps: each hub's sums, or the total")
    parser.add_argument("--rows", type=Path, help="append the rows to this file (.jsonl)")
    parser.add_argument("--figure", type=Path, help="draw the growth of the float64 rows into this .png or .svg")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--head", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    torch.set_num_threads(1)
    if words.child:
        print(json.dumps(child(words.child, words)))
        return 0
    logging.basicConfig(level=logging.WARNING)
    rows, fine = [], True
    for sites in words.sites or HUBS:
        for dtype in words.dtype.split(","):
            row = measured(sites, dtype, words)
            fine = fine and (dtype == "float32" or row["w_difference"] <= EXACT)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if words.rows:
                with words.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if words.figure:
        exact = [row for row in rows if row["dtype"] == "float64"]
        svg = words.figure.suffix == ".svg"
        drawn = growth("hubs", "Seconds and memory by number of sites", exact).encode() if svg else growth.png(exact)
        write_bytes(words.figure, drawn)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
