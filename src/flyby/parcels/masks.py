"""Masks for sites that trust no server: each hides its numbers under noise that cancels in the sum over all sites.

Every two sites of a round share a secret, X25519 of the private key of the one and the public key of the other. From it
and from the digest of the whole round file both make the same seed (HKDF-SHA256), and from that the same stream of
64-bit words (ChaCha20). The site whose name comes first adds the stream, the other takes it away, modulo 2^64. So what
a site sends is noise to whoever lacks one of its seeds, and the sum over all sites is the sum of what they hid, bit for
bit [Bonawitz et al., CCS 2017, with pairwise masks alone: there is no second mask that would let a server go on by
itself when a site drops out].

Numbers are fixed point: v stands for round(v 2^bits). The round says how many images a site has at most and how large a
feature is at most, and ``bits`` is the largest for which the sum over all sites stays below 2^62; a site whose sums are
larger than that refuses to send.

The masking key follows from the site's signing key, and the public one is signed with it: a server that deals out keys
of its own, to see through the masks, would need the signing keys of all other sites.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flyby import files
from flyby.errors import BadInput
from flyby.names import Name, check_name
from flyby.parcels import signing
from flyby.settings import sentence

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

Words = npt.NDArray[np.uint64]
KEY_CONTEXT = b"flyby mask key 1\0"
SEED_CONTEXT = b"flyby mask seed 1\0"
PUBLIC_CONTEXT = b"flyby public mask key 1\0"
ROOM = 62  # bits that the sum over all sites may take, its sign aside
FEWEST_BITS, MOST_BITS = 10, 60  # after the point
MOST_SITES = 10_000
_LARGEST = 8 << 20  # bytes of a round file

Text = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{43}=$")]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Read = TypeVar("Read", bound=BaseModel)


class Participant(BaseModel):
    """A site's public masking key (32 bytes in base64), with the signature block of its signing key."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    sender: Name
    mask: Text
    signature: Annotated[str, Field(max_length=200)]

    @property
    def raw(self) -> bytes:
        return base64.b64decode(self.mask)

    @property
    def content(self) -> bytes:
        return PUBLIC_CONTEXT + self.sender.encode() + b"\0" + self.raw

    def check(self, trust: signing.Trust | None) -> bytes:
        """The signing key that vouches for it; BadInput where none does, or not the trusted one."""
        label = f"the masking key of {self.sender}"
        try:
            block = base64.b64decode(self.signature, validate=True)
        except binascii.Error:
            block = b"?"
        public = signing.Signed(self.sender, self.content, block).signer(label)
        signing.believe(self.sender, public, label, trust, trust is not None)
        if public is None:
            raise BadInput(f"{label} is not signed; have it made again with: flyby keys mask {self.sender}.key")
        return public


