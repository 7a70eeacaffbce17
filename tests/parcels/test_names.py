"""One rule for what a participant may be called: a name that one door takes, every door takes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import random_parcel
from flyby.deploy.client import PARCEL, SERIAL
from flyby.deploy.credentials import write_node_keys
from flyby.deploy.round import read_node
from flyby.deploy.server import Roll, _take_in
from flyby.errors import BadInput
from flyby.names import PATTERN, as_name, check_name
from flyby.parcels import parcel, signing
from flyby.parcels.gate import Gate
from flyby.parcels.ledger import Ledger
from flyby.parcels.signing import PublicKey, Trust
from flyby.runs.config import make_config
from flyby.runs.site import train_parcel

RAW = bytes(range(32))
KEY = base64.b64encode(RAW).decode()
GOOD = ("a", "7", "-", "_", "site-1", "a.b..", "A_b:c@d+e-f", "x" * 128)
BAD = ("", ".", "..", ".hidden", "a b", "a/b", "../a", "a\\b", "a,b", "é", "٣", "a\n", "\na", "a\0", "x" * 129)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    path.chmod(0o600)
    return path


def own_key(folder: Path, name: str) -> None:
    """A key made for a name, and both its files read again."""
    secret, public, _ = signing.new_key(name, folder)
    assert signing.read_private(secret).sender == signing.read_public(public).sender == name


def private_file(folder: Path, name: str) -> None:
    if "\n" in name:  # a line holds no more than a line
        raise BadInput("two lines")
    pem = signing.new_key("somebody", folder)[0].read_text().partition("\n")[2]
    read = signing.read_private(written(folder / "named.key", f"flyby sender: {name}\n{pem}"))
    assert read.sender == name


def trust_file(folder: Path, name: str) -> None:
    trust = {"schema_version": 1, "senders": {name: [KEY]}}
    assert Trust.load(written(folder / "trust.json", json.dumps(trust))).owner_of(RAW) == name


def public_file(folder: Path, name: str) -> None:
    assert signing.read_public(written(folder / "named.pub", f"flyby-ed25519 {KEY} {name}\n")).sender == name


class Content(dict[str, dict[str, SimpleNamespace]]):
    """As much of Flower's RecordDict as the server looks at."""

    config_records: ClassVar[dict[str, object]] = {}

    @property
    def array_records(self) -> Content:
        return self


def flower_answer(folder: Path, name: str) -> None:
    """A parcel from a node that was registered under a name: into the inbox, or nowhere at all."""
    if not name:  # a node without a name goes by its number
        raise BadInput("no name")
    inbox = folder / "deep" / "inbox"
    roll = Roll(Gate(), inbox)
    good = re.fullmatch(PATTERN, name) is not None
    data = parcel.to_bytes(random_parcel(name)) if good else b"junk"
    array = SimpleNamespace(stype=SERIAL, data=data)
    reply = SimpleNamespace(has_error=lambda: False, content=Content({PARCEL: {PARCEL: array}}))
    _take_in(reply, 7, {7: name}, roll, 0.0)
    found = {path for path in folder.rglob("*") if path.is_file()}
    assert found <= {inbox / f"{name}.parcel"}
    if roll.failed:
        raise BadInput(roll.failed[0]["reason"])
    assert found


def trained(folder: Path, name: str) -> None:
    """What ``flyby train --site NAME`` says of a name, before any data is looked for."""
    with pytest.raises(BadInput) as caught:
        train_parcel(make_config("fedavg", data={"name": str(folder / "nowhere")}), folder / "x.parcel", name)
    if "nowhere" not in str(caught.value):
        raise caught.value


DOORS: dict[str, Callable[[Path, str], object]] = {
    "the rule": lambda folder, name: check_name(name),
    "a parcel": lambda folder, name: random_parcel(name),
    "a ledger's sender": lambda folder, name: Ledger().record(name, "server", 1, "d"),
    "a ledger's receiver": lambda folder, name: Ledger().record("somebody", name, 1, "d"),
    "a new key": own_key,
    "a private key's file": private_file,
    "a public key's file": public_file,
    "trust": lambda folder, name: Trust().add(name, PublicKey(RAW)),
    "a trust file": trust_file,
    "a node of Flower": write_node_keys,
    "a node's own settings": lambda folder, name: read_node({"data": "digits", "site": name or ".."}),
    "an answer over Flower": flower_answer,
    "a site that trains": trained,
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_the_same_names(door: str, tmp_path: Path) -> None:
    for number, name in enumerate(GOOD):
        (tmp_path / str(number)).mkdir()
        DOORS[door](tmp_path / str(number), name)


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_the_same_names(door: str, tmp_path: Path) -> None:
    for number, name in enumerate(BAD):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(BadInput) as caught:
            DOORS[door](tmp_path / str(number), name)
        assert "\n" not in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_becomes_a_name(text: str) -> None:
    check_name(as_name(text))


@pytest.mark.parametrize("name", GOOD)
def test_a_name_stays_what_it_is(name: str) -> None:
    assert as_name(name) == name
