"""What tests share: tiny datasets on disk, the command line called in this process or its own, small nodes and
parcels."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import typer.main

from flyby import cli
from flyby.data.site import Part, Site
from flyby.data.splits import make_split
from flyby.data.views import PLAIN, ViewSettings
from flyby.engines.jobs import Job
from flyby.meeting import OrientSettings
from flyby.models import ModelSpec
from flyby.objectives.base import Objective
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.runs.config import make_config, plan
from flyby.runs.folder import Run
from flyby.runs.site import jobs_of as sites_jobs
from flyby.training import loop
from flyby.training.loop import Pausing, Trained
from flyby.training.recipe import Recipe
from flyby.training.settings import TrainSettings

Pixels = npt.NDArray[np.uint8]
NAMES = ("cat", "dog", "owl")


def make_images(count: int, size: tuple[int, int] = (8, 8), channels: int = 3, seed: int = 0) -> Pixels:
    """Random uint8 images [count, H, W, C]."""
    return np.random.RandomState(seed).randint(0, 256, (count, *size, channels)).astype(np.uint8)


def encode(image: Pixels, kind: str = "PNG") -> bytes:
    """One image [H, W, C] as the bytes of a PNG, JPEG or (lossless) WebP file; C = 1 is grey, 2 grey with alpha, 4
    RGBA."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    picture.save(buffer, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def make_parquet(
    folder: Path,
    split: str,
    images: Sequence[Pixels | bytes | None] | Pixels,
    labels: Sequence[Any] | npt.NDArray[Any],
    names: Sequence[str] | None = NAMES,
    *,
    shards: int = 1,
    raw: bool = False,
    kind: str = "PNG",
    columns: Mapping[str, Sequence[Any]] | None = None,
    image_column: str = "image",
    label_column: str = "label",
    file: str = "{split}-{shard:05d}-of-{shards:05d}.parquet",
) -> list[Path]:
    """Parquet shards in the Hugging Face layout; an image given as bytes is stored as it is (so broken ones are
    easy)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    data = [image if image is None or isinstance(image, bytes) else encode(image, kind) for image in images]
    metadata = None
    if names is not None:
        features = {image_column: {"_type": "Image"}, label_column: {"names": list(names), "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    paths = []
    for shard, rows in enumerate(np.array_split(np.arange(len(data)), shards)):
        stored: list[Any] = [data[i] if raw else {"bytes": data[i], "path": f"{i}.png"} for i in rows]
        kind_of = pa.binary() if raw else pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = {
            image_column: pa.array(stored, kind_of),
            label_column: pa.array([labels[i] for i in rows], None if len(rows) else pa.int64()),
        }
        table |= {name: pa.array([values[i] for i in rows]) for name, values in (columns or {}).items()}
        paths.append(folder / file.format(split=split, shard=shard, shards=shards))
        pq.write_table(pa.table(table).replace_schema_metadata(metadata), paths[-1])
    return paths


def make_tree(
    root: Path,
    images: Sequence[Pixels | bytes] | Pixels,
    labels: Sequence[int] | npt.NDArray[Any],
    names: Sequence[str] = NAMES,
    *,
    kind: str = "PNG",
) -> Path:
    """A folder of class folders, one (possibly empty) for every name; files are numbered in the order given."""
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        data = image if isinstance(image, bytes) else encode(image, kind)
        (root / names[int(label)] / f"{i:05d}.{kind.lower()}").write_bytes(data)
    return root


def make_npz(path: Path, **arrays: Any) -> Path:
    """An .npz of the given arrays, such as ``images=..., labels=...``."""
    np.savez(path, **arrays)
    return path


CLASSES = 3
WAIT = 600.0  # seconds until a test gives a process up; a machine four times slower, and busy, is not an error


@dataclass(frozen=True)
class Answer:
    """What a command left behind: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


_parser = cache(typer.main.get_command)  # a process needs it once, thousands of calls in one process need the same