class Round(BaseModel):
    """Who takes part, and in which range. Two rounds never share masks: the nonce is drawn when a round is made."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    schema_version: Literal[1] = 1
    name: Name
    nonce: Hex
    images: Annotated[int, Field(ge=1, le=10**9)]
    largest: Annotated[float, Field(gt=0, le=1e6)]
    participants: Annotated[tuple[Participant, ...], Field(min_length=2, max_length=MOST_SITES)]

    @classmethod
    def of(cls, participants: Sequence[Participant], name: str, images: int, largest: float) -> Self:
        check_name(name)
        if len(participants) < 2:
            raise BadInput("a round needs the .mask files of two sites at the least; one alone has nothing to hide in")
        ordered = tuple(sorted(participants, key=lambda one: one.sender))
        try:
            made = cls(name=name, nonce=secrets.token_hex(32), images=images, largest=largest, participants=ordered)
        except ValidationError as error:
            raise BadInput(f"this round cannot be: {sentence(error)}") from None
        made.check(None)
        return made

    @property
    def names(self) -> list[str]:
        return [one.sender for one in self.participants]

    @property
    def digest(self) -> str:
        return hashlib.sha256(files.canonical(self.model_dump(mode="json"))).hexdigest()

    @property
    def limit(self) -> float:
        """The largest sum that a site may have."""
        return self.images * max(self.largest, self.largest**2)

    @property
    def bits(self) -> int:
        return min(MOST_BITS, ROOM - math.ceil(math.log2(len(self.participants) * self.limit)))

    def check(self, trust: signing.Trust | None) -> None:
        """Every key is its owner's own, as far as signatures and a trust file can say."""
        for kind in ([one.sender for one in self.participants], [one.mask for one in self.participants]):
            if len(set(kind)) < len(kind):
                raise BadInput("a site stands twice in the round; name each site's .mask file once")
        if self.name in self.names:
            raise BadInput(f"the round is called {self.name}, as one of its sites; give it a name of its own")
        signers = [one.check(trust) for one in self.participants]
        if len(set(signers)) < len(signers):
            raise BadInput("two sites of the round have one signing key; every site needs a key of its own")
        if self.bits < FEWEST_BITS:
            raise BadInput(
                f"{len(self.participants)} sites of {self.images:,} images with features up to {self.largest:g} do not"
                " fit into 64 bits; lower --images or --largest"
            )

    def fixed(self, values: npt.NDArray[np.float64]) -> Words:
        """Numbers as fixed-point words; one beyond the limit is BadInput, so that no sum can overflow."""
        if values.size and not float(np.abs(values).max()) <= self.limit:
            raise BadInput(
                f"a sum of features is {float(np.abs(values).max()):.3g}, beyond the {self.limit:.3g} that the round"
                f" {self.name} has room for; have a round made with a larger --images or --largest"
            )
        return np.rint(np.ldexp(values, self.bits)).astype(np.int64).view(np.uint64)


# -- keys


def mask_key(key: signing.PrivateKey) -> X25519PrivateKey:
    """The masking key of whoever holds a signing key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(_derived(key.key.private_bytes_raw(), b"", KEY_CONTEXT))


def participant(key: signing.PrivateKey) -> Participant:
    """What a site gives to the maker of a round."""
    if key.sender is None:
        raise BadInput("the key does not name its owner; begin its file with a line such as: flyby sender: hospital-a")
    raw = mask_key(key).public_key().public_bytes_raw()
    made = Participant(sender=key.sender, mask=base64.b64encode(raw).decode(), signature="")
    block = bytes([signing.VERSION]) + key.public.raw + signing.sign_bytes(key.key, made.content)
    return made.model_copy(update={"signature": base64.b64encode(block).decode()})


def _derived(secret: bytes, salt: bytes, about: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt, about).derive(secret)


# -- streams


def seed(one: Round, key: signing.PrivateKey, own: str, other: str) -> bytes:
    """What two sites alone know, of this round alone."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    private, by_name = mask_key(key), {each.sender: each for each in one.participants}
    if other not in by_name or other == own:
        raise BadInput(f"{other} is no other site of the round {one.name}; it has {', '.join(one.names[:20])}")
    if own not in by_name or by_name[own].raw != private.public_key().public_bytes_raw():
        raise BadInput(
            f"the round {one.name} does not have this key of {own}; give the key whose .mask file went into it"
        )
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(by_name[other].raw))
    except ValueError:
        raise BadInput(f"the masking key of {other} is none; ask it for a new .mask file") from None
    names = "\0".join(sorted((own, other))).encode()
    return _derived(secret, bytes.fromhex(one.digest), SEED_CONTEXT + names)


def stream(seed: bytes, count: int) -> Words:
    """So many words that look like chance to whoever has not the seed."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    encryptor = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


def mask(seeds: Mapping[str, bytes], own: str, count: int) -> Words:
    """The sum of a site's streams towards others, each with its sign."""
    total = np.zeros(count, dtype=np.uint64)
    for other, one in seeds.items():
        words = stream(one, count)
        total = total + words if own < other else total - words
    return total


# -- what a site remembers, and what it reveals


