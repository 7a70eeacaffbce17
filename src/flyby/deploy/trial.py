"""``flyby flower up``: one whole round over Flower on this machine, on data split as ``flyby run`` would, or with one
source a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import Part, Site, site_of
from flyby.data.splits import make_split
from flyby.deploy.local import Federation, check_flower, interruptible
from flyby.deploy.round import NodeSettings, Round, joined, must_be_new
from flyby.deploy.scratch import Scratch
from flyby.files import write_json
from flyby.fusion import load_predictor
from flyby.fusion.evaluation import accuracy, evaluate_dataset
from flyby.machine import pick_device
from flyby.names import as_name, check_name
from flyby.runs.config import RunConfig, data_of, make_config, plan
from flyby.runs.folder import Run

OWN = ("data.", "split.")  # settings of the split, which happens here: nothing that a round could tell its sites


def up(
    sources: Sequence[str],
    asked: Round,
    settings: Sequence[str] = (),
    *,
    nodes: int = 3,
    split: dict[str, Any] | None = None,
    device: str = "auto",
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Bring a federation up, run ``asked`` over ``sources``, take it down. One source is split among ``nodes``, and its
    test images judge the result."""
    check_flower()
    must_be_new(Path(asked.out))
    sites = nodes if len(sources) == 1 else len(sources)
    asked = asked.model_copy(
        update={"settings": joined(s for s in settings if not s.startswith(OWN)), "sites": sites}
    ).check()
    with interruptible(), Scratch("flyby-sites") as folder:
        test = None
        if len(sources) == 1:
            config = make_config(
                asked.method,
                fusion=asked.fusion or None,
                seed=asked.seed,
                data={"name": sources[0], "size": asked.size or None},
                split={**(split or {}), "clients": nodes},
                model=asked.model or None,
                epochs=asked.epochs or None,
                assignments=settings,
            )
            bundle = data_of(config).load()
            test = bundle.test
            told = divided(config, bundle, folder)
        else:
            told = [NodeSettings(data=source, site=name) for name, source in named(sources).items()]
            for node in told:
                plan(asked.config(node.data), data_of(asked.config(node.data)).load())
        with Federation(tell) as federation:
            federation.add(*(node.model_copy(update={"device": device}) for node in told))
            result = federation.run(asked)
    if test is not None:
        result["accuracy"] = judged(Path(asked.out), test, device)
        write_json(Run(asked.out).result_path, result)
    return result


def divided(config: RunConfig, bundle: DataBundle, folder: Path) -> list[NodeSettings]:
    """One .npz a site of the split, with the very images that ``flyby run`` would train that site on."""
    plan(config, bundle)
    split = make_split(bundle.train, config.split, config.seed)
    for name in split.shares:
        check_name(name)
    # An .npz does not say that its images must not be flipped; the recipe does.
    unflipped = "" if bundle.mirror or "flip" in config.views else "views.flip=0"
    told = []
    for name in split.shares:
        path = folder / f"{name}.npz"
        _write(site_of(bundle, split, name), path)
        told.append(NodeSettings(data=str(path), site=name, settings=unflipped))
    return told


def _write(site: Site, path: Path) -> None:
    def arrays(part: Part, kind: str) -> dict[str, Any]:
        return {f"x_{kind}": part.images.numpy(), f"y_{kind}": part.labels.numpy()} if len(part) else {}

    np.savez(path, class_names=np.array(site.class_names), **arrays(site.train, "train"), **arrays(site.val, "val"))


def named(sources: Sequence[str]) -> dict[str, str]:
    """A site's name from its source's, where that is one and nobody else's; numbers otherwise. Paths become absolute:
    nodes have their own folder."""
    names = [as_name(Path(source).stem) for source in sources]
    if len(set(names)) < len(names):
        names = [f"site-{number}" for number in range(len(sources))]
    return {
        name: str(Path(s).expanduser().absolute()) if Path(s).expanduser().exists() else s
        for name, s in zip(names, sources, strict=True)
    }


def judged(model: Path, test: Dataset, device: str) -> float:
    scores, part = evaluate_dataset(load_predictor(model), test, pick_device(device))
    return accuracy(scores, part.labels)
