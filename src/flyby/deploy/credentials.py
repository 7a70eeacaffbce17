"""What authenticated TLS needs: a server certificate under an authority of its own, and a key pair a node. Private
files are 0600 and never replaced."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flyby.errors import BadInput
from flyby.files import write_bytes
from flyby.names import check_name

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

LOCAL = ("localhost", "127.0.0.1")


def write_certificates(folder: Path, hosts: Sequence[str] = (), days: int = 365) -> dict[str, Path]:
    """``ca.crt`` for every host, ``server.crt`` and ``server.key`` for the SuperLink's. The certificate names ``hosts``
    and this machine itself.

    The authority signs this one certificate and its key is thrown away: nobody can issue another in its name.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    if days < 1:
        raise BadInput(f"a certificate must hold for a day at least, not {days}")
    names = _alternative_names([*LOCAL, *hosts])
    paths = {"ca": folder / "ca.crt", "certificate": folder / "server.crt", "key": folder / "server.key"}
    _refuse_existing(paths.values())
    now = datetime.datetime.now(datetime.UTC)

    def certificate(
        subject: str, public: ec.EllipticCurvePublicKey, issuer: str, authority: bool
    ) -> x509.CertificateBuilder:
        signs = x509.KeyUsage(not authority, False, False, False, False, authority, authority, False, False)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks of different hosts differ a little
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
            .add_extension(signs, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )

    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = certificate("flyby authority", ca_key.public_key(), "flyby authority", True).sign(ca_key, hashes.SHA384())
    server = (
        certificate("flyby SuperLink", server_key.public_key(), "flyby authority", False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    form = serialization.PrivateFormat.PKCS8
    _write_private(
        paths["key"], server_key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
    write_bytes(paths["ca"], ca.public_bytes(serialization.Encoding.PEM))
    write_bytes(paths["certificate"], server.public_bytes(serialization.Encoding.PEM))
    return paths


def write_node_keys(folder: Path, site: str) -> dict[str, Path]:
    """``SITE-node.key`` for the SuperNode, ``SITE-node.pub`` to be registered at the SuperLink: EC P-384 in OpenSSH's
    forms, as Flower wants them."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    check_name(site)
    paths = {"key": folder / f"{site}-node.key", "public": folder / f"{site}-node.pub"}
    _refuse_existing(paths.values())
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    _write_private(paths["key"], key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    write_bytes(
        paths["public"],
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n",
    )
    return paths


def _alternative_names(hosts: Iterable[str]) -> list[GeneralName]:
    from cryptography import x509

    found: list[GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not host or any(c.isspace() or c in ":/@" or ord(c) > 127 for c in host):
                raise BadInput(
                    f"{host!r} is neither a host name nor an IP address; write it without port, scheme or spaces"
                ) from None
            found.append(x509.DNSName(host))
    return found


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            raise BadInput(f"{path} is already there and is not replaced; name another folder, or take it away first")


def _write_private(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
