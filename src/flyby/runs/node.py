"""What a real node does: personalise its own model from those it received, with no server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyby.data.site import whole_site
from flyby.data.sources import load
from flyby.files import atomic_folder, write_json
from flyby.fusion.predictor import check_replaceable, save_predictor
from flyby.machine import pick_device
from flyby.meeting.admit import read_inbox
from flyby.meeting.pipeline import check_site, orient
from flyby.meeting.settings import VARIANTS, OrientSettings, stage_defaults
from flyby.parcels import parcel
from flyby.parcels.gate import Gate, remember
from flyby.settings import build, parse_assignment


@dataclass(frozen=True)
class Wish:
    """What a real node was asked to make, from its own parcel and its own images."""

    own: Path
    data: str
    out: Path
    variant: str = "fol"
    size: int | None = None
    assignments: Sequence[str] = ()
    seed: int = 0
    device: str = "auto"
    export: bool = True


def orient_folder(
    wish: Wish,
    inbox: Path | Callable[[], Sequence[Path]],
    entrance: Callable[[str], Gate],
    ledger: Path | None = None,
) -> dict[str, Any]:
    """``flyby orient``: writes a deployable folder. The received parcels (a folder of them, or a wait that ends with
    them) come through the gate that ``entrance`` opens for this node's name."""
    out = wish.out
    check_replaceable(out, ("orient.json", "*.parcel"))
    VARIANTS[wish.variant]
    own = parcel.read(wish.own)
    sender = own.manifest.sender
    bundle = load(wish.data, size=wish.size or own.manifest.spec.size[0], holdout=0.0)
    site = whole_site(bundle, sender, 0.15, wish.seed)
    check_site(own, site, wish.variant)
    values = dict(_assignment(text) for text in wish.assignments)
    settings = build(OrientSettings, {**stage_defaults(site.size)[1], **values}, "orient")
    files = inbox() if callable(inbox) else inbox  # a wait, once all else is known to be right
    gate = entrance(sender)
    received, refused = read_inbox(files, gate, own)
    made = orient(own, received, site, settings, seed=wish.seed, device=pick_device(wish.device), variant=wish.variant)
    facts = plain({"log": refused + gate.notes + made.log, "candidates": made.rows, **made.facts})
    with atomic_folder(out) as folder:  # the model never stands there without the ledger of what went into it
        card = {"method": wish.variant, "node": sender, "neighbours": len(made.rows) - 1}
        save_predictor(made.predictor, folder, card, export=wish.export)
        write_json(folder / "orient.json", facts)
        gate.ledger.save(folder / "ledger.json")
        parcel.write(made.own, folder / f"{sender}.parcel")
        remember(gate, ledger)  # recorded, then published
    return {
        "out": str(out),
        "variant": wish.variant,
        "node": sender,
        "received": len(received) + len(refused),
        "used": len(made.rows) - 1,
        "chosen": [row["sender"] for row in made.rows if row["chosen"]],
        "scores": {row["sender"]: row["score"] for row in made.rows},
        "log": facts["log"],
        "bytes_received": gate.ledger.total_bytes,
        "refused": [one.row() for one in gate.refused],
        "files": sorted(p.name for p in out.iterdir()),
    }


def _assignment(text: str) -> tuple[str, Any]:
    key, value = parse_assignment(text)
    return key.removeprefix("orient."), value


def plain(value: Any) -> Any:
    """The same value for a JSON file: what is not a finite number becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
