"""Keys and certificates: a certificate authority of the federation, and one folder for each member.

    ca.pem             the authorities that signed the members' certificates
    cert.pem           this member's certificate; its one DNS name is the member's name
    key.pem            its TLS key (only its owner may read it)
    identity.key       its Ed25519 signing key for secure sums (only its owner may read it)
    member.json        its name, and of all members the public identity and which authority signs for it
    revoked.json       see :mod:`quietgrad.federation.revocation`

Keys are PEM, under a passphrase if one is given. The person who makes all folders has seen all keys. Institutions
that do not want that make their own keys with :func:`request` and send only the request. Those with an authority of
their own let it sign, and add the certificate to the request by :func:`certify`. An authority can speak only for
the members that it was provisioned for. The federation's own authority signs once and its key is forgotten, unless
it is asked to be kept.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quietgrad.core.errors import DataError
from quietgrad.core.files import check_path_name, read_bytes, read_json, write_atomically
from quietgrad.federation.key_files import is_encrypted, passphrase, read_key, write_key
from quietgrad.federation.pins import readable_digest
from quietgrad.federation.revocation import COORDINATOR, Revocations
from quietgrad.federation.secure.identity import Identity, Roster, is_signed

_AUTHORITY = "quietgrad federation"
DAYS = 397
"""How long the certificates of a federation's own authority are valid, unless another number is given."""
_LARGEST_REQUEST = 1 << 16  # bytes
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Credentials:
    """Credentials of one member: its identity, all public keys and the authorities. Read them with :meth:`read`.

    ``authorities`` are the fingerprints of the authorities that sign for each member; folders of earlier versions
    have one authority for all, and none here.
    """

    folder: Path
    name: str
    identity: Identity
    publics: Mapping[str, bytes]
    authorities: Mapping[str, str] = field(default_factory=dict)
    secret: bytes | None = field(default=None, repr=False)
    """The passphrase of the keys."""

    @classmethod
    def read(cls, folder: str | Path) -> Credentials:
        """Read a member's folder; keys that others may read are refused."""
        path = Path(folder)
        try:
            entry = read_json(path / "member.json")
            publics = {str(name): bytes.fromhex(key) for name, key in entry["identities"].items()}
            authorities = {
                str(name): str(bytes.fromhex(sha).hex()) for name, sha in entry.get("authorities", {}).items()
            }
            if authorities and authorities.keys() != publics.keys():
                raise ValueError
            name = str(entry["name"])
            for file in ("ca.pem", "cert.pem"):
                (path / file).stat()
            locked = [file for file in ("key.pem", "identity.key") if is_encrypted(path / file)]
            secret = passphrase(name) if locked else None
            read_key(path / "key.pem", secret)
            key = read_key(path / "identity.key", secret)
            if not isinstance(key, Ed25519PrivateKey):
                raise ValueError
            identity = Identity(name, key.private_bytes_raw())
        except FileNotFoundError as error:
            how = "run `quietgrad federate provision`, or copy what it sent back"
            raise DataError(f"{path}: {Path(error.filename or '').name} is missing; {how}.") from None
        except DataError:
            raise
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DataError(f"{path}: not a folder of `quietgrad federate provision`.") from None
        if publics.get(name) != identity.public:
            raise DataError(f"{path}: the identity key is not the one of {name!r} in member.json.")
        credentials = cls(path, name, identity, publics, authorities, secret)
        if names_in(credentials.certificate) != [name]:
            raise DataError(f"{path}: member.json is of {name!r} and cert.pem of another; copy both anew.")
        return credentials

    @property
    def certificate(self) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificate((self.folder / "cert.pem").read_bytes())
        except ValueError:
            raise DataError(f"{self.folder}: cert.pem is not a certificate; copy it again.") from None

    @property
    def revocations(self) -> Revocations:
        """The revoked members, as this folder knows them."""
        signer = self.identity if self.name == COORDINATOR else None
        return Revocations(self.folder, self.publics, signer)

    def is_issued_for(self, name: str, certificate: x509.Certificate) -> bool:
        """Whether the authority that signs for ``name`` issued this certificate, which names it and no other."""
        if names_in(certificate) != [name]:
            return False
        pinned = self.authorities.get(name)
        if self.authorities and pinned is None:
            return False
        issuers = x509.load_pem_x509_certificates((self.folder / "ca.pem").read_bytes())
        for authority in issuers:
            if pinned is None or _fingerprint(authority) == pinned:
                try:
                    certificate.verify_directly_issued_by(authority)
                except (ValueError, TypeError, InvalidSignature):
                    continue
                return True
        return False

    def check_dates(self) -> None:
        """Raise ``DataError`` for a certificate that other members would refuse."""
        certificate = self.certificate
        try:
            good = self.is_issued_for(self.name, certificate)
        except (ValueError, TypeError):
            good = False
        if not good:
            raise DataError(f"{self.folder}: cert.pem is not signed by the authority in ca.pem; copy both.")
        _check_dates(certificate, str(self.folder))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all public identities and their authorities; it must be the same at every member."""
        text = "\n".join(f"{name} {key.hex()}" for name, key in sorted(self.publics.items()))
        if self.authorities:
            text += "".join(f"\n{name} signed for by {sha}" for name, sha in sorted(self.authorities.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def readable(self) -> str:
        """How many identities there are and 128 bits of their digest, to read out to the other members."""
        return f"identities={len(self.publics)} {readable_digest(self.fingerprint)}"

    def roster(self, names: Sequence[str]) -> Roster:
        absent = [name for name in names if name not in self.publics]
        if absent:
            raise DataError(f"{self.folder}: there is no identity of {absent[0]!r}; provision for this plan again.")
        return Roster(tuple(names), tuple(self.publics[name] for name in names))


def provision(
    members: Sequence[str],
    folder: str | Path,
    requests: Mapping[str, str | Path] | None = None,
    *,
    days: int = DAYS,
    secret: bytes | None = None,
    keep_authority: bool = False,
) -> list[Path]:
    """Make every member's folder; members whose :func:`request` is given keep their own keys.

    Args:
        days: how long the certificates made here are valid.
        secret: the passphrase of the keys made here.
        keep_authority: keep the key of the federation's authority, to sign again later. Its holder can make
            certificates of any member that it signs for.
    """
    root = Path(folder)
    for name in members:
        check_path_name("member", name)
    if isinstance(days, bool) or not 1 <= days <= 3650:
        raise DataError(f"days={days}: must be from 1 to 3650, the days that certificates are valid.")
    if root.exists() and any(root.iterdir()):
        raise DataError(f"{root}: is not empty; keys are never overwritten, choose another folder.")
    asked = {name: _Request.read(Path(file), name) for name, file in (requests or {}).items()}
    if strangers := sorted(asked.keys() - set(members)):
        raise DataError(f"{strangers[0]}: is not a member of this plan.")
    signer = ec.generate_private_key(ec.SECP256R1())
    usage, ends = _usage(key_cert_sign=True, crl_sign=True), x509.BasicConstraints(ca=True, path_length=0)
    authority = _certificate(_AUTHORITY, signer.public_key(), signer, days, ends, usage)
    signing = dict.fromkeys(members, authority)  # by member
    signing |= {name: each.authority for name, each in asked.items() if each.authority is not None}
    bundle = b"".join(dict.fromkeys(_pem(each) for each in signing.values()))
    (root / "authority").mkdir(parents=True)
    write_atomically(root / "authority" / "ca.pem", bundle)
    if keep_authority:
        write_key(root / "authority" / "ca.key", signer, secret)
    home_by_name, identities = {name: root / name for name in members}, {}
    for name, home in home_by_name.items():
        home.mkdir(parents=True)
        mine = asked.get(name)
        if mine is None:
            key, identity = _new_keys(home, name, secret)
            public_key, identities[name] = key.public_key(), identity.public.hex()
        else:
            public_key, identities[name] = mine.key, mine.identity.hex()
        certificate = None if mine is None else mine.certificate
        if certificate is None:
            certificate = _certificate(
                name, public_key, signer, days, x509.BasicConstraints(ca=False, path_length=None),
                _usage(digital_signature=True), x509.ExtendedKeyUsage([_purpose(name)]),
                x509.SubjectAlternativeName([x509.DNSName(name)]),
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
            )  # fmt: skip
        write_atomically(home / "cert.pem", _pem(certificate))
        write_atomically(home / "ca.pem", bundle)
    authorities = {name: _fingerprint(each) for name, each in signing.items()}
    for name, home in home_by_name.items():
        entry = {"name": name, "identities": identities, "authorities": authorities}
        write_atomically(home / "member.json", (json.dumps(entry, indent=2) + "\n").encode())
    return list(home_by_name.values())


def request(name: str, folder: str | Path, *, secret: bytes | None = None) -> Path:
    """Make a member's own keys and the request that it sends for :func:`provision`.

    The keys stay in ``folder``; into the same folder go the three public files that come back. ``NAME.csr.pem`` is
    for an authority of the member's institution, if one is to sign.
    """
    home = Path(folder)
    check_path_name("member", name)
    home.mkdir(parents=True, exist_ok=True)
    if any(os.path.lexists(home / file) for file in ("key.pem", "identity.key")):
        raise DataError(f"{home}: has keys already; they are never overwritten.")
    key, identity = _new_keys(home, name, secret)
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(name))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([_purpose(name)]), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(_PEM)
    write_atomically(home / f"{name}.csr.pem", pem)
    return _write_request(home, identity, {"request": pem.decode()})


def certify(name: str, folder: str | Path, certificate: str | Path, authority: str | Path) -> Path:
    """Put the certificate that an institution's own authority issued into the member's request.

    The certificate has one DNS name, the member's; its extended key usage is TLS client (of the coordinator: TLS
    server); the authority issued it directly.
    """
    home = Path(folder)
    path = home / f"{check_path_name('member', name)}.request.json"
    if not path.exists():
        raise DataError(f"{home}: has no request of {name!r}; make one with `provision --request` first.")
    before = _Request.read(path, name)
    body = {"request": before.pem.decode()}
    for title, file in (("certificate", certificate), ("authority", authority)):
        try:
            body[title] = _pem(x509.load_pem_x509_certificate(read_bytes(file, most=_LARGEST_REQUEST))).decode()
        except ValueError:
            raise DataError(f"{file}: is not a certificate in PEM.") from None
    secret = passphrase(name) if is_encrypted(home / "identity.key") else None
    key = read_key(home / "identity.key", secret)
    assert isinstance(key, Ed25519PrivateKey)
    identity = Identity(name, key.private_bytes_raw())
    _check_certificate(name, before.key, body["certificate"].encode(), body["authority"].encode(), str(certificate))
    return _write_request(home, identity, body)


def _write_request(home: Path, identity: Identity, body: Mapping[str, str]) -> Path:
    # The identity signs what it is joined with, so that one member's keys cannot be joined with another's.
    signature = identity.sign(_bound(identity.name, body)).hex()
    content = {"name": identity.name, "identity": identity.public.hex(), **body, "signature": signature}
    path = home / f"{identity.name}.request.json"
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def asker(path: Path) -> str:
    """Return the member's name in a request file. The file's own name does not matter: mail programs change it."""
    try:
        return check_path_name("name", read_json(path, most=_LARGEST_REQUEST)["name"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{path}: not a request that `quietgrad federate provision --request` made.") from None


@dataclass(frozen=True)
class _Request:
    """A member's request: its public keys, and a certificate of its institution's authority if it has one."""

    pem: bytes
    key: ec.EllipticCurvePublicKey
    identity: bytes
    certificate: x509.Certificate | None
    authority: x509.Certificate | None

    @classmethod
    def read(cls, path: Path, name: str) -> _Request:
        try:
            body = read_json(path, most=_LARGEST_REQUEST)
            pem, public = body["request"].encode(), bytes.fromhex(body["identity"])
            asked = x509.load_pem_x509_csr(pem)
            key = asked.public_key()
            texts = {part: body[part] for part in ("request", "certificate", "authority") if part in body}
            good = body["name"] == name and asked.is_signature_valid
            good = good and is_signed(public, bytes.fromhex(body["signature"]), _bound(name, texts))
            if not good or not isinstance(key, ec.EllipticCurvePublicKey) or len(texts) == 2:
                raise ValueError
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OSError,
            UnsupportedAlgorithm,
            x509.InvalidVersion,
        ):
            raise DataError(f"{path}: not a valid request of {name!r}.") from None
        if "certificate" not in texts:
            return cls(pem, key, public, None, None)
        issued = _check_certificate(
            name, key, texts["certificate"].encode(), texts["authority"].encode(), str(path)
        )
        return cls(pem, key, public, *issued)


def _check_certificate(
    name: str, key: ec.EllipticCurvePublicKey, certificate: bytes, authority: bytes, where: str
) -> tuple[x509.Certificate, x509.Certificate]:
    """Read what an institution's authority issued; raise ``DataError`` for what other members would refuse."""
    try:
        issued, by = (x509.load_pem_x509_certificate(pem) for pem in (certificate, authority))
        issued.verify_directly_issued_by(by)
        may_sign = by.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        usage = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        raise DataError(
            f"{where}: the certificate is not issued directly by the authority given, or has no extended key usage."
        ) from None
    if not may_sign or names_in(issued) != [name] or _purpose(name) not in usage:
        purpose = "server" if name == COORDINATOR else "client"
        raise DataError(f"{where}: needs {name!r} as its one DNS name, and the usage TLS {purpose}.")
    if issued.public_key() != key:
        raise DataError(f"{where}: is of another key than the request of {name!r}.")
    _check_dates(issued, where)
    return issued, by


