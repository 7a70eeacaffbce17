"""Accuracy, size and time of an ensemble and of the one network that ``compact`` makes of it, on the same uploads.

``python benchmarks/distil_gpu.py --data shared/data/cifar10`` trains ResNet-18 at five sites (or finds their uploads in
--work), with a tenth of every site's images held out: these are the unlabelled proxy, and no client trains on them.
One line of JSON for each alpha and way: teacher's and student's test accuracy, their bytes, their milliseconds per
image, and the seconds that distilling took. Run it before and after a change of a default; rows go to stdout at once.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from flyby.data.site import part_of
from flyby.data.splits import Split
from flyby.fusion import FUSIONS
from flyby.fusion.base import Server
from flyby.machine import hardware, pick_device
from flyby.parcels.inbox import Inbox
from flyby.runs.config import make_config
from flyby.runs.folder import Run
from flyby.runs.pipeline import Options, run
from flyby.runs.server import beside_teacher, held_out
from flyby.settings import parse_assignment

WAYS = ("", "teacher=ensemble", "source=both", "source=synthetic")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--data", default="digits")
    words.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.3])
    words.add_argument("--epochs", type=int, default=25, help="of the sites")
    words.add_argument("--server-epochs", type=int, default=200)
    words.add_argument("--model", default=None)
    words.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the server, on the same uploads")
    words.add_argument("--ways", nargs="+", default=list(WAYS), help="settings of compact, with commas")
    words.add_argument("--work", type=Path, default=Path("runs/distil-gpu"))
    words.add_argument("--device", default="auto")
    words.add_argument("--set", dest="settings", action="append", default=[], help="of the sites' run")
    asked = words.parse_args()
    device = pick_device(asked.device)
    for alpha in asked.alphas:
        config = make_config(
            "ensemble",
            model=asked.model,
            epochs=asked.epochs,
            data={"name": asked.data},
            split={"clients": 5, "alpha": alpha},
            assignments=["locals=false", "split.val=0.1", *asked.settings],
        )
        folder = asked.work / f"alpha-{alpha:g}"
        run(config, folder, Options(engine="inline", device=device, resume=True, quiet=True, keep=False))
        bundle, inbox = config.data.load(), Inbox(sorted(Run(folder).parcels.glob("*.parcel")))
        assert bundle.test is not None
        proxy, test = held_out(bundle, Split.load(Run(folder).split)), part_of(bundle.test)
        for way in asked.ways:
            for seed in asked.seeds:
                values = dict(parse_assignment(text) for text in way.split(",") if text)
                kind, server = FUSIONS["compact"], Server(proxy, seed, device)
                rule = kind(kind.settings_type.model_validate({"epochs": asked.server_epochs, **values}))
                start = time.perf_counter()
                student = rule.fuse(inbox, server)
                row = {"alpha": alpha, "way": way or "default", "seed": seed, "proxy": len(proxy)}
                row |= {"seconds": round(time.perf_counter() - start, 1), "hardware": hardware(device)}
                teacher = rule.teacher(inbox, server)
                assert teacher is not None
                print(json.dumps(row | beside_teacher(student, teacher, test, device)), flush=True)


if __name__ == "__main__":
    main()