def call(*words: object) -> Answer:
    """``flyby WORDS`` in this process, exit code and all."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["flyby", *map(str, words)])
        patch.setattr(typer.main, "get_command", _parser)
        with pytest.raises(SystemExit) as left:
            cli.main()
    return Answer(int(left.value.code or 0), out.getvalue(), err.getvalue())


def done(*words: object) -> Answer:
    """A call that must succeed."""
    answer = call(*words)
    assert answer.code == 0, answer.err
    return answer


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "flyby", *map(str, words)]


def execute(*words: object, cwd: Path | None = None) -> Answer:
    """``flyby WORDS`` as a process of its own."""
    ended = subprocess.run(command(*words), capture_output=True, text=True, timeout=WAIT, cwd=cwd, check=False)
    return Answer(ended.returncode, ended.stdout, ended.stderr)


def start(*words: object) -> subprocess.Popen[str]:
    """A process in a session of its own, so that a signal to its group reaches its workers too, as Ctrl-C in a terminal
    does."""
    return subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None) -> None:
    """Poll until something holds; a process that ends before it does, or that is waited for too long, does not stay
    behind."""
    limit = time.monotonic() + WAIT
    while not condition():
        if process is not None and (process.poll() is not None or time.monotonic() >= limit):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"no {what} was seen before the process ended with {process.wait()}: {process.communicate()}")
        assert time.monotonic() < limit, f"waited {WAIT:g} s for {what}"
        time.sleep(0.005)


def finish(process: subprocess.Popen[str], number: signal.Signals | None = None, *, group: bool = True) -> Answer:
    """Send a signal, if one is given, and wait for the end; who does not end by then does not stay behind."""
    if number is not None:
        (os.killpg if group else os.kill)(process.pid, number)
    try:
        out, err = process.communicate(timeout=WAIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Answer(process.returncode, out, err)


def members(session: int) -> list[int]:
    """The processes of a session that still run; the dead that nobody has collected yet do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(owner) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def one_line(answer: Answer, code: int = 2) -> str:
    """The single line that a failed command owes; returns it without its prefix."""
    assert answer.code == code, (answer.code, answer.err)
    assert answer.err.endswith("\n"), answer.err
    assert answer.err.count("\n") == 1, answer.err
    assert answer.err.startswith("flyby: "), answer.err
    assert "Traceback" not in answer.err
    return answer.err.removeprefix("flyby: ").strip()


def stripes(
    count: int, seed: int = 0, size: int = 8
) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Grey images of three kinds that are easy to tell apart (rows, columns, checks) under noise, and their labels 0,
    1, 2 in turn."""
    random = np.random.RandomState(seed)
    row, column = np.indices((size, size)) // 2 % 2
    kinds = np.stack((row, column, row ^ column)) * 150
    labels = np.arange(count) % CLASSES
    images = kinds[labels] + random.randint(0, 100, (count, size, size))
    return images.astype(np.uint8)[:, :, :, None], labels.astype(np.int64)


def make_stripes(path: Path, count: int = 240, test: int = 60) -> Path:
    """An .npz of stripes with a test split."""
    (x_train, y_train), (x_test, y_test) = stripes(count), stripes(test, seed=1)
    return make_npz(
        path,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        class_names=np.array(["rows", "columns", "checks"]),
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics without the one number that is a stop-watch's."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "samples_per_second"} for row in rows]


def result_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return loaded


TIMED = ("seconds", "timings", "trained", "peak_memory_mb", "command", "engine")


def same_run(left: Path, right: Path) -> None:
    """Two run folders hold the same numbers, byte for byte where bytes are promised."""
    names = sorted(p.name for p in (left / "parcels").glob("*.parcel"))
    assert names
    assert names == sorted(p.name for p in (right / "parcels").glob("*.parcel"))
    for name in [
        "split.json",
        "ledger.json",
        "right.json",
        "global/model.safetensors",
        *(f"parcels/{n}" for n in names),
    ]:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    assert rows_of(left) == rows_of(right)
    assert {k: v for k, v in result_of(left).items() if k not in TIMED} == {
        k: v for k, v in result_of(right).items() if k not in TIMED
    }


STRIPES = ("rows", "columns", "checks")


def striped_site(name: str, seed: int = 0, count: int = 60, size: int = 8, flip: bool = False) -> Site:
    """A node with three easy classes; ``flip`` gives every image its neighbour class's label."""

    def part(count: int, seed: int) -> Part:
        images, labels = stripes(count, seed, size)
        order = np.random.RandomState(seed).permutation(count)
        wrong = (labels + 1) % 3 if flip else labels
        return Part(torch.from_numpy(images[order]), torch.from_numpy(wrong[order]))

    return Site(name, part(count, 3 * seed), part(18, 3 * seed + 1), part(18, 3 * seed + 2), STRIPES)


