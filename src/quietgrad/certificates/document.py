"""The file: one canonical spelling, a digest, and room for a signature.

A certificate is the canonical JSON of ``{body, digest, format, signature, version}`` and a line end: keys sorted,
no spaces, ASCII, numbers as Python writes them. What is digested and signed is the canonical JSON of
``{body, format, version}``.

A file that is spelt in any other way is refused, so a key that stands twice, a NaN, an exponent that
overflows or a space somewhere has no second meaning that one reader sees and another does not.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from quietgrad.errors import DataError
from quietgrad.files import parse_json, read_bytes, write_atomically

FORMAT = "quietgrad-certificate"
VERSION = 1
LARGEST = 16 << 20  # bytes: a ledger of some ten thousand lines
_PARTS = {"body", "digest", "format", "signature", "version"}
BODY = {"claim", "data", "event", "federation", "issued", "ledger", "model", "plan", "versions"}


def canonical(value: Any) -> bytes:
    """The one spelling of ``value``; ``ValueError`` for numbers that JSON has no word for.

    >>> canonical({"b": 1e-05, "a": "ε"})
    b'{"a":"\\\\u03b5","b":1e-05}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@dataclass(frozen=True)
class PrivacyCertificate:
    """A certificate in memory: what it says, and the signature over it as hexadecimal text, if there is one."""

    body: dict[str, Any]
    signature: dict[str, str] | None = None

    @cached_property
    def payload(self) -> bytes:
        """The bytes that are digested and signed."""
        return canonical({"body": self.body, "format": FORMAT, "version": VERSION})

    @property
    def digest(self) -> str:
        """SHA-256 of :attr:`payload`."""
        return hashlib.sha256(self.payload).hexdigest()

    def to_bytes(self) -> bytes:
        """The file's content."""
        parts = {"body": self.body, "digest": self.digest, "format": FORMAT, "version": VERSION}
        return canonical({**parts, "signature": self.signature}) + b"\n"

    def write(self, path: str | Path) -> Path:
        """Write the file in one step."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, self.to_bytes())
        return target


def read(path: str | Path) -> PrivacyCertificate:
    """Read a certificate; ``DataError`` in one sentence if the file is not exactly one."""
    try:
        content = read_bytes(path, most=LARGEST)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file.") from None
    return parse(content, str(path))


def parse(content: bytes, name: str) -> PrivacyCertificate:
    """The certificate that ``content`` spells; ``name`` is for messages."""
    try:
        value = parse_json(content)
    except (ValueError, RecursionError):
        raise DataError(f"{name}: is not JSON, so it is no certificate, or one that was cut.") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"{name}: is not a quietgrad certificate.")
    if type(value.get("version")) is not int or value["version"] != VERSION:
        raise DataError(f"{name}: is of a version that this quietgrad does not read; it reads {VERSION}.")
    try:
        spelt = canonical(value) + b"\n"
    except (ValueError, UnicodeError, RecursionError):
        raise DataError(f"{name}: was altered: it holds a number or a text that no certificate has.") from None
    if spelt != content:
        raise DataError(f"{name}: was altered: it is not spelt as certificates are (keys, numbers or spaces).")
    if set(value) != _PARTS or not isinstance(value["body"], dict) or set(value["body"]) != BODY:
        raise DataError(f"{name}: was altered: parts are missing or were added.")
    signature = value["signature"]
    if signature is not None and not _is_signature(signature):
        raise DataError(f"{name}: was altered: its signature is not one.")
    document = PrivacyCertificate(value["body"], signature)
    if document.digest != value["digest"]:
        raise DataError(f"{name}: was altered: its digest does not fit its content.")
    return document


def _is_signature(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"algorithm", "public_key", "value"}:
        return False
    sizes = {"public_key": 64, "value": 128}
    return value["algorithm"] == "ed25519" and all(
        isinstance(value[key], str) and len(value[key]) == size and set(value[key]) <= set("0123456789abcdef")
        for key, size in sizes.items()
    )


def schema() -> dict[str, Any]:
    """The JSON Schema of a certificate, as it is published.

    >>> schema()["title"]
    'quietgrad certificate'
    """
    text = files("quietgrad.certificates").joinpath("schema.json").read_text(encoding="utf-8")
    value: dict[str, Any] = json.loads(text)
    return value
