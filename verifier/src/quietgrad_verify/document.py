"""The file of a claim: its one spelling, its digest and signature, its statement, and the standing of its fields.

The format is written down in ``docs/certificate-format.md`` and in ``schema.json``. A file is the canonical JSON of
``{body, digest, format, signature, version}`` and a line end: keys sorted, no spaces, ASCII. :func:`parse` refuses
any other spelling. Every field has a *standing*, which only the schema states (``x-standing``): it is *proved* (it
follows from the rest), *bound* (a signature or a ledger holds it fast) or *said* (it is the author's word).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FORMAT = "quietgrad-certificate"
VERSIONS = (1, 2)
STANDINGS = ("proved", "bound", "said")
LARGEST = 16 << 20  # bytes
BODY_1 = {"claim", "data", "event", "federation", "issued", "ledger", "model", "plan", "versions"}
BODY_2 = BODY_1 | {"source", "statement"}
COVERED = ("claim", "data", "event", "federation", "model", "plan", "source")
"""The parts of a body whose digest a ledger's line of kind ``certificate`` holds."""
_CLAIM: dict[str, tuple[type, ...]] = {
    "epsilon": (float,), "delta": (float,), "relation": (str,), "unit": (str,), "accountant": (str,),
    "adversary": (str,), "sampling": (str,), "noise_multiplier": (float, int), "releases": (dict,),
    "notes": (list,), "is_private": (bool,), "account": (str, type(None)), "condition": (str, type(None)),
}  # fmt: skip


class Unreadable(Exception):
    """The file is no claim; one sentence says why."""


def canonical(value: object) -> bytes:
    """The one spelling of ``value``; ``ValueError`` for numbers that JSON has no word for."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_of(value: object) -> str:
    """SHA-256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value)).hexdigest()


@dataclass(frozen=True)
class Claim:
    """A claim in memory: its body, its signature if it has one, and the version of its format."""

    body: Json
    signature: Mapping[str, str] | None = None
    version: int = 2

    @cached_property
    def payload(self) -> bytes:
        """The bytes that are digested and signed."""
        return canonical({"body": self.body, "format": FORMAT, "version": self.version})

    @property
    def digest(self) -> str:
        """SHA-256 of :attr:`payload`."""
        return hashlib.sha256(self.payload).hexdigest()

    def to_bytes(self) -> bytes:
        """The file's content."""
        parts = {"body": self.body, "digest": self.digest, "format": FORMAT, "version": self.version}
        return canonical({**parts, "signature": self.signature}) + b"\n"

    def write(self, path: str | Path) -> Path:
        """Write the file."""
        Path(path).write_bytes(self.to_bytes())
        return Path(path)

    @property
    def native(self) -> bool:
        """Whether it is of a run of quietgrad, with its plan."""
        return self.version == 1 or self.body["plan"] is not None

    def signer(self) -> str | None:
        """The key whose signature fits; ``None`` if there is no signature, or none that fits."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if self.signature is None:
            return None
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.signature["public_key"]))
            key.verify(bytes.fromhex(self.signature["value"]), self.payload)
        except (InvalidSignature, ValueError):
            return None
        return self.signature["public_key"]


def read(path: str | Path) -> Claim:
    """Read a claim's file; :class:`Unreadable` in one sentence if it is none."""
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(LARGEST + 1)
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read ({error.strerror}).") from None
    if len(content) > LARGEST:
        raise Unreadable(f"{path}: is larger than any claim.")
    return parse(content, str(path))


def parse(content: bytes, name: str) -> Claim:
    """The claim that ``content`` spells; ``name`` is for messages."""
    try:
        value = json.loads(content)
        spelt = canonical(value) + b"\n"
    except (ValueError, RecursionError):
        raise Unreadable(f"{name}: is not JSON, or holds a number or a text that no claim has.") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise Unreadable(f"{name}: is not a claim of the format {FORMAT}.")
    version = value.get("version")
    if type(version) is not int or version not in VERSIONS:
        raise Unreadable(f"{name}: is of a version that is not read here; those read are 1 and 2.")
    if spelt != content:
        raise Unreadable(f"{name}: was altered: it is not in canonical form (keys, numbers or spaces).")
    body = value.get("body")
    wanted = BODY_1 if version == 1 else BODY_2
    if set(value) != {"body", "digest", "format", "signature", "version"} or not isinstance(body, dict):
        raise Unreadable(f"{name}: was altered: parts are missing or were added.")
    if set(body) != wanted or not _is_signature(value["signature"]):
        raise Unreadable(f"{name}: was altered: parts are missing or were added, or its signature is none.")
    claim = Claim(body, value["signature"], version)
    if claim.digest != value["digest"]:
        raise Unreadable(f"{name}: was altered: its digest does not fit its content.")
    _check_parts(claim, name)
    return claim


def _is_signature(value: object) -> bool:
    forms = {"algorithm": "ed25519", "public_key": "[0-9a-f]{64}", "value": "[0-9a-f]{128}"}
    return value is None or (
        isinstance(value, dict)
        and set(value) == set(forms)
        and all(isinstance(value[key], str) and re.fullmatch(form, value[key]) for key, form in forms.items())
    )


