"""``flyby bench --growth``: how training grows with clients, FOL with neighbours, and parcels with the size of the
network."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flyby.bench.measure import Wanted, markdown
from flyby.bench.neighbours import Adapt, made_up, plain, seconds_of, stacked
from flyby.data.splits import Split, make_split
from flyby.data.views import STANDARD
from flyby.engines.engine import engine_named
from flyby.engines.jobs import perform
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox
from flyby.machine import hardware, pick_device, versions
from flyby.meeting import OrientSettings
from flyby.models import ModelSpec
from flyby.parcels import parcel
from flyby.rng import generator
from flyby.runs.config import Plan, make_config, plan
from flyby.runs.folder import Run
from flyby.runs.site import jobs_of

REPEATS = 3
ALONE = "one by one"  # as ``inline`` does it on a CPU; on a GPU ``inline`` has several sites at work
Row = dict[str, Any]
log = logging.getLogger(__name__)


def clients(wanted: Wanted, device: str, counts: Sequence[int], engines: Sequence[str]) -> Row:
    """Samples a second of whole rounds of local training, from the call of the engine to the last parcel: starting
    workers counts."""
    gpu = device.startswith("cuda")
    model = wanted.model or ("resnet18" if gpu else "cnn-small")
    size, batch = wanted.size or (32 if gpu else 16), wanted.batch or (128 if gpu else 64)
    each, epochs = (512, 10) if gpu else (256, 4)
    names = engines or ([ALONE, "inline"] if gpu else ["inline", "processes"])
    for name in names:
        if name != ALONE:
            engine_named(name)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="flyby-bench-") as temporary:
        folder = Path(temporary)
        random = np.random.RandomState(0)
        images = random.randint(0, 256, (max(counts) * each, size, size, 3)).astype(np.uint8)
        np.savez(folder / "data.npz", images=images, labels=np.arange(len(images)) % 10)
        words = [f"train.batch={batch}", "train.schedule=constant", "objective.calibrate=false"]
        config = make_config(
            "fedavg",
            data={"name": str(folder / "data.npz"), "holdout": 0.0},
            split={"name": "iid", "clients": max(counts)},
            model=model,
            epochs=epochs,
            assignments=words,
        )
        bundle = config.data.load()
        todo, whole = plan(config, bundle), make_split(bundle.train, config.split, 0)
        train_some(names[0], 1, todo, whole, folder / "warm-up", device)
        for repeat in range(REPEATS):
            for count in counts:
                for name in names:
                    _note(f"{name}, {count} clients", repeat)
                    spent = train_some(name, count, todo, whole, folder / f"{name}-{count}-{repeat}", device)
                    rows.append({"x": count, "line": name, "seconds": spent, "value": count * each * epochs / spent})
    return {
        "title": "Local training of K clients",
        "x": "clients",
        "y": "samples/s",
        "log": False,
        "rows": medians(rows),
        "what": (
            f"{model}, {size}x{size}, batch {batch}, {each} images a client, {epochs} epochs, plain training; with the"
            " start of workers"
        ),
    }


def train_some(engine: str, count: int, todo: Plan, whole: Split, folder: Path, device: str) -> float:
    """Seconds to train the first ``count`` clients of a split."""
    names = list(whole.shares)[:count]
    some = dataclasses.replace(
        whole, shares={n: whole.shares[n] for n in names}, counts={n: whole.counts[n] for n in names}
    )
    some.save(Run(folder).split)
    jobs = jobs_of(todo, some, Run(folder), device, None)
    started = time.perf_counter()
    if engine == ALONE:
        for job in jobs:
            perform(job)
    else:
        engine_named(engine)(jobs, lambda row: None)
    return time.perf_counter() - started


def neighbours(wanted: Wanted, device: str, counts: Sequence[int]) -> Row:
    """Seconds a node needs for one epoch of fine-tuning Q neighbours' models."""
    gpu, here = device.startswith("cuda"), torch.device(device)
    model, size, batch = wanted.model or "vgg-wildfire", wanted.size or (64 if gpu else 16), wanted.batch or 32
    width, samples, epochs = (1.0, 640, 2) if gpu else (0.25, 64, 2)
    spec = ModelSpec(name=model, classes=2, channels=3, size=(size, size), width=width)
    site = made_up(samples, size, here)
    settings = OrientSettings(batch=batch, patience=10_000, views=STANDARD)
    ways: dict[str, tuple[Adapt, OrientSettings]] = {
        "plain loop": (plain, settings),
        "one by one": (stacked, settings.model_copy(update={"together": False})),
        "together": (stacked, settings),
    }
    rows: list[Row] = []
    torch.backends.cudnn.benchmark = True
    for repeat in range(REPEATS):
        for count in counts:
            _note(f"{count} neighbours", repeat)
            for name, (adapt, how) in ways.items():
                spent = seconds_of(partial(_adapt, adapt, site, spec, count, how, here), epochs, here) / epochs
                rows.append({"x": count, "line": name, "seconds": spent, "value": spent})
    return {
        "title": "FOL: one epoch of fine-tuning Q neighbours",
        "x": "neighbours",
        "y": "seconds",
        "log": False,
        "rows": medians(rows),
        "what": (
            f"{model} (width {width:g}), {samples} images of {size}x{size}, batch {batch}; without what is spent once"
        ),
    }