def _check_dates(certificate: x509.Certificate, where: str) -> None:
    now = _now()
    if now > certificate.not_valid_after_utc:
        day = certificate.not_valid_after_utc.date()
        raise DataError(f"{where}: the certificate expired on {day}; provision again.")
    if now < certificate.not_valid_before_utc:
        begin = certificate.not_valid_before_utc.isoformat(timespec="minutes")
        raise DataError(f"{where}: the certificate is valid from {begin} on; is the clock right?")


def names_in(certificate: x509.Certificate) -> list[str]:
    """The DNS names of a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return list(names.get_values_for_type(x509.DNSName))
    except (x509.ExtensionNotFound, ValueError):
        return []


def _certificate(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    now = _now()
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(subject))
        .issuer_name(_subject(_AUTHORITY))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA256())


def _purpose(name: str) -> x509.ObjectIdentifier:
    """Return the purpose of a certificate: the coordinator's is for serving only, all others for calling only."""
    return ExtendedKeyUsageOID.SERVER_AUTH if name == COORDINATOR else ExtendedKeyUsageOID.CLIENT_AUTH


def _new_keys(home: Path, name: str, secret: bytes | None) -> tuple[ec.EllipticCurvePrivateKey, Identity]:
    key, identity_key = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
    write_key(home / "key.pem", key, secret)
    write_key(home / "identity.key", identity_key, secret)
    return key, Identity(name, identity_key.private_bytes_raw())


def _bound(name: str, body: Mapping[str, str]) -> bytes:
    """Return the bytes of a request that the identity signs, without a certificate those of earlier versions."""
    parts = [body[part].encode() for part in ("request", "certificate", "authority") if part in body]
    return b"quietgrad request 1\0" + name.encode() + b"\0" + b"\0".join(parts)


def _fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(_PEM)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})