def _check_parts(claim: Claim, name: str) -> None:
    body, stated = claim.body, claim.body["claim"]
    claim_fields = set(_CLAIM) if claim.version == 2 else set(_CLAIM) - {"condition"}
    good = isinstance(stated, dict) and claim_fields <= set(stated) <= set(_CLAIM)
    for key, kinds in _CLAIM.items():
        value = stated.get(key) if good else None
        good = good and isinstance(value, kinds) and (isinstance(value, bool) <= (bool in kinds))
    good = (
        good
        and all(isinstance(note, str) for note in stated["notes"])
        and all(isinstance(key, str) and type(number) is int for key, number in stated["releases"].items())
        and stated["unit"] in ("record", "person", "party")
        and all(isinstance(body[part], dict) for part in ("data", "event", "versions"))
        and all(isinstance(body[part], dict | None) for part in ("federation", "ledger", "model", "plan"))
        and isinstance(body["issued"], str)
    )
    if claim.version == 2:
        source = body["source"]
        good = good and isinstance(body["statement"], str) and isinstance(source, dict)
        good = good and set(source) == {"program", "version", "object", "stated"}
        good = good and (isinstance(body["plan"], dict) == isinstance(body["model"], dict))
    if not good or not stated["is_private"]:
        raise Unreadable(f"{name}: a part of it is not of its kind, or its run was not private.")


def statement(body: Mapping[str, Any]) -> str:
    """The claim in one text, which follows from the fields: an edit of one field alone contradicts it."""
    claim, ledger = body["claim"], body["ledger"]
    condition = "" if claim.get("condition") is None else f", {claim['condition']}"
    charged = "none"
    if ledger is not None:
        charged = f"{ledger['head']}, {len(ledger['lines'])} lines, sha256:{digest_of(ledger['lines'])}"
    sentences = (
        f"({claim['epsilon']!r}, {claim['delta']!r})-differential privacy per {claim['unit']} under "
        f"{claim['relation']}{condition}",
        f"Against {claim['adversary']}",
        f"Account: {json.dumps(claim['account'])}",
        f"Proved by: {claim['accountant']}",
        f"Noise multiplier: {claim['noise_multiplier']!r}",
        f"Sampling: {claim['sampling']}",
        f"Releases: {json.dumps(claim['releases'], sort_keys=True)}",
        f"Notes: {json.dumps(claim['notes'])}",
        f"Records: {json.dumps(body['data'].get('n_public'))}",
        f"Event: sha256:{digest_of(body['event'])}",
        f"Ledger: {charged}",
    )
    return "\n".join(sentences)


def covered(body: Mapping[str, Any]) -> str:
    """The digest that a ledger's line of kind ``certificate`` holds: of all parts but ledger, date and versions."""
    return digest_of({part: body[part] for part in COVERED})


@cache
def schema() -> Json:
    """The JSON Schema of the format."""
    value: Json = json.loads(files("quietgrad_verify").joinpath("schema.json").read_text(encoding="utf-8"))
    return value


def standing(path: Sequence[str | int]) -> str:
    """The standing of the field at ``path`` from the top of the file, or of the nearest one around it.

    >>> standing(("body", "claim", "epsilon")), standing(("body", "claim", "unit")), standing(("body", "issued"))
    ('proved', 'bound', 'said')
    """
    nearest, nodes = "said", [schema()]
    for key in (*path, None):
        nodes = [option for node in nodes for option in _options(node)]
        nearest = next((node["x-standing"] for node in nodes if "x-standing" in node), nearest)
        nodes = [below for node in nodes for below in _below(node, key)]
    return str(nearest)


def _options(node: Json) -> Iterator[Json]:
    yield node
    if "$ref" in node:
        yield from _options(schema()["$defs"][node["$ref"].rpartition("/")[2]])
    for other in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _options(other)


def _below(node: Json, key: str | int | None) -> Iterator[Json]:
    if isinstance(key, int) and isinstance(node.get("items"), dict):
        yield node["items"]
    elif key in node.get("properties", {}):
        yield node["properties"][key]
    elif isinstance(key, str) and isinstance(node.get("additionalProperties"), dict):
        yield node["additionalProperties"]


def fields(claim: Claim) -> dict[str, list[str]]:
    """The fields of a claim's body by standing, as dotted paths of two levels at most."""
    by: dict[str, list[str]] = {each: [] for each in STANDINGS}
    for path, _ in leaves(claim):
        by[standing(("body", *path))].append(".".join(path))
    return by


def leaves(claim: Claim) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The paths of a body's parts, or of their fields where those stand for themselves, and their values."""
    for part, value in sorted(claim.body.items()):
        if isinstance(value, dict) and value and part in ("claim", "plan", "data", "model", "source"):
            yield from (((part, key), value[key]) for key in sorted(value))
        else:
            yield (part,), value
