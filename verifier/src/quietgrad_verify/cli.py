"""``quietgrad-verify claim.json``: exit code 0 if the claim is proved, 1 if it is not, 2 if it cannot be read."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from quietgrad_verify.document import Unreadable, read
from quietgrad_verify.page import page
from quietgrad_verify.verdict import Verdict, check

_MARKS = {True: "yes", False: "NO", None: "–"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="quietgrad-verify", description=__doc__)
    parser.add_argument("file", help="the claim, such as claim.json")
    parser.add_argument("--public-key", help="whose signature is demanded: 64 hexadecimal digits, or a .pub file")
    parser.add_argument("--head", help="the ledger's head, as you had it from its owner")
    parser.add_argument("--model", help="the model's file, if it is at hand")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the verdict as a page")
    given = parser.parse_args(arguments)
    try:
        claim = read(given.file)
        key = None if given.public_key is None else public_key(given.public_key)
        verdict = check(claim, public_key=key, head=given.head, model=given.model)
        if given.html is not None:
            Path(given.html).write_text(page(claim, verdict, given.file), encoding="utf-8")
    except (Unreadable, OSError) as error:
        print(f"quietgrad-verify: {_printable(str(error))}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({"file": given.file, **verdict.to_json()}, indent=1))
    else:
        print(_printable(text(verdict)))
    return 0 if verdict.ok else 1


def text(verdict: Verdict) -> str:
    """The verdict for a terminal."""
    lines = [verdict.headline, f"  digest      {verdict.digest}"]
    lines += [f"  {finding.what:<12}{_MARKS[finding.ok]:<5}{finding.words}" for finding in verdict.findings]
    for title, words in (("Shown:", verdict.shown), ("Not shown:", verdict.not_shown)):
        lines += [title, *(f"  · {line}" for line in words)]
    lines.append("Standing of the fields:")
    lines += [f"  {kind:<8}{', '.join(names)}" for kind, names in verdict.standing.items()]
    lines += [f"  {'OPEN':<8}{', '.join(verdict.open)}"] if verdict.open else []
    lines.append("The claim is proved." if verdict.ok else "The claim is NOT proved: see what says NO or – above.")
    return "\n".join(lines)


def public_key(value: str) -> str:
    """Sixty-four hexadecimal digits from digits or from a file of digits or PEM."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    given = value.strip()
    try:
        content = given.encode() if re.fullmatch("[0-9a-fA-F]{64}", given) else Path(given).read_bytes().strip()
        if content.startswith(b"-----BEGIN PUBLIC KEY-----"):
            key = load_pem_public_key(content + b"\n")
            content = key.public_bytes_raw().hex().encode() if isinstance(key, Ed25519PublicKey) else b""
        if len(digits := bytes.fromhex(content.decode("ascii")).hex()) == 64:
            return digits
    except ValueError:
        pass
    raise Unreadable("--public-key: is neither 64 hexadecimal digits nor a file with an Ed25519 public key.")


def _printable(words: str) -> str:
    """What a terminal would obey is spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in words)


if __name__ == "__main__":
    raise SystemExit(main())