def small_spec(
    name: str = "cnn-small", size: int = 8, width: float = 0.25, classes: int = 3, **more: object
) -> ModelSpec:
    return ModelSpec(name=name, classes=classes, channels=1, size=(size, size), width=width, **more)  # type: ignore[arg-type]


def recipe_of(
    spec: ModelSpec, objective: Objective, settings: TrainSettings, views: ViewSettings, seed: int, **rest: Any
) -> Recipe:
    """A recipe from its parts."""
    chosen = objective.settings
    return Recipe(
        spec=spec, objective=objective.name, objective_settings=chosen, train=settings, views=views, seed=seed, **rest
    )


def training(
    site: Site,
    spec: ModelSpec,
    objective: Objective,
    settings: TrainSettings,
    views: ViewSettings,
    seed: int,
    **rest: Any,
) -> Pausing[Trained]:
    """``flyby.training.loop.training`` under this very objective, which a test may have made its own."""
    how = {name: rest.pop(name) for name in ("device", "folder", "on_epoch", "method") if name in rest}
    site = replace(site, real=not rest.pop("simulated", True))
    recipe = recipe_of(spec, objective, settings, views, seed, **rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "make_objective", lambda _: objective)
        going = loop.training(site, recipe, **how)
        try:
            first = next(going)
        except StopIteration as end:
            return end.value
    yield first
    return (yield from going)


train_site = loop.at_once(training)


def trained(
    site: Site, spec: ModelSpec | None = None, epochs: int = 6, sender: str | None = None, lr: float = 0.05
) -> Parcel:
    settings = TrainSettings(epochs=epochs, lr=lr, batch=32, schedule="constant")
    made = train_site(
        site, spec or small_spec(size=site.size[0]), Supervised(SupervisedSettings(calibrate=False)), settings, PLAIN, 0
    )
    return made.parcel if sender is None else renamed(made.parcel, sender)


def random_parcel(
    sender: str,
    spec: ModelSpec | None = None,
    seed: int = 0,
    counts: Sequence[int] = (20, 20, 20),
    names: Sequence[str] = STRIPES,
) -> Parcel:
    spec = spec or small_spec()
    weights = spec.build(torch.Generator().manual_seed(seed)).state_dict()
    return parcel.make(
        sender=sender,
        method="supervised",
        spec=spec,
        class_names=names,
        weights=weights,
        samples=sum(counts),
        counts=counts,
    )


def renamed(item: Parcel, sender: str) -> Parcel:
    m = item.manifest
    return parcel.make(
        sender=sender,
        method=m.method,
        spec=m.spec,
        class_names=m.class_names,
        weights=item.weights,
        samples=m.samples,
        counts=m.counts,
    )


def quick(**changes: object) -> OrientSettings:
    """Settings for tests: few epochs, a learning rate that moves."""
    values: dict[str, object] = {
        "epochs": 3,
        "lr": 0.02,
        "batch": 16,
        "patience": 3,
        "buffer": 6,
        "top": 3,
        "diagnostics": False,
    }
    return OrientSettings(**{**values, **changes})  # type: ignore[arg-type]


SETTINGS = ("model.width=0.25", "train.batch=16")


def jobs_of(data: Path, out: Path, *assignments: str, epochs: int = 2, codec: str = "fp32") -> list[Job]:
    """The three jobs of a small run, as ``flyby run`` would make them."""
    split: dict[str, Any] = {"name": "iid", "clients": 3}
    config = make_config(
        "fedavg",
        data={"name": str(data)},
        split=split,
        epochs=epochs,
        assignments=[*SETTINGS, f"codec={codec}", *assignments],
    )
    bundle = config.data.load()
    made = make_split(bundle.train, config.split, config.seed)
    made.save(out / "split.json")
    return sites_jobs(plan(config, bundle), made, Run(out), "cpu", None)
