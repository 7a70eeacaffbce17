"""One rule for what a participant may be called: a name that one door takes, every door takes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import random_parcel
from flyby.deploy.credentials import write_node_keys
from flyby.errors import BadInput
from flyby.names import as_name, check_name
from flyby.parcels import signing
from flyby.parcels.ledger import Ledger
from flyby.parcels.signing import PublicKey, Trust

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