def _adapt(
    adapt: Adapt, site: Any, spec: ModelSpec, count: int, settings: OrientSettings, device: torch.device, epochs: int
) -> None:
    adapt(site, spec, count, epochs, settings, device)


def sizes(wanted: Wanted, widths: Sequence[float], senders: int = 5) -> Row:
    """Bytes of a parcel and seconds to write it, to read and check it, and to average five, as the network widens."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="flyby-bench-") as temporary:
        for width in widths:
            side = wanted.size or 32
            spec = ModelSpec(name=wanted.model or "resnet18", classes=10, channels=3, size=(side, side), width=width)
            log.info("bench: %s, width %g: %s parameters", spec.name, width, f"{spec.parameter_count():,}")
            paths = [Path(temporary) / f"site-{i}.parcel" for i in range(senders)]
            for repeat in range(REPEATS):
                for path in paths:
                    weights = dict(spec.build(generator("bench", path.stem)).state_dict())
                    made = parcel.make(
                        sender=path.stem,
                        method="supervised",
                        spec=spec,
                        class_names=tuple("0123456789"),
                        samples=100,
                        weights=weights,
                    )
                    write = timed(partial(parcel.write, made, path))
                read = timed(partial(parcel.read, paths[0]))
                fuse = timed(lambda paths=paths: FUSIONS["fedavg"]().fuse(Inbox(paths)))  # type: ignore[misc]
                megabytes = paths[0].stat().st_size / 1e6
                for line, spent in (("write one", write), ("read and check one", read), (f"fedavg of {senders}", fuse)):
                    rows.append(
                        {
                            "x": megabytes,
                            "line": line,
                            "seconds": spent,
                            "value": spent,
                            "bytes": paths[0].stat().st_size,
                        }
                    )
                del made, weights
                if repeat + 1 == REPEATS:
                    for path in paths:
                        path.unlink()
    return {
        "title": "A parcel, as the network widens",
        "x": "MB",
        "y": "seconds",
        "log": True,
        "rows": medians(rows),
        "what": f"{wanted.model or 'resnet18'} of widths {', '.join(f'{w:g}' for w in widths)}; float32",
    }


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def medians(rows: Sequence[Row]) -> list[Row]:
    """One row a point and line: the medians of what was measured there."""
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["x"], row["line"]), []).append(row)
    return [
        {**group[0], **{key: statistics.median(r[key] for r in group) for key in ("seconds", "value")}}
        for group in groups.values()
    ]


def grow(kind: str, wanted: Wanted, points: str = "", engines: Sequence[str] = ()) -> dict[str, Any]:
    """Measure one kind of growth at some points; the medians of three rounds."""
    device = "cpu" if kind == "bytes" else pick_device(wanted.device)
    gpu = device.startswith("cuda")
    if kind == "clients":
        counts = whole(points) or ([1, 4, 16, 64] if gpu else [1, 2, 4, 8, 16, 32, 64])
        found = clients(wanted, device, counts, engines)
    elif kind == "neighbours":
        found = neighbours(wanted, device, whole(points) or ([1, 4, 8, 16, 29] if gpu else [1, 2, 4, 8]))
    else:
        found = sizes(wanted, numbers(points) or [0.125, 0.25, 0.5, 1.0, 2.0])
    return {"kind": kind, "device": hardware(device), "versions": versions(), **found}


def _note(what: str, repeat: int) -> None:
    log.info("bench: %s, round %d of %d", what, repeat + 1, REPEATS)


def numbers(points: str) -> list[float]:
    try:
        found = [float(word) for word in points.split(",") if word.strip()]
    except ValueError:
        found = [0.0]
    if any(not 0 < n < 1e6 for n in found):
        raise BadInput(f"--points {points} should be numbers above 0 with commas between, e.g. 1,4,16")
    return found


def whole(points: str) -> list[int]:
    found = numbers(points)
    if any(n != int(n) for n in found):
        raise BadInput(f"--points {points} should be whole numbers here, e.g. 1,4,16")
    return [int(n) for n in found]


def describe(facts: Mapping[str, Any]) -> str:
    """The answer for people: a row a point, a column a line."""
    lines = list(dict.fromkeys(row["line"] for row in facts["rows"]))
    found: dict[float, dict[str, float]] = {}
    for row in facts["rows"]:
        found.setdefault(row["x"], {})[row["line"]] = row["value"]
    first: dict[str, Callable[[Mapping[str, Any]], str]] = {facts["x"]: lambda row: f"{row['x']:.4g}"}
    columns = first | {f"{line} ({facts['y']})": partial(_cell, line) for line in lines}
    rows = [{"x": x, **values} for x, values in found.items()]
    return (
        f"{facts['title']}: {facts['what']}; {facts['device']}\n\n{markdown(rows, columns)}\n\nMedians of {REPEATS}"
        " rounds taken turn about."
    )


def _cell(line: str, row: Mapping[str, Any]) -> str:
    value = row.get(line)
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
