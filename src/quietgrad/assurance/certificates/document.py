"""The file of a certificate: its one spelling, its digest, what it says of a run, and its signature.

A certificate is the canonical JSON of ``{body, digest, format, signature, version}`` and a line end: keys sorted,
no spaces, ASCII, numbers as Python writes them. What is digested and signed is the canonical JSON of ``{body,
format, version}``. :func:`parse` refuses any other spelling, so a key that stands twice, a NaN or a space has no
second meaning that one reader sees and another does not. The format is written down in
``docs/certificate-format.md``; ``quietgrad-verify`` reads it too.

:func:`issue` takes the body from a saved run. It computes nothing from data, and no record is in it. Of the ledger
it copies the lines of the run's own account as they are: their fingerprints of tables are keyed with a secret of
the machine that made them, and no line names another account. ``whole_ledger=True`` copies the lines of all.

Signing keys are Ed25519, PKCS #8 and SubjectPublicKeyInfo in PEM, so that other tools read them too. A private
key is kept in a file that only its owner may read, and this is checked before use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.core.errors import DataError, LedgerError, boundary
from quietgrad.core.files import AS_IS, is_shared, parse_json, read_bytes, sync_folder, write_atomically
from quietgrad.core.ledger.account import run_of
from quietgrad.core.ledger.chain import ChainEntry, anchor
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import canonical_account_name, names_other_accounts, same
from quietgrad.methods.result import Result, ledger_of, load, problems_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


Json = dict[str, Any]
FORMAT = "quietgrad-certificate"
VERSIONS = (1, 2)
LARGEST = 16 << 20  # bytes: a ledger of some ten thousand lines
_SIGNATURE = {"algorithm": "ed25519", "public_key": "[0-9a-f]{64}", "value": "[0-9a-f]{128}"}
_PARTS = {"body", "digest", "format", "signature", "version"}
BODY_1 = {"claim", "data", "event", "federation", "issued", "ledger", "model", "plan", "versions"}
BODIES = {1: BODY_1, 2: BODY_1 | {"source", "statement"}}
COVERED = ("claim", "data", "event", "federation", "model", "plan", "source")
"""The parts whose digest the ledger's line of kind ``certificate`` holds."""
STANDINGS = ("proved", "bound", "said")


def canonical(value: object) -> bytes:
    """The one spelling of ``value``; ``ValueError`` for numbers that JSON has no word for.

    >>> canonical({"b": 1e-05, "a": "ε"})
    b'{"a":"\\\\u03b5","b":1e-05}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@dataclass(frozen=True)
class PrivacyCertificate:
    """A certificate in memory: its body, and its signature if it has one."""

    body: Json
    signature: dict[str, str] | None = None

    @property
    def version(self) -> int:
        """The version of the format: from 2 on a body has a statement."""
        return 2 if "statement" in self.body else 1

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
    """Return the certificate that ``content`` spells; ``name`` is for messages."""
    with boundary(f"{name}: is not JSON, so it is no certificate, or one that was cut."):
        value = parse_json(content)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"{name}: is not a quietgrad certificate.")
    if type(value.get("version")) is not int or value["version"] not in VERSIONS:
        raise DataError(f"{name}: is of a version that this quietgrad does not read; it reads 1 and 2.")
    with boundary(f"{name}: was altered: it holds a number or a text that no certificate has."):
        spelt = canonical(value) + b"\n"
    if spelt != content:
        raise DataError(f"{name}: was altered: it is not in canonical form (keys, numbers or spaces).")
    if (
        set(value) != _PARTS
        or not isinstance(value["body"], dict)
        or set(value["body"]) != BODIES[value["version"]]
    ):
        raise DataError(f"{name}: was altered: parts are missing or were added.")
    signature = value["signature"]
    if signature is not None and not _is_signature(signature):
        raise DataError(f"{name}: was altered: its signature is not one.")
    document = PrivacyCertificate(value["body"], signature)
    if document.digest != value["digest"]:
        raise DataError(f"{name}: was altered: its digest does not fit its content.")
    return document


def statement(body: Json) -> str:
    """The claim as one text, which follows from the fields: an edit of one field alone contradicts it."""
    claim, ledger = body["claim"], body["ledger"]
    condition = claim.get("condition")
    charged = "none"
    if ledger is not None:
        charged = f"{ledger['head']}, {len(ledger['lines'])} lines, sha256:{digest_of(ledger['lines'])}"
    guarantee = f"({claim['epsilon']!r}, {claim['delta']!r})-differential privacy per {claim['unit']}"
    return "\n".join(
        (
            f"{guarantee} under {claim['relation']}{'' if condition is None else f', {condition}'}",
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
    )


def digest_of(value: object) -> str:
    """SHA-256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value)).hexdigest()


def covered(body: Json) -> str:
    """The digest that the ledger's line of kind ``certificate`` holds."""
    return digest_of({part: body[part] for part in COVERED})


