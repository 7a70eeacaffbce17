"""Signatures: RFC 8032's own numbers, what breaks one, whose key is whose, and the commands around them."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factories import WAIT, call, done, execute, make_stripes, one_line, random_parcel
from flyby.errors import BadInput
from flyby.parcels import parcel, signing
from flyby.parcels.container import ParcelError
from flyby.parcels.gate import Gate, Refused
from flyby.parcels.parcel import Parcel
from flyby.parcels.signing import BadSignature, PrivateKey, Signed, Trust

# RFC 8032, section 7.1: secret key, public key, message, signature.
VECTORS = {
    "test 1": (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    "test 2": (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    "test 3": (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
}
PKCS8 = bytes.fromhex("302e020100300506032b657004220420")  # the DER before the 32 secret bytes (RFC 8410)


def key_file(folder: Path, seed: bytes, sender: str | None = None) -> Path:
    """A private key file as ``flyby keys new`` or another tool writes it, for a secret that is known."""
    body = base64.b64encode(PKCS8 + seed).decode()
    path = folder / f"{sender or 'plain'}-{seed.hex()[:8]}.key"
    path.write_text(
        (f"flyby sender: {sender}\n" if sender else "")
        + f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n"
    )
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PrivateKey]:
    folder = tmp_path_factory.mktemp("keys")
    return {
        name: signing.read_private(key_file(folder, bytes([i]) * 32, name))
        for i, name in enumerate(("site-a", "site-b", "mallory"))
    }


@pytest.fixture(scope="module")
def signed(keys: dict[str, PrivateKey]) -> dict[str, Parcel]:
    return {name: signing.sign(random_parcel(name, seed=i), keys[name]) for i, name in enumerate(("site-a", "site-b"))}


@pytest.fixture(scope="module")
def trust(keys: dict[str, PrivateKey]) -> Trust:
    made = Trust()
    for name in ("site-a", "site-b"):
        made.add(name, keys[name].public)
    return made


# -- the numbers of the standard


@pytest.mark.parametrize("case", VECTORS)
def test_the_standards_own_numbers(case: str, tmp_path: Path) -> None:
    secret, public, message, signature = (bytes.fromhex(text) for text in VECTORS[case])
    key = signing.read_private(key_file(tmp_path, secret))
    assert key.sender is None
    assert key.public.raw == public
    assert signing.sign_bytes(key.key, message) == signature
    assert signing.verify_bytes(public, signature, message)
    assert not signing.verify_bytes(public, signature, message + b"\0")
    assert not signing.verify_bytes(bytes(32), signature, message)
    assert not signing.verify_bytes(b"\xff" * 32, signature, message), "32 bytes that are no point of the curve"


def test_the_block_is_version_key_signature_over_prefix_and_manifest(
    keys: dict[str, PrivateKey], signed: dict[str, Parcel]
) -> None:
    item, key = signed["site-a"], keys["site-a"]
    assert len(item.signature) == 97
    assert item.signature[:1] == b"\x01"
    assert item.signature[1:33] == key.public.raw
    assert item.signature[33:] == key.key.sign(b"flyby parcel manifest, signature block 1\0" + item.manifest.to_bytes())
    assert not signing.verify_bytes(key.public.raw, item.signature[33:], item.manifest.to_bytes()), (
        "without the prefix it means nothing"
    )
    assert item.manifest == random_parcel("site-a", seed=0).manifest, "the content stays as it is"
    assert signing.sign(item, key).signature == item.signature, "signing is deterministic"


# -- what breaks one


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.floats(0, 1, exclude_max=True),
    mask=st.integers(1, 255),
    region=st.sampled_from(["header", "manifest", "signature", "payload"]),
)
def test_a_changed_byte_anywhere_is_refused(
    place: float,
    mask: int,
    region: str,
    signed: dict[str, Parcel],
    trust: Trust,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data = bytearray(parcel.to_bytes(signed["site-a"]))
    length = len(signed["site-a"].manifest.to_bytes())
    start, end = {
        "header": (0, 28),
        "manifest": (28, 28 + length),
        "signature": (28 + length, 125 + length),
        "payload": (125 + length, len(data)),
    }[region]
    data[start + int(place * (end - start))] ^= mask
    path = tmp_path_factory.getbasetemp() / "bent.parcel"
    path.write_bytes(data)
    for known in (None, trust):
        with pytest.raises(Refused) as caught:
            Gate(trust=known).check(path)
        assert region != "signature" or caught.value.stage == "signature"


def test_every_byte_of_the_signature_block_counts(signed: dict[str, Parcel]) -> None:
    item = signed["site-a"]
    text = Signed.parcel(item).content
    for place in range(97):
        bent = bytearray(item.signature)
        bent[place] ^= 0x10
        with pytest.raises(BadSignature):
            Signed("site-a", text, bytes(bent)).signer("x")
    for block in (item.signature[:-1], item.signature + b"\0", b"\x01", bytes(97), b"\x02" + item.signature[1:]):
        with pytest.raises(BadSignature):
            Signed("site-a", text, block).signer("x")
    assert Signed("site-a", text, b"").signer("x") is None


def refusal(item: Parcel, **options: object) -> Refused:
    with pytest.raises(Refused) as caught:
        Gate(**options).check(item)  # type: ignore[arg-type]
    return caught.value


def test_swapped_signatures_are_refused(signed: dict[str, Parcel], trust: Trust) -> None:
    a, b = signed["site-a"], signed["site-b"]
    for one, other in ((a, b), (b, a)):
        swapped = dataclasses.replace(one, signature=other.signature)
        assert refusal(swapped).stage == "signature"
        assert "does not fit" in str(refusal(swapped, trust=trust))


def test_a_known_sender_must_sign_and_with_its_own_key(
    keys: dict[str, PrivateKey], signed: dict[str, Parcel], trust: Trust
) -> None:
    assert Gate(trust=trust).check(signed["site-a"]).manifest.sender == "site-a"
    assert "is not signed" in str(refusal(random_parcel("site-a"), trust=trust)), "a stripped signature is no way in"
    forged = signing.sign(random_parcel("site-a", seed=9), PrivateKey(keys["mallory"].key, None))
    assert "not the key that site-a is trusted with" in str(refusal(forged, trust=trust))
    second_name = signing.sign(random_parcel("site-z", seed=9), PrivateKey(keys["site-b"].key, None))
    assert "the key of site-b" in str(refusal(second_name, trust=trust)), "one key, one sender"


def test_strangers_come_in_unless_signatures_are_required(keys: dict[str, PrivateKey], trust: Trust) -> None:
    from flyby.parcels.gate import Policy

    unsigned, stranger = random_parcel("site-c"), signing.sign(random_parcel("mallory"), keys["mallory"])
    for item in (unsigned, stranger):
        Gate().check(item)
        Gate(trust=trust).check(item)
    strict = Policy(require_signed=True)
    assert "is not signed" in str(refusal(unsigned, policy=strict, trust=trust))
    assert "does not have mallory" in str(refusal(stranger, policy=strict, trust=trust))
    with pytest.raises(BadInput, match="needs --trust"):
        Gate(strict)


def test_a_key_signs_for_its_own_sender_only(keys: dict[str, PrivateKey]) -> None:
    with pytest.raises(BadInput, match="the key is site-a's and the parcel comes from site-b"):
        signing.sign(random_parcel("site-b"), keys["site-a"])


# -- key files and the trust file


def test_key_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    secret, public, key = signing.new_key("site-a", tmp_path / "keys")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert signing.read_private(secret).public == signing.read_public(public) == signing.read_either(secret) == key
    assert public.read_text() == f"flyby-ed25519 {key.text} site-a\n"
    assert len(key.fingerprint) == 39
    assert key.fingerprint.replace(":", "") == hashlib.sha256(key.raw).hexdigest()[:32]
    with pytest.raises(BadInput, match="exists already"):
        signing.new_key("site-a", tmp_path / "keys")
    assert signing.new_key("site-b", tmp_path / "keys")[2].raw != key.raw
    secret.chmod(0o644)
    with pytest.raises(BadInput, match="chmod 600"):
        signing.read_private(secret)
    for name in ("../a", "a b", "", "a/b"):
        with pytest.raises(BadInput, match="cannot be called"):
            signing.new_key(name, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "hello", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "flyby-ed25519 AAAA site-a\n"],
)
def test_what_is_no_key_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.key"
    path.write_text(text)
    path.chmod(0o600)
    for read in (signing.read_private, signing.read_public, signing.read_either):
        with pytest.raises(BadInput, match=r"is not (an unencrypted|a public)"):
            read(path)
    with pytest.raises(BadInput, match="No such file"):
        signing.read_public(tmp_path / "none.pub")


def test_a_key_of_another_kind_or_behind_a_passphrase_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    for key, lock in (
        (ec.generate_private_key(ec.SECP256R1()), NoEncryption()),
        (ed25519.Ed25519PrivateKey.generate(), BestAvailableEncryption(b"x")),
    ):
        path = tmp_path / "other.key"
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
        path.chmod(0o600)
        with pytest.raises(BadInput, match="not an unencrypted Ed25519"):
            signing.read_private(path)


def test_trust_is_never_replaced_by_the_way(tmp_path: Path, keys: dict[str, PrivateKey]) -> None:
    a, b = keys["site-a"].public, keys["site-b"].public
    trust = Trust()
    trust.add("site-a", a)
    trust.add("site-a", a)
    assert trust.senders == {"site-a": [a.text]}
    with pytest.raises(BadInput, match="trusted with another key"):
        trust.add("site-a", b)
    with pytest.raises(BadInput, match="trusted as site-a's already"):
        trust.add("site-b", a)
    trust.add("site-a", b, also=True)
    assert trust.keys_of("site-a") == [a.raw, b.raw]
    trust.add("site-a", b, replace=True)
    assert trust.keys_of("site-a") == [b.raw]
    assert (trust.owner_of(b.raw), trust.owner_of(a.raw)) == ("site-a", None)
    trust.save(tmp_path / "trust.json")
    assert Trust.load(tmp_path / "trust.json") == trust


BAD_TRUST = {
    "no JSON": "{",
    "a list": "[]",
    "unknown key": '{"schema_version": 1, "senders": {}, "more": 1}',
    "another schema": '{"schema_version": 2, "senders": {}}',
    "a bad name": '{"senders": {"a b": ["%s"]}}',
    "no keys": '{"senders": {"a": []}}',
    "a short key": '{"senders": {"a": ["AAAA"]}}',
    "one key for two": '{"senders": {"a": ["%s"], "b": ["%s"]}}',
}


@pytest.mark.parametrize("case", BAD_TRUST)
def test_a_bad_trust_file_is_one_sentence(case: str, tmp_path: Path, keys: dict[str, PrivateKey]) -> None:
    (tmp_path / "trust.json").write_text(BAD_TRUST[case].replace("%s", keys["site-a"].public.text))
    with pytest.raises(BadInput, match=r"trust\.json"):
        Trust.load(tmp_path / "trust.json")


def test_without_cryptography_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\nfrom pathlib import Path\nfrom flyby.parcels import signing\n"
        "from flyby.errors import BadInput\ntry:\n    signing.verify_bytes(bytes(32), bytes(64), b'')\n"
        "except BadInput as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT).stdout
    assert "pip install cryptography" in said


# -- the commands


def test_from_keys_to_a_signed_fusion(tmp_path: Path) -> None:
    """Two sites and a server, as docs/signing.md tells it."""
    data = make_stripes(tmp_path / "stripes.npz", 90, 30)
    trust = tmp_path / "trust.json"
    for name in ("site-a", "site-b"):
        made = done("keys", "new", name, "--out", tmp_path, "--json").json
        shown = done("keys", "show", tmp_path / f"{name}.pub", "--json").json
        assert (shown["sender"], shown["fingerprint"]) == (name, made["fingerprint"])
        assert done("keys", "show", tmp_path / f"{name}.key", "--json").json == shown
        assert (
            done("keys", "trust", trust, tmp_path / f"{name}.pub", "--sender", name, "--json").json["fingerprint"]
            == made["fingerprint"]
        )
    train = ("train", "--data", data, "--model", "mlp", "--epochs", 1, "--quiet")
    facts = done(*train, "--key", tmp_path / "site-a.key", "--out", tmp_path / "a.parcel", "--json").json
    assert (facts["sender"], facts["signer"]) == (
        "site-a",
        done("keys", "show", tmp_path / "site-a.pub", "--json").json["fingerprint"],
    )
    done(*train, "--site", "site-b", "--out", tmp_path / "b.parcel")
    assert done("inspect", tmp_path / "b.parcel", "--json").json["signature"] == {
        "fingerprint": None,
        "valid": False,
        "trusted_as": None,
        "note": "none",
    }
    both = (tmp_path / "a.parcel", tmp_path / "b.parcel")
    fuse = ("fuse", *both, "--out", tmp_path / "out", "--no-export")
    assert "b.parcel is not signed" in one_line(call(*fuse, "--trust", trust))
    before = parcel.read(tmp_path / "b.parcel").manifest
    done("sign", tmp_path / "b.parcel", "--key", tmp_path / "site-b.key")
    assert parcel.read(tmp_path / "b.parcel").manifest == before
    answer = execute(*fuse, "--trust", trust, "--require-signed", "--json")
    assert answer.code == 0, answer.err
    assert set(answer.json["signers"]) == {"site-a", "site-b"}
    assert all(answer.json["signers"].values())
    assert (answer.json["refused"], answer.json["notes"], answer.err) == ([], [], "")
    assert "trusted as site-b" in " ".join(done("inspect", tmp_path / "b.parcel", "--trust", trust).out.split())
    assert (
        done("inspect", tmp_path / "b.parcel", "--trust", trust, "--json").json["signature"]["trusted_as"] == "site-b"
    )
    assert done("inspect", tmp_path / "b.parcel", "--json").json["signed"] is True


def test_inspect_shows_a_bad_signature(
    tmp_path: Path, signed: dict[str, Parcel], trust: Trust, keys: dict[str, PrivateKey]
) -> None:
    trust.save(tmp_path / "trust.json")
    cases = {
        "swapped": (dataclasses.replace(signed["site-a"], signature=signed["site-b"].signature), False, "NOT VALID"),
        "odd": (dataclasses.replace(signed["site-a"], signature=b"abc"), False, "NOT VALID"),
        "other key": (
            signing.sign(random_parcel("site-a"), PrivateKey(keys["mallory"].key, None)),
            True,
            "another key",
        ),
        "stranger": (signing.sign(random_parcel("mallory"), keys["mallory"]), True, "is not in the trust file"),
        "two names": (
            signing.sign(random_parcel("site-z"), PrivateKey(keys["site-a"].key, None)),
            True,
            "which is site-a's and not site-z's",
        ),
    }
    for name, (item, valid, said) in cases.items():
        parcel.write(item, tmp_path / "x.parcel")
        signature = done("inspect", tmp_path / "x.parcel", "--trust", tmp_path / "trust.json", "--json").json[
            "signature"
        ]
        assert (signature["valid"], signature["trusted_as"]) == (valid, None), name
        assert said in signature["note"], name


def test_bad_words_to_the_key_commands_are_one_line(tmp_path: Path) -> None:
    done("keys", "new", "site-a", "--out", tmp_path)
    data = make_stripes(tmp_path / "stripes.npz", 30, 9)
    train = (
        "train",
        "--data",
        data,
        "--model",
        "mlp",
        "--epochs",
        3000,
        "--quiet",
        "--out",
        tmp_path / "x.parcel",
    )  # it would be noticed
    assert "--site site-a" in one_line(call(*train, "--site", "site-b", "--key", tmp_path / "site-a.key"))
    assert "is not an unencrypted" in one_line(call(*train, "--key", tmp_path / "stripes.npz"))
    assert "No such file" in one_line(call("keys", "show", tmp_path / "none.pub"))
    assert "exists already" in one_line(call("keys", "new", "site-a", "--out", tmp_path))
    assert "is not a public key" in one_line(call("keys", "trust", tmp_path / "t.json", tmp_path / "site-a.key"))
    parcel.write(random_parcel("site-b"), tmp_path / "b.parcel")
    assert "the key is site-a's" in one_line(call("sign", tmp_path / "b.parcel", "--key", tmp_path / "site-a.key"))
    assert "needs --trust" in one_line(
        call("fuse", tmp_path / "b.parcel", "--out", tmp_path / "out", "--require-signed")
    )
    assert not (tmp_path / "out").exists()


def test_rotation_keeps_both_keys_for_a_while(tmp_path: Path) -> None:
    trust = tmp_path / "trust.json"
    for folder in ("old", "new"):
        done("keys", "new", "site-a", "--out", tmp_path / folder)
        parcel.write(random_parcel("site-a", seed=len(folder)), tmp_path / f"{folder}.parcel")
        done("sign", tmp_path / f"{folder}.parcel", "--key", tmp_path / folder / "site-a.key")
    done("keys", "trust", trust, tmp_path / "old" / "site-a.pub")
    assert "--also" in one_line(call("keys", "trust", trust, tmp_path / "new" / "site-a.pub"))
    assert len(json.loads(trust.read_text())["senders"]["site-a"]) == 1
    done("keys", "trust", trust, tmp_path / "new" / "site-a.pub", "--also")
    for name in ("old", "new"):
        Gate(trust=Trust.load(trust)).check(tmp_path / f"{name}.parcel")
    done("keys", "trust", trust, tmp_path / "new" / "site-a.pub", "--replace")
    with pytest.raises(Refused, match="not the key"):
        Gate(trust=Trust.load(trust)).check(tmp_path / "old.parcel")
    Gate(trust=Trust.load(trust)).check(tmp_path / "new.parcel")


def test_reading_does_not_judge_signatures_but_keeps_them(signed: dict[str, Parcel]) -> None:
    data = parcel.to_bytes(signed["site-a"])
    assert parcel.from_bytes(data).signature == signed["site-a"].signature
    assert parcel.to_bytes(parcel.from_bytes(data)) == data
    with pytest.raises(ParcelError):
        parcel.from_bytes(data[:-1])
