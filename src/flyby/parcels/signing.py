"""Who sent a parcel or made a model: Ed25519 signatures, and the trust file that says whose key is whose.

A parcel's manifest holds the SHA-256 of every tensor, so a signature over the manifest covers the whole content. It is
taken over ``CONTEXT`` and then the manifest's canonical bytes; the prefix keeps a signature made here from meaning
anything elsewhere. A model folder's ``signature.json`` holds the SHA-256 of every file beside it, and is signed in the
same way under a prefix of its own. The signature block is exactly 97 bytes:

========  ==========================================
bytes     content
========  ==========================================
1         version of the block, 1
32        the signer's public key
64        the signature (RFC 8032, Ed25519)
========  ==========================================

That a signature is valid says that the holder of *this* key made it; whose key it is, only the receiver's own trust
file says.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import hashlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flyby import files
from flyby.errors import BadInput
from flyby.names import PATTERN, Name, check_name, printable
from flyby.parcels.parcel import Parcel
from flyby.settings import sentence

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

CONTEXT = b"flyby parcel manifest, signature block 1\0"
FOLDER_CONTEXT = b"flyby model folder, signature block 1\0"
FOLDER_FILE = "signature.json"
VERSION = 1
PUBLIC, SIGNATURE = 32, 64
BLOCK = 1 + PUBLIC + SIGNATURE

_PUBLIC_LINE = re.compile(rf"flyby-ed25519 ([A-Za-z0-9+/]{{43}}=) ({PATTERN})\n?".encode())
_NAME_LINE = re.compile(rb"flyby sender: ?(.*)\n")
# The y of every point of order 1, 2, 4 and 8, little-endian, without the sign of x; 0 and 1 also as p and p + 1.
_SMALL_ORDER = frozenset(
    bytes.fromhex(text)
    for text in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)
_LARGEST = 1 << 16  # bytes of a key file; nobody's key is longer

log = logging.getLogger(__name__)


class BadSignature(BadInput):
    """A signature does not fit what it stands on, or is no signature at all."""


@dataclass(frozen=True)
class PublicKey:
    """A key to check signatures with. ``sender`` is what its file calls its owner; a trust file may know better."""

    raw: bytes
    sender: str | None = None

    @property
    def text(self) -> str:
        return base64.b64encode(self.raw).decode()

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.raw)


class PrivateKey(NamedTuple):
    """A key to sign with, and the name in its file (None where another tool wrote it)."""

    key: Ed25519PrivateKey
    sender: str | None

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.key.public_key().public_bytes_raw(), self.sender)


def fingerprint(public: bytes) -> str:
    """A public key for people to compare: the first 16 bytes of its SHA-256 in groups of four hex digits."""
    digits = hashlib.sha256(public).hexdigest()[:32]
    return ":".join(digits[i : i + 4] for i in range(0, 32, 4))


# Signing and checking


class Signed(NamedTuple):
    """What a signature is checked against: who is said to have made it (None: nobody is), the bytes that are signed,
    prefix and all, and the signature block (empty: there is none)."""

    sender: str | None
    content: bytes
    block: bytes

    @classmethod
    def parcel(cls, item: Parcel) -> Signed:
        return cls(item.manifest.sender, CONTEXT + item.manifest.to_bytes(), item.signature)

    def signer(self, label: str) -> bytes | None:
        """The public key that signed, None where there is no signature; anything else is BadSignature."""
        if not self.block:
            return None
        public, signature = open_block(self.block, label)
        if not verify_bytes(public, signature, self.content):
            raise BadSignature(
                f"{label}: its signature does not fit its content; it was changed after {fingerprint(public)} signed"
                " it, or never signed by it"
            )
        return public


def sign(item: Parcel, key: PrivateKey) -> Parcel:
    """The same parcel with the key's signature. A key that names another sender than the parcel is refused: no receiver
    would believe it."""
    check_sender(key, item.manifest.sender)
    return dataclasses.replace(item, signature=_block(key, Signed.parcel(item).content))


def _block(key: PrivateKey, content: bytes) -> bytes:
    return bytes([VERSION]) + key.public.raw + sign_bytes(key.key, content)


def check_sender(key: PrivateKey, sender: str) -> None:
    if key.sender is not None and key.sender != sender:
        raise BadInput(
            f"the key is {key.sender}'s and the parcel comes from {sender}; train with --site {key.sender}, or use"
            f" {sender}'s key"
        )


def open_block(block: bytes, label: str) -> tuple[bytes, bytes]:
    """(public key, signature) of a signature block, not yet checked."""
    if len(block) != BLOCK or block[0] != VERSION:
        raise BadSignature(
            f"{label}: its signature block of {len(block)} bytes is not one that this flyby knows; have it signed again"
        )
    return block[1 : 1 + PUBLIC], block[1 + PUBLIC :]


def sign_bytes(key: Ed25519PrivateKey, message: bytes) -> bytes:
    """Plain Ed25519, without the prefix."""
    return key.sign(message)


def verify_bytes(public: bytes, signature: bytes, message: bytes) -> bool:
    """Plain Ed25519, without the prefix."""
    _need_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):  # ValueError: the 32 bytes are no point of the curve
        return False
    return True


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise BadInput("signatures need the package cryptography; install it with: pip install cryptography") from None


# Key files


def new_key(sender: str, folder: Path) -> tuple[Path, Path, PublicKey]:
    """Makes a key pair in two files, SENDER.key (private, readable by its owner alone) and SENDER.pub; never over an
    older one."""
    _need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    check_name(sender)
    secret, public = folder / f"{sender}.key", folder / f"{sender}.pub"
    for path in (secret, public):
        if path.exists():
            raise BadInput(f"{path} exists already; name another folder with --out, or move the old key away")
    key = PrivateKey(Ed25519PrivateKey.generate(), sender)
    pem = key.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(f"flyby sender: {sender}\n".encode() + pem)
            file.flush()
            os.fsync(file.fileno())
        files.write_text(public, f"flyby-ed25519 {key.public.text} {sender}\n")
    except FileExistsError:
        raise BadInput(f"{secret} exists already; name another folder with --out, or move the old key away") from None
    except (OSError, BadInput) as error:
        for path in (secret, public):  # half a key pair would only stand in the way of the next try
            path.unlink(missing_ok=True)
        why = error.strerror or error if isinstance(error, OSError) else error
        raise BadInput(f"cannot write {secret}: {why}; name another folder with --out") from None
    return secret, public, key.public


def read_private(path: Path | str) -> PrivateKey:
    """The key of ``--key``: unencrypted PKCS#8 in PEM, after an optional line that names the sender. A file that others
    can read is refused."""
    _need_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path)
    named, sender = _NAME_LINE.match(data), None
    if named:
        sender = named[1].decode(errors="replace")
        check_name(sender)
    key = None
    with contextlib.suppress(ValueError, TypeError, UnsupportedAlgorithm):
        key = load_pem_private_key(data[named.end() if named else 0 :], password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise BadInput(f"{path} is not an unencrypted Ed25519 private key; make one with: flyby keys new NAME")
    if os.name == "posix" and Path(path).stat().st_mode & 0o077:
        raise BadInput(f"{path} can be read by others than its owner; make it private with: chmod 600 {path}")
    return PrivateKey(key, sender)


def read_public(path: Path | str) -> PublicKey:
    """The one line of a .pub file: ``flyby-ed25519 BASE64 SENDER``."""
    line = _PUBLIC_LINE.fullmatch(_read(path))
    if line is None:
        raise BadInput(
            f"{path} is not a public key of flyby (one line: flyby-ed25519 KEY SENDER); ask its owner for the .pub file"
        )
    return PublicKey(_decoded(line[1].decode()), line[2].decode())


def read_either(path: Path | str) -> PublicKey:
    """The public key of a .pub or a .key file."""
    return read_private(path).public if b"PRIVATE KEY" in _read(path) else read_public(path)


def _read(path: Path | str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_LARGEST)
    except OSError as error:
        raise BadInput(f"cannot read the key {path}: {error.strerror or error}") from None


def _decoded(text: str) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error:
        raw = b""
    if len(raw) != PUBLIC or base64.b64encode(raw).decode() != text:
        raise BadInput(f"{text[:60]!r} is not a public key: 32 bytes in base64")
    if raw[:-1] + bytes([raw[-1] & 0x7F]) in _SMALL_ORDER:
        raise BadInput(f"{text!r} is a key of small order, under which anybody can sign; ask its owner for a real one")
    return raw


# The trust file


def _is_key(text: str) -> str:
    try:
        _decoded(text)
    except BadInput as error:
        raise ValueError(str(error)) from None
    return text


class Trust(BaseModel):
    """Whose key is whose, as the receiver says: sender -> public keys (two while one is being changed). A key belongs
    to one sender only."""

    model_config = ConfigDict(strict=True, extra="forbid")
    schema_version: Literal[1] = 1
    senders: dict[
        Name, Annotated[list[Annotated[str, AfterValidator(_is_key)]], Field(min_length=1, max_length=16)]
    ] = {}

    @classmethod
    def load(cls, path: Path | str) -> Trust:
        files.read_json(path)  # says in plain words if it is missing or no JSON
        try:
            trust = cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            raise BadInput(f"{path} is not a trust file: {sentence(error)}") from None
        owners: dict[str, str] = {}
        for sender, keys in trust.senders.items():
            for key in keys:
                if owners.setdefault(key, sender) != sender:
                    raise BadInput(
                        f"{path} gives one key to {owners[key]} and to {sender}; every sender needs a key of its own"
                    )
        return trust

    def save(self, path: Path | str) -> None:
        files.write_json(path, self.model_dump(mode="json"))

    def keys_of(self, sender: str) -> list[bytes]:
        return [_decoded(text) for text in self.senders.get(sender, [])]

    def owner_of(self, public: bytes) -> str | None:
        return next((sender for sender in self.senders if public in self.keys_of(sender)), None)

    def add(self, sender: str, key: PublicKey, *, also: bool = False, replace: bool = False) -> None:
        """Trusts a key as ``sender``'s. Another key of a known sender is never replaced by the way: say ``also`` or
        ``replace``."""
        check_name(sender)
        owner, known = self.owner_of(key.raw), self.senders.get(sender, [])
        if owner not in (None, sender):
            raise BadInput(f"this key is trusted as {owner}'s already; every sender needs a key of its own")
        if known and key.text not in known and not (also or replace):
            others = ", ".join(fingerprint(raw) for raw in self.keys_of(sender))
            raise BadInput(
                f"{sender} is trusted with another key ({others}); ask {sender} why, then say --also to keep both or"
                " --replace to drop the old"
            )
        kept = [] if replace else [text for text in known if text != key.text]
        self.senders[sender] = [*kept, key.text]


class Verdict(NamedTuple):
    """What a signature says: who signed, whether it fits, and whom the trust file takes the signer for."""

    fingerprint: str | None
    valid: bool
    trusted_as: str | None
    note: str


def verdict(signed: Signed, trust: Trust | None = None, label: str | None = None) -> Verdict:
    """A signature, in words; raises nothing, since ``flyby inspect`` wants to show bad ones too."""
    sender, block = signed.sender, signed.block
    try:
        public = signed.signer(label or str(sender))
    except BadSignature as error:
        claimed = block[1 : 1 + PUBLIC] if len(block) == BLOCK else None
        return Verdict(fingerprint(claimed) if claimed else None, False, None, f"NOT VALID ({error})")
    if public is None:
        return Verdict(None, False, None, "none")
    name = fingerprint(public)
    if trust is None:
        return Verdict(name, True, None, f"valid, by key {name}; whose key that is, a trust file says (--trust FILE)")
    owner = trust.owner_of(public)
    if owner == sender:
        return Verdict(name, True, owner, f"valid, by key {name}, trusted as {owner}")
    if owner is not None:
        return Verdict(
            name, True, None, f"valid, but by key {name}, which is {owner}'s and not {sender}'s: NOT TRUSTED"
        )
    another = (
        f"{sender} is trusted with another key" if sender in trust.senders else f"{sender} is not in the trust file"
    )
    return Verdict(name, True, None, f"valid, by key {name}, NOT TRUSTED: {another}")


def need_trust(trust: Trust | None, required: bool) -> None:
    if required and trust is None:
        raise BadInput(
            "--require-signed needs --trust FILE, which says whose key is whose; make one with: flyby keys trust"
        )


def believe(sender: str | None, public: bytes | None, label: str, trust: Trust | None, required: bool) -> None:
    """Refuses what the trust file speaks against: a known sender's thing without its signature or with another's, and,
    where a signature is ``required``, whatever a known sender has not signed. ``public`` is the key of a good
    signature, None where there is none."""
    known = trust is not None and sender in trust.senders
    if public is None:
        if known:
            raise BadInput(
                f"{label} is not signed, and {sender} signs: the trust file has its key; ask {sender} for the signed"
                " one"
            )
        if required:
            raise BadInput(
                f"{label} is not signed; {sender or 'its maker'} can sign it with: flyby sign, or leave out"
                " --require-signed"
            )
    elif trust is not None and (owner := trust.owner_of(public)) != sender:
        name = fingerprint(public)
        if owner is not None:
            raise BadInput(
                f"{label} says that it comes from {sender} and is signed with the key of {owner} ({name}); ask both"
            )
        if known:
            raise BadInput(
                f"{label} is signed with {name}, which is not the key that {sender} is trusted with; ask {sender} about"
                " it"
            )
        if required:
            raise BadInput(
                f"{label} is signed with {name}, but the trust file does not have {sender}; compare keys, then: flyby"
                " keys trust"
            )


def check_model(signed: Signed, label: str, trust: Trust | None, required: bool) -> None:
    """As parcels are let in, a model is used: a bad signature is refused always, a missing or a strange one as
    :func:`believe` says. What is used without a trusted one is said, where there is a signature or a trust file."""
    need_trust(trust, required)
    public = signed.signer(label)
    believe(signed.sender, public, label, trust, required)
    if public is not None and (trust is None or trust.owner_of(public) is None):
        log.warning("note: the signature of %s is %s", label, verdict(signed, trust, label).note)
    elif public is None and trust is not None:
        log.warning("note: %s is not signed, so anybody may have made it; its maker can sign it: flyby sign", label)


# Model folders


class _FolderFile(BaseModel):
    """``signature.json`` of a model folder: who signed which files, and the signature block in base64."""

    model_config = ConfigDict(strict=True, extra="forbid")
    schema_version: Literal[1] = 1
    sender: Name
    files: dict[str, str]
    signature: str

    @property
    def content(self) -> bytes:
        said = self.model_dump(mode="json", exclude={"signature"})
        return FOLDER_CONTEXT + files.canonical(said)


def sign_folder(folder: Path, key: PrivateKey) -> _FolderFile:
    """Writes ``signature.json`` over every plain file that lies in a model folder now (none of a folder in it)."""
    if key.sender is None:
        raise BadInput("the key does not name its owner; begin its file with a line such as: flyby sender: hospital-a")
    names = _names(folder)
    if odd := [name for name in names if files.plain_name(name) != name]:
        raise BadInput(f"{folder} holds {printable(odd[0])!r}, a name that cannot be signed; take that file away")
    digests = {name: files.file_digest(folder / name) for name in names}
    made = _FolderFile(sender=key.sender, files=digests, signature="")
    made = made.model_copy(update={"signature": base64.b64encode(_block(key, made.content)).decode()})
    files.write_json(folder / FOLDER_FILE, made.model_dump(mode="json"))
    return made


def read_folder(folder: Path) -> Signed:
    """What is signed of a model folder. Files that are not as they were signed, or that nobody signed, are
    BadSignature; that the signature is its sender's own, ``Signed.signer`` and ``believe`` say."""
    path = folder / FOLDER_FILE
    if not path.exists():
        return Signed(None, b"", b"")
    if path.stat().st_size > _LARGEST:
        raise BadSignature(f"{path} is too large for a signature; have the folder signed again with: flyby sign")
    files.read_json(path)  # says in plain words if it is no JSON
    try:
        said = _FolderFile.model_validate_json(path.read_bytes())
        block = base64.b64decode(said.signature, validate=True)
    except (ValidationError, binascii.Error) as error:
        why = sentence(error) if isinstance(error, ValidationError) else error
        raise BadSignature(f"{path} is not a signature of flyby: {why}") from None
    there, mend = set(_names(folder)), "ask who signed it for the whole folder, or have it signed again"
    for name in sorted(there ^ set(said.files)):
        what = "which nobody signed" if name in there else "which was signed, is gone"
        verb = "holds" if name in there else "is not whole:"
        raise BadSignature(f"{folder} {verb} {printable(name)}, {what}; {mend}")
    for name, digest in said.files.items():
        if files.file_digest(folder / name) != digest:
            raise BadSignature(f"{folder / name} was changed after {said.sender} signed it; {mend}")
    return Signed(said.sender, said.content, block)


def _names(folder: Path) -> list[str]:
    """The plain files of a folder, but for its signature and hidden ones, which no command reads."""
    found = (path.name for path in folder.iterdir() if path.is_file())
    return sorted(name for name in found if name != FOLDER_FILE and not name.startswith("."))