def standings(body: Json) -> dict[str, tuple[str, ...]]:
    """The fields of a body by standing, which the schema alone states: proved, bound or said.

    >>> {"claim.unit", "claim.notes"} <= set(standings({"claim": {"unit": "record", "notes": []}})["bound"])
    True
    """
    by: dict[str, list[str]] = {each: [] for each in STANDINGS}
    part_schemas = schema()["properties"]["body"]["properties"]
    for part, value in body.items():
        inner = part_schemas[part]
        options = (inner, *inner.get("anyOf", ()))
        named = {key: field for option in options for key, field in option.get("properties", {}).items()}
        split = isinstance(value, dict) and part in ("claim", "plan", "data", "model", "source")
        for key in value if split else (None,):
            field_schema = inner if key is None else named.get(key, inner)
            by[field_schema.get("x-standing", inner["x-standing"])].append(part if key is None else f"{part}.{key}")
    return {each: tuple(names) for each, names in by.items()}


def _is_signature(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == set(_SIGNATURE)
        and all(isinstance(value[key], str) and re.fullmatch(form, value[key]) for key, form in _SIGNATURE.items())
    )


def schema() -> Json:
    """The JSON Schema of a certificate, as it is published.

    >>> schema()["title"]
    'quietgrad certificate'
    """
    text = files("quietgrad.assurance.certificates").joinpath("schema.json").read_text(encoding="utf-8")
    value: Json = json.loads(text)
    return value


PLAN = {
    "algorithm", "config", "n_public", "noise_multiplier", "composition", "rounds", "slots", "counted", "stopped_by"
}  # fmt: skip
PUBLIC_MODEL = ("objective", "regularizer", "intercept", "row_bound", "rows", "features", "task", "classes")


def issue(
    folder: str | Path, *, whole_ledger: bool | None = None, ledger: str | Path | None = None
) -> PrivacyCertificate:
    """Make the unsigned certificate of a run; ``DataError`` if nothing can be certified.

    ``ledger`` says where the run was paid, if neither its options nor its folder do (a run of Python's, saved).
    ``whole_ledger`` chooses the lines that are copied. ``None`` copies those of the run's account, which show no
    other account's name, ``False`` those of this run alone, and ``True`` all lines of all accounts. If they are
    more than a certificate may hold, the lines of this run alone are copied. The run's statement is first proved
    again and held against its options and its ledger: what refutes it there is not certified. The ledger gets a
    line with the digest of the certificate, so that its head holds it fast.
    """
    path = Path(folder)
    result = load(path)
    book = ledger_of(path, None if ledger is None else Path(ledger))
    if problems := problems_of(result, path, book):
        raise DataError(f"{path}: its statement is refuted, so nothing is certified: {problems[0]}.")
    lines = _lines(result, book, whole=whole_ledger)
    if ledger is not None and lines is None:
        raise DataError(
            f"{ledger}: has no entry of this run, which was charged to another ledger, so it "
            "cannot go into a certificate. Leave the ledger out, or name the one that was charged."
        )
    privacy = result.privacy
    if result.details.get("parts", {}).get("count", 1) > 1:
        raise DataError(
            f"{path}: its model was fitted in several parts (partial_fit), and a certificate is of one plan. Its "
            "statement holds all parts, and `quietgrad report` proves it again."
        )
    if not privacy.is_private or privacy.events is None:
        why = privacy.notes[0] if privacy.notes else "no noise was added"
        raise DataError(f"{path}: the run is not private ({why}), so there is nothing to certify.")
    stated, details = privacy.to_json(), result.details
    event, federation = stated.pop("event"), None
    if "trust" in details:  # how parties took part; their names stay with them
        party_fields = ("trust", "secure", "sizes", "parties_per_person", "plan_file")
        federation = {**{key: details.get(key) for key in party_fields}, "matched": bool(details.get("matched"))}
    body: Json = {
        "issued": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "claim": stated,
        "event": event,
        "plan": {
            "algorithm": result.algorithm,
            "config": dict(result.config),
            "n_public": result.n_public,
            "noise_multiplier": privacy.noise_multiplier,
            "composition": details.get("composition", "sequential"),
            "rounds": details.get("rounds"),
            "slots": list(details.get("slots", ())),
            "counted": details.get("counted"),
            "stopped_by": result.stopped_by,
        },
        "federation": federation,
        "ledger": None,
        "model": {
            "sha256": hashlib.sha256(read_bytes(path / "model.safetensors")).hexdigest(),
            "parameters": len(result.params),
        },
        "data": {
            "name": str(result.data.get("name", "not named")),
            "n_public": result.n_public,
            **{key: details.get("model", {}).get(key) for key in PUBLIC_MODEL},
        },
        "versions": {name: text for name, text in result.versions.items() if text},
        "source": {
            "program": "quietgrad", "version": result.versions.get("quietgrad") or "unknown",
            "object": "a saved run", "stated": None,
        },
    }  # fmt: skip
    try:
        if lines is not None and book is not None:
            with contextlib.suppress(LedgerError):  # a ledger that cannot be written holds nothing fast
                run = str(result.details["run"])
                Ledger(book).certify(run, covered(body), last=not whole_ledger)
            lines = _lines(result, book, whole=whole_ledger)
        body["ledger"] = lines
        document = PrivacyCertificate({**body, "statement": statement(body)})
        size = len(document.to_bytes())
    except ValueError:
        raise DataError(f"{path}: its settings hold a number that no certificate can (not finite).") from None
    if size > LARGEST and whole_ledger is not False:  # no reader would accept it: keep the run's own lines
        return issue(path, whole_ledger=False, ledger=ledger)
    return document