class Revealed(BaseModel):
    """The seeds that a site shares with missing ones, of one round. They tell nothing of the site's own sums while the
    missing site's parcel does not arrive; whoever holds that parcel and the seeds of all others sees the missing site's
    sums bare."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    schema_version: Literal[1] = 1
    about: str = (
        "Seeds of masks towards sites that did not send. They tell nothing of the sender's own sums. Whoever holds them"
        " and also a parcel of such a site can take the masks off that parcel: use them only if it never arrived."
    )
    round: Hex
    sender: Name
    seeds: Annotated[dict[Name, Hex], Field(min_length=1, max_length=MOST_SITES)]


class Memory(BaseModel):
    """What a key was used for, beside the key file: masks that hide two different things hide neither."""

    model_config = ConfigDict(strict=True, extra="forbid")
    schema_version: Literal[1] = 1
    sent: dict[Hex, Hex] = {}  # round -> digest of the words that went out under its mask
    revealed: dict[Hex, list[Name]] = {}


class Masking(NamedTuple):
    """A site's part in a round: its key, and the file in which it remembers what the key was used for."""

    round: Round
    key: signing.PrivateKey
    memory: Path

    @classmethod
    def at(cls, one: Round, path: Path) -> Self:
        return cls(one, signing.read_private(path), path.with_name(f"{path.name}.rounds.json"))

    @property
    def own(self) -> str:
        return self.key.sender or ""

    def check(self, sender: str) -> None:
        """Refuse, before any work, a site or a key that the round does not have."""
        if sender not in self.round.names:
            raise BadInput(f"{sender} is not in the round {self.round.name}; it has {', '.join(self.round.names[:20])}")
        seed(self.round, self.key, sender, next(name for name in self.round.names if name != sender))

    def hidden(self, words: Words) -> Words:
        """The words under this site's mask. The same round never hides other words as well."""
        seeds = {other: seed(self.round, self.key, self.own, other) for other in self.round.names if other != self.own}
        known, fresh = self._memory(), hashlib.sha256(words.tobytes()).hexdigest()
        if known.sent.setdefault(self.round.digest, fresh) != fresh:
            raise BadInput(
                f"{self.own} has sent other sums in the round {self.round.name}; two under one mask would tell their"
                " difference, so have a new round made: flyby keys round"
            )
        self._remember(known)
        return words + mask(seeds, self.own, len(words))

    def reveal(self, missing: Collection[str]) -> Revealed:
        known, digest = self._memory(), self.round.digest
        gone = sorted({*known.revealed.get(digest, []), *missing})
        if len(self.round.names) - len(gone) < 2:
            raise BadInput(
                f"without {', '.join(gone)} fewer than two sites would be left, and the sum of one is its own; have a"
                " new round made"
            )
        seeds = {other: seed(self.round, self.key, self.own, other).hex() for other in sorted(missing)}
        known.revealed[digest] = gone
        self._remember(known)
        return Revealed(round=digest, sender=self.own, seeds=seeds)

    def _memory(self) -> Memory:
        return read_as(Memory, self.memory, "a memory of rounds") if self.memory.exists() else Memory()

    def _remember(self, known: Memory) -> None:
        files.write_json(self.memory, known.model_dump(mode="json"))
        os.chmod(self.memory, 0o600)


# -- files


def read_as(kind: type[Read], path: Path | str, what: str) -> Read:
    """A small JSON file of a known kind, with one sentence where it is none."""
    if Path(path).is_file() and Path(path).stat().st_size > _LARGEST:
        raise BadInput(f"{path} is too large for {what}")
    files.read_json(path)  # says in plain words if it is missing or no JSON
    try:
        return kind.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        raise BadInput(f"{path} is not {what} of flyby: {sentence(error)}") from None


def read_round(path: Path | str, trust: signing.Trust | None = None) -> Round:
    found = read_as(Round, path, "a round")
    found.check(trust)
    return found


def write(path: Path, made: BaseModel) -> None:
    said: dict[str, Any] = made.model_dump(mode="json")
    files.write_json(path, said)
