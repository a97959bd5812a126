"""Keys, certificates and revocations: a local certificate authority, and one folder for each member.

    ca.pem         the authority that signed all certificates
    cert.pem       this member's certificate; its name is the member's name
    key.pem        its TLS key (only its owner may read it)
    identity.key   its Ed25519 signing key for secure sums (only its owner may read it)
    member.json    its name, and the public identities of all members
    revoked.json   members that the owner of this folder no longer trusts

The person who makes all folders has seen all keys. Institutions that do not want that make their own keys with
:func:`request` and send only the request. A revocation counts for the owner of the folder alone: a coordinator
turns the member away, a party or server takes part in no plan that lists it. Readmitting takes new keys.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quietgrad.core.errors import DataError
from quietgrad.core.files import check_path_name, read_json, write_atomically
from quietgrad.federation.pins import readable_digest
from quietgrad.federation.secure.identity import Identity, Roster, is_signed

COORDINATOR = "coordinator"
_AUTHORITY = "quietgrad federation"
_DAYS = 825
_LARGEST_REQUEST = 1 << 16  # bytes
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Credentials:
    """What one member holds; read with :meth:`read`."""

    folder: Path
    name: str
    identity: Identity
    publics: Mapping[str, bytes]

    @classmethod
    def read(cls, folder: str | Path) -> Credentials:
        """Read a member's folder; keys that others may read are refused."""
        path = Path(folder)
        try:
            entry = read_json(path / "member.json")
            publics = {str(name): bytes.fromhex(key) for name, key in entry["identities"].items()}
            name = str(entry["name"])
            for file in ("ca.pem", "cert.pem", "key.pem"):
                (path / file).stat()
            for secret in ("key.pem", "identity.key"):
                if (path / secret).stat().st_mode & 0o077:
                    raise DataError(f"{path / secret}: others may read this key; run `chmod 600 {path / secret}`.")
            identity = Identity(name, bytes.fromhex((path / "identity.key").read_text().strip()))
        except FileNotFoundError as error:
            how = "run `quietgrad federate provision`, or copy what it sent back"
            raise DataError(f"{path}: {Path(error.filename or '').name} is missing; {how}.") from None
        except DataError:
            raise
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DataError(f"{path}: not a folder of `quietgrad federate provision`.") from None
        if publics.get(name) != identity.public:
            raise DataError(f"{path}: the identity key is not the one of {name!r} in member.json.")
        found = cls(path, name, identity, publics)
        try:
            names = found.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            same = names.get_values_for_type(x509.DNSName) == [name]
        except (x509.ExtensionNotFound, ValueError):
            same = False
        if not same:
            raise DataError(f"{path}: member.json is of {name!r} and cert.pem of another; copy both anew.")
        return found

    @property
    def certificate(self) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificate((self.folder / "cert.pem").read_bytes())
        except ValueError:
            raise DataError(f"{self.folder}: cert.pem is not a certificate; copy it again.") from None

    def check_dates(self) -> None:
        """Raise ``DataError`` for a certificate that other members would refuse."""
        own = self.certificate
        try:
            authority = x509.load_pem_x509_certificate((self.folder / "ca.pem").read_bytes())
            own.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise DataError(
                f"{self.folder}: cert.pem is not signed by the authority in ca.pem; copy both."
            ) from None
        now = _now()
        if now > own.not_valid_after_utc:
            day = own.not_valid_after_utc.date()
            raise DataError(f"{self.folder}: the certificate expired on {day}; provision again.")
        if now < own.not_valid_before_utc:
            begin = own.not_valid_before_utc.isoformat(timespec="minutes")
            raise DataError(f"{self.folder}: the certificate is valid from {begin} on; is the clock right?")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all public identities; it must be the same at every member."""
        text = "\n".join(f"{name} {key.hex()}" for name, key in sorted(self.publics.items()))
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
    members: Sequence[str], folder: str | Path, requests: Mapping[str, str | Path] | None = None
) -> list[Path]:
    """Make the authority and every member's folder; members whose :func:`request` is given keep their own keys."""
    root = Path(folder)
    for name in members:
        check_path_name("member", name)
    if root.exists() and any(root.iterdir()):
        raise DataError(f"{root}: is not empty; keys are never overwritten, choose another folder.")
    asked = {name: _read_request(Path(file), name) for name, file in (requests or {}).items()}
    if strangers := sorted(asked.keys() - set(members)):
        raise DataError(f"{strangers[0]}: is not a member of this plan.")
    signer = ec.generate_private_key(ec.SECP256R1())
    usage, ends = _usage(key_cert_sign=True, crl_sign=True), x509.BasicConstraints(ca=True, path_length=0)
    authority = _certificate(_AUTHORITY, signer.public_key(), signer, ends, usage)
    (root / "authority").mkdir(parents=True)
    write_atomically(root / "authority" / "ca.pem", authority)
    write_new_secret(root / "authority" / "ca.key", _private_pem(signer))
    made, identities = {name: root / name for name in members}, {}
    for name, home in made.items():
        home.mkdir(parents=True)
        if name in asked:
            public_key, identity = asked[name]
        else:
            key, own = _new_keys(home, name)
            public_key, identity = key.public_key(), own.public
        identities[name] = identity.hex()
        # The coordinator's certificate is good for serving only, all others for calling only.
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if name == COORDINATOR else ExtendedKeyUsageOID.CLIENT_AUTH
        certificate = _certificate(
            name, public_key, signer, x509.BasicConstraints(ca=False, path_length=None),
            _usage(digital_signature=True), x509.ExtendedKeyUsage([purpose]),
            x509.SubjectAlternativeName([x509.DNSName(name)]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
        )  # fmt: skip
        write_atomically(home / "cert.pem", certificate)
        write_atomically(home / "ca.pem", authority)
    for name, home in made.items():
        content = json.dumps({"name": name, "identities": identities}, indent=2) + "\n"
        write_atomically(home / "member.json", content.encode())
    return list(made.values())


def request(name: str, folder: str | Path) -> Path:
    """Make a member's own keys and the request that it sends for :func:`provision`.

    The keys stay in ``folder``; into the same folder go the three public files that come back.
    """
    home = Path(folder)
    check_path_name("member", name)
    home.mkdir(parents=True, exist_ok=True)
    if any(os.path.lexists(home / secret) for secret in ("key.pem", "identity.key")):
        raise DataError(f"{home}: has keys already; they are never overwritten.")
    key, identity = _new_keys(home, name)
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(name))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(_PEM)
    # The identity signs the TLS request, so that one member's keys cannot be joined with another's.
    signature = identity.sign(_bound(name, pem)).hex()
    path, public = home / f"{name}.request.json", identity.public.hex()
    content = {"name": name, "identity": public, "request": pem.decode(), "signature": signature}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def asker(path: Path) -> str:
    """Whose request a file is; its name does not matter, mail programs change it."""
    try:
        return check_path_name("name", read_json(path, most=_LARGEST_REQUEST)["name"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{path}: not a request that `quietgrad federate provision --request` made.") from None


def _certificate(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> bytes:
    now = _now()
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(subject))
        .issuer_name(_subject(_AUTHORITY))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA256()).public_bytes(_PEM)


def _new_keys(home: Path, name: str) -> tuple[ec.EllipticCurvePrivateKey, Identity]:
    key, identity = ec.generate_private_key(ec.SECP256R1()), Identity(name)
    write_new_secret(home / "key.pem", _private_pem(key))
    write_new_secret(home / "identity.key", identity.secret_bytes().hex().encode())
    return key, identity


def _read_request(path: Path, name: str) -> tuple[ec.EllipticCurvePublicKey, bytes]:
    try:
        body = read_json(path, most=_LARGEST_REQUEST)
        pem, public = body["request"].encode(), bytes.fromhex(body["identity"])
        asked = x509.load_pem_x509_csr(pem)
        key = asked.public_key()
        good = body["name"] == name and asked.is_signature_valid
        good = good and is_signed(public, bytes.fromhex(body["signature"]), _bound(name, pem))
        if not good or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, OSError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise DataError(f"{path}: not a valid request of {name!r}.") from None
    return key, public


def _bound(name: str, pem: bytes) -> bytes:
    return b"quietgrad request 1\0" + name.encode() + b"\0" + pem


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


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def write_new_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


FILE = "revoked.json"


def revoke(folder: str | Path, name: str, reason: str) -> dict[str, str]:
    """Add ``name`` to the revoked members of ``folder``; returns all of them with the reasons."""
    known = revoked(folder)
    known[check_path_name("member", name)] = f"{_now().date()}: {reason}"
    write_atomically(Path(folder) / FILE, (json.dumps(known, indent=2) + "\n").encode())
    return known


def revoked(folder: str | Path) -> dict[str, str]:
    """By name, why members are revoked in ``folder``; a list that cannot be read is refused, not ignored."""
    path = Path(folder) / FILE
    try:
        known = read_json(path, most=1 << 20)
        return {str(name): str(reason) for name, reason in known.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError):
        raise DataError(f"{path}: cannot be read as the list of revoked members; mend or restore it.") from None


def check_none_revoked(folder: str | Path, names: tuple[str, ...]) -> None:
    known = revoked(folder)
    if listed := [name for name in names if name in known]:
        why = f"{listed[0]!r} is revoked here ({known[listed[0]]})"
        raise DataError(f"the plan lists a member, and {why}: agree on a plan without it.")
