"""``flyby inspect``: what a parcel says, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby.commands.common import Json, TrustFile

if TYPE_CHECKING:
    from flyby.parcels.parcel import Manifest


def inspect(
    path: Annotated[Path, typer.Argument(help="A .parcel file.")], trust: TrustFile = None, as_json: Json = False
) -> None:
    """Show what a parcel says and check that it is whole. Nothing in it is ever run."""
    from flyby.names import printable
    from flyby.parcels import parcel, signing

    made = parcel.read(path)
    signature = signing.verdict(made, signing.Trust.load(trust) if trust else None)
    facts = json.loads(made.manifest.model_dump_json()) | {
        "bytes": path.stat().st_size,
        "parameters": made.manifest.spec.parameter_count(),
        "signed": bool(made.signature),
        "signature": signature._asdict(),
    }
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, title=Text(printable(str(path))), title_justify="left")
    for key, value in _rows(made.manifest, facts):
        table.add_row(key, Text(printable(value)))
    Console().print(table)


def _rows(m: Manifest, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    head = m.spec.head if m.spec.head != "linear" else "linear head"
    counts = zip(m.class_names, m.counts, strict=True) if m.counts else ()
    yield "sender", m.sender
    yield "method", m.method
    yield "model", f"{m.spec.name}, {head}, {facts['parameters']:,} parameters"
    yield "images", f"{m.spec.size[0]}x{m.spec.size[1]}x{m.spec.channels}"
    yield "samples", f"{m.samples:,}"
    yield "class counts", ", ".join(f"{n}: {c}" for n, c in counts if c) if m.counts else "not shared"
    yield "codec", m.codec
    yield "extras", ", ".join(m.extras) or "none"
    yield "size", f"{facts['bytes']:,} bytes in {len(m.tensors)} tensors"
    yield "checked", "whole: sizes, shapes, hashes and finiteness"
    yield "signature", facts["signature"]["note"]
    yield from _trained(m.provenance)


def _trained(provenance: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a sender says of its training: its own words, of any shape and length."""
    versions, private = provenance.get("versions"), provenance.get("privacy")
    version = versions.get("flyby", "?") if isinstance(versions, dict) else "?"
    yield "trained by", f"flyby {str(version)[:40]}, seed {str(provenance.get('seed', '?'))[:40]}"
    if isinstance(private, dict):
        epsilon, delta, source = (str(private.get(key, "?"))[:40] for key in ("total_epsilon", "delta", "randomness"))
        yield "privacy", f"says: epsilon {epsilon} at delta {delta}, randomness {source}"
