"""``flyby inspect``: what a parcel (or a model or node folder) says, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyby.commands.common import Json, LimitOptions, TrustFile, grouped

if TYPE_CHECKING:
    from flyby.parcels.parcel import Manifest
    from flyby.parcels.signing import Trust


@grouped
def inspect(
    *,
    path: Annotated[
        Path, typer.Argument(help="A .parcel file, a model folder, or the folder of a node (flyby orient --node).")
    ],
    trust: TrustFile = None,
    allowed: LimitOptions,
    as_json: Json = False,
) -> None:
    """Show what a parcel, a model folder or a node's folder says, and check what is signed. Nothing in it is run."""
    from flyby.names import printable
    from flyby.parcels import parcel, signing

    known = signing.Trust.load(trust) if trust else None
    if (path / "model.json").exists() or (path / "global" / "model.json").exists():
        _inspect_model(path, known, as_json)
        return
    if path.is_dir():
        _inspect_node(path, as_json)
        return
    allowed.limits.check(parcel.read_manifest(path).spec, printable(str(path)))
    made = parcel.read(path)
    signature = signing.verdict(signing.Signed.parcel(made), known)
    facts = json.loads(made.manifest.model_dump_json()) | {
        "bytes": path.stat().st_size,
        "parameters": made.manifest.spec.parameter_count(),
        "signed": bool(made.signature),
        "signature": signature._asdict(),
    }
    _shown(path, facts, _rows(made.manifest, facts), as_json)


def _shown(path: Path, facts: dict[str, Any], rows: Iterator[tuple[str, str]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flyby.names import printable

    table = Table(show_header=False, box=None, title=Text(printable(str(path))), title_justify="left")
    for key, value in rows:
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


def _inspect_model(path: Path, trust: Trust | None, as_json: bool) -> None:
    """What lies in a model folder and who signed it; the model is not built."""
    from flyby.fusion.predictor import model_folder
    from flyby.parcels.signing import BadSignature, Verdict, read_folder, verdict

    folder = model_folder(path)
    try:
        signature = verdict(read_folder(folder), trust, str(folder))
    except BadSignature as error:
        signature = Verdict(None, False, None, f"NOT VALID ({error})")
    sizes = {one.name: one.stat().st_size for one in sorted(folder.iterdir()) if one.is_file()}
    facts = {"folder": str(folder), "files": sizes, "signature": signature._asdict()}
    files = ((name, f"{size:,} bytes") for name, size in sizes.items())
    _shown(folder, facts, iter([*files, ("signature", signature.note)]), as_json)


def _inspect_node(path: Path, as_json: bool) -> None:
    """A node's life so far: one line per round."""
    from flyby.runs.nodefolder import NodeFolder

    node = NodeFolder.load(path)
    if as_json:
        print(json.dumps(node.state.to_json(), indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flyby.names import printable

    title = (
        f"{path}: {node.state.node}, {len(node.ledger.crossings)} models received in {node.ledger.total_bytes:,} bytes"
    )
    table = Table(title=Text(printable(title)), title_justify="left", box=None)
    for name in ("round", "method", "new", "refused", "kept", "version", "accuracy %", "log-loss"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for one in node.state.rounds:
        row: dict[str, Any] = dict(one)
        again = f" ({len(row['again'])} again)" if row["again"] else ""
        came = [f"{len(row['new'])}{again}", str(len(row["refused"])), str(len(row["kept"]))]
        moved = [_moved(row, "accuracy", 100, 1), _moved(row, "log_loss", 1, 3)]
        table.add_row(str(row["round"]), row["method"], *came, str(row["version"]), *moved)
    Console().print(table)


def _moved(row: dict[str, Any], what: str, times: float, digits: int) -> str:
    return " -> ".join(f"{times * row[when][what]:.{digits}f}" for when in ("before", "after") if row[when])