def _lines(result: Result, file: Path | None, *, whole: bool | None) -> Json | None:
    """The part of a certificate about the ledger; ``None`` if it has no line of this run."""
    if file is None or not file.exists():
        return None
    entries = Ledger(file).entries()
    run = result.details.get("run")
    paid = [entry for entry in entries if entry.kind == "reserve" and run_of(str(entry.body.get("run"))) == run]
    if run is None or not paid:
        return None
    lines = list(entries) if whole else _own_lines(entries, paid, result.privacy.account, alone=whole is False)
    if not whole:
        _check_names(file, lines, str(run))
    return {"run": run, "head": anchor(entries[-1]), "lines": [dict(vars(entry)) for entry in lines]}


def _own_lines(
    entries: Sequence[ChainEntry], paid: Sequence[ChainEntry], account: str | None, *, alone: bool
) -> list[ChainEntry]:
    """The lines about the run that ``paid`` has the reservations of, or (not ``alone``) all about its account.

    Those of an account are the first of the ledger, its caps, and what its runs wrote: its total follows from them.
    """
    claimed = [entry for entry in paid if same(str(entry.body["account"]), account)]
    reservations = claimed or paid  # a party calls the account otherwise than the coordinator, whose claim it is
    who = {canonical_account_name(str(entry.body["account"])) for entry in reservations}
    if not alone:
        reservations = [entry for entry in entries if entry.kind == "reserve" and _account_of(entry) in who]
    ids = {entry.body["id"] for entry in reservations}
    runs = {run_of(str(entry.body["run"])) for entry in reservations}
    lines = []
    for entry in entries:
        if entry.kind in ("reserve", "close", "cancel", "condition"):
            wanted = entry.body["id"] in ids
        elif entry.kind == "certificate":
            wanted = entry.body.get("run") in runs
        elif entry.kind == "resume":
            wanted = not alone and run_of(str(entry.body["run"])) in runs
        elif entry.kind == "cap":
            wanted = not alone and _account_of(entry) in who
        else:
            wanted = not alone and entry.kind == "open"
        if wanted:
            lines.append(entry)
    return lines


def _account_of(entry: ChainEntry) -> str:
    return canonical_account_name(str(entry.body["account"]))


def _check_names(file: Path, lines: Sequence[ChainEntry], run: str) -> None:
    """Raise ``DataError`` if the lines name accounts beside the run's own, which their hashes keep in them."""
    whole = "If all accounts' names may be known, pass --whole-ledger (in Python whole_ledger=True)."
    if len({_account_of(line) for line in lines if line.kind == "reserve"}) > 1:
        raise DataError(
            f"{file}: this run is charged to several accounts there, and the claim names none of them, so no line "
            f"would be without another account's name. Nothing was certified. {whole}"
        )
    for line in lines:
        if names_other_accounts(line.body):
            mine = run_of(str(line.body.get("run"))) == run
            alone = "" if mine else "Pass --run-only (whole_ledger=False) to leave this line out. "
            raise DataError(
                f"{file}: line {line.seq} was written by an older quietgrad and names other accounts in a "
                f"warning. Its hash does not permit to change it, so nothing was certified. {alone}{whole}"
            )


_LARGEST = 1 << 14  # bytes
_PEM = "-----BEGIN "
_DIGITS = re.compile(rb"[0-9a-fA-F]{64}")


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
        if not file.exists():
            raise DataError(f"{file}: there is no key; make one with `quietgrad keys generate {file}`.")
        if is_shared(file):
            raise DataError(f"{file}: others may read this key; run `chmod 600 {file}`, or make a new one.")
        with boundary(f"{file}: is no private key that can be read without a password."):
            key = load_pem_private_key(read_bytes(file, most=_LARGEST), password=None)
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
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | AS_IS, 0o600), "wb") as target:
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
    """Read a public key as hexadecimal digits from digits, PEM, or a file that holds either.

    >>> public_key("AB" * 32) == "ab" * 32
    True
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    spelled = text.strip().startswith(_PEM)
    name = "the text that was given" if spelled else text
    try:
        with boundary(f"{name}: holds no public key; give the .pub file, or its 64 hexadecimal digits."):
            given = spelled or _DIGITS.fullmatch(text.strip().encode()) is not None
            content = (text.encode() if given else read_bytes(text, most=_LARGEST)).strip()
            if _DIGITS.fullmatch(content):
                return content.decode().lower()
            key = load_pem_public_key(content + b"\n")
    except FileNotFoundError:
        raise DataError(
            f"{name}: is neither a file, nor PEM, nor 64 hexadecimal digits, so it is no public key."
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise DataError(f"{name}: is not an Ed25519 key, with which certificates are signed.")
    return key.public_bytes_raw().hex()


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
