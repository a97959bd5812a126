"""Ed25519 keys that sign certificates: made here, kept in a file that only its owner may read, checked before use.

Private keys are PKCS #8 and public keys SubjectPublicKeyInfo, both PEM, so that other tools read them too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from quietgrad.certificates.document import PrivacyCertificate
from quietgrad.errors import DataError
from quietgrad.files import read_bytes, sync_folder, write_atomically

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_LARGEST = 1 << 14  # bytes
_PEM = "-----BEGIN "


class SigningKey:
    """A private key, read from its file."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def read(cls, path: str | Path) -> SigningKey:
        """Read a key that :func:`new_key` made; one that others may read is refused."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        file = Path(path)
        try:
            content = read_bytes(file, most=_LARGEST)
            if file.stat().st_mode & 0o077:
                raise DataError(f"{file}: others may read this key; run `chmod 600 {file}`, or make a new one.")
            key = load_pem_private_key(content, password=None)
        except FileNotFoundError:
            raise DataError(f"{file}: there is no key; make one with `quietgrad keys generate {file}`.") from None
        except DataError:
            raise
        except (ValueError, TypeError):
            raise DataError(f"{file}: is no private key that can be read without a password.") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise DataError(f"{file}: is not an Ed25519 key; make one with `quietgrad keys generate FILE`.")
        return cls(key)

    @property
    def public(self) -> str:
        """The public key as 64 hexadecimal digits."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, document: PrivacyCertificate) -> PrivacyCertificate:
        """``document`` with this key's signature."""
        value = self._key.sign(document.payload).hex()
        return PrivacyCertificate(
            document.body, {"algorithm": "ed25519", "public_key": self.public, "value": value}
        )


def new_key(path: str | Path) -> str:
    """Make a key at ``path`` (rights 0600) and its public half at ``path.pub``; returns that as hexadecimal text.

    A file that is there already is never replaced: a lost signing key cannot be had back.
    """
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    file = Path(path)
    public = file.with_name(file.name + ".pub")
    if public.exists():
        raise DataError(f"{public}: exists already; choose another name, keys are not replaced.")
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as target:
            target.write(secret)
            target.flush()
            os.fsync(target.fileno())
    except FileExistsError:
        raise DataError(f"{file}: exists already; choose another name, keys are not replaced.") from None
    sync_folder(file.parent)
    pem = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    write_atomically(public, pem)
    return key.public_key().public_bytes_raw().hex()


def public_key(text: str) -> str:
    """The public key as hexadecimal digits; ``text`` is these, or PEM, or the name of a file that holds either.

    >>> public_key("AB" * 32) == "ab" * 32
    True
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    spelled = text.strip().startswith(_PEM)
    name = "the text that was given" if spelled else text
    try:
        if digits := _digits(text.encode()):
            return digits
        content = text.encode() if spelled else read_bytes(text, most=_LARGEST)
        if digits := _digits(content):
            return digits
        key = load_pem_public_key(content.strip() + b"\n")
    except FileNotFoundError:
        raise DataError(
            f"{name}: is neither a file, nor PEM, nor 64 hexadecimal digits, so it is no public key."
        ) from None
    except DataError:
        raise
    except (ValueError, TypeError):
        raise DataError(f"{name}: holds no public key; give the .pub file, or its 64 hexadecimal digits.") from None
    if not isinstance(key, Ed25519PublicKey):
        raise DataError(f"{name}: is not an Ed25519 key, with which certificates are signed.")
    return key.public_bytes_raw().hex()


def _digits(content: bytes) -> str | None:
    found = content.strip().lower()
    return found.decode() if len(found) == 64 and not set(found) - set(b"0123456789abcdef") else None


def signature_holds(document: PrivacyCertificate) -> bool:
    """Whether the signature in ``document`` is that of the key that it names; false if there is none."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if document.signature is None:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document.signature["public_key"]))
        key.verify(bytes.fromhex(document.signature["value"]), document.payload)
    except (InvalidSignature, ValueError):
        return False
    return True
