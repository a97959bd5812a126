"""Private keys on disk: PEM (PKCS 8), under a passphrase if there is one, readable by their owner alone.

A passphrase is never an argument of a command, because other users of a machine see those. It comes from the file
that ``QUIETGRAD_PASSPHRASE_FILE`` names, from ``QUIETGRAD_PASSPHRASE``, or from the terminal. OpenSSL's form of
PKCS 8 stretches a passphrase by 2048 rounds of PBKDF2 only, so a short one protects little: twelve characters are
the least.
"""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from quietgrad.core.errors import DataError
from quietgrad.core.files import is_shared, read_bytes

VARIABLE, FILE_VARIABLE = "QUIETGRAD_PASSPHRASE", "QUIETGRAD_PASSPHRASE_FILE"
_FEWEST = 12  # characters
_LARGEST = 1 << 16  # bytes of a key file
_BEGIN, _ENCRYPTED = b"-----BEGIN", b"ENCRYPTED"
PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey


def passphrase(of: str, *, new: bool = False) -> bytes:
    """The passphrase of the keys of ``of``, from where this process may get it.

    A ``new`` one is asked for twice at a terminal, and must be long enough.
    """
    if path := os.environ.get(FILE_VARIABLE):
        check_private(Path(path))
        text = read_bytes(path, most=_LARGEST).decode(errors="replace").rstrip("\r\n")
    elif VARIABLE in os.environ:
        text = os.environ[VARIABLE]
    elif sys.stdin is not None and sys.stdin.isatty():
        text = getpass.getpass(f"passphrase of the keys of {of}: ")
        if new and getpass.getpass("the same again: ") != text:
            raise DataError("the two passphrases differ; nothing was written.")
    else:
        raise DataError(
            f"the keys of {of} have a passphrase, and there is no terminal to ask for it. Name its file in "
            f"{FILE_VARIABLE}, or set {VARIABLE}."
        )
    if new and len(text) < _FEWEST:
        raise DataError(f"the passphrase has {len(text)} characters; give at least {_FEWEST}. Nothing was written.")
    return text.encode()


def check_private(path: Path) -> None:
    """Raise ``DataError`` for a secret that others may read."""
    if is_shared(path):
        raise DataError(f"{path}: others may read this key; run `chmod 600 {path}`.")


def is_encrypted(path: Path) -> bool:
    return _ENCRYPTED in read_bytes(path, most=_LARGEST).partition(b"\n")[0]


def write_key(path: Path, key: PrivateKey, secret: bytes | None) -> None:
    """Write a new PEM file that only its owner may read, from its first byte on."""
    cipher: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if secret is not None:
        cipher = serialization.BestAvailableEncryption(secret)
    content = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, cipher)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def read_key(path: Path, secret: bytes | None) -> PrivateKey:
    """Read a key of :func:`write_key`, or an identity as earlier versions wrote it, in hexadecimal digits."""
    check_private(path)
    content = read_bytes(path, most=_LARGEST)
    if not content.startswith(_BEGIN):
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(content.decode().strip()))
    try:
        key = serialization.load_pem_private_key(content, secret if is_encrypted(path) else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        why = "the passphrase is wrong, or the file is damaged" if is_encrypted(path) else "is not a key"
        raise DataError(f"{path}: {why}.") from None
    if not isinstance(key, PrivateKey):
        raise DataError(f"{path}: holds a key of another kind; elliptic curves and Ed25519 are known.")
    return key
