"""`quietgrad certificate` and `quietgrad verify`: a run's claim as one file, and its check without the data."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from quietgrad.assurance.certificates import SigningKey, check, issue, read
from quietgrad.assurance.certificates import public_key as read_key
from quietgrad.cli.options import Explain, Json, LedgerOfRun, RunFolder, answer, say_meaning
from quietgrad.core.errors import DataError
from quietgrad.core.files import write_atomically
from quietgrad.core.sanitize import sanitize

certificate_app = typer.Typer(add_completion=False)


@certificate_app.command(
    epilog="Example: quietgrad keys generate signer.key   ·   "
    "quietgrad certificate runs/a9a -o a9a.certificate.json --key signer.key"
)
def certificate(
    folder: RunFolder,
    output: Annotated[
        Path | None, Option("--output", "-o", help="The file; else certificate.json in the folder.")
    ] = None,
    key: Annotated[Path | None, Option(help="Sign with this key, which `quietgrad keys generate` made.")] = None,
    ledger: LedgerOfRun = None,
    run_only: Annotated[
        bool, Option("--run-only", help="Copy the ledger's lines of this run alone, not those of its account.")
    ] = False,
    whole_ledger: Annotated[
        bool, Option("--whole-ledger", help="Copy all lines of all accounts, whose names are then known.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write plan, releases, ledger lines and versions of a run as canonical JSON, signed if a key is given.

    The run's ε is proved again first; what its options or ledger refute is not certified. No record is in the file.
    Of the ledger it has the lines of the run's account, and no other account's name.
    """
    if run_only and whole_ledger:
        raise typer.BadParameter("excludes --whole-ledger; give one of them.", param_hint="--run-only")
    signer = None if key is None else SigningKey.read(key)  # before the work, so that a mistake is reported at once
    document = issue(folder, whole_ledger=False if run_only else whole_ledger or None, ledger=ledger)
    if signer is not None:
        document = signer.sign(document)
    target = document.write(output or folder / "certificate.json")
    unsigned = "It is not signed: others can check that it is consistent, not who made it (--key signs it)."
    signed = "Signed by {}. Give others the public key by another way than the file."
    by = unsigned if signer is None else signed.format(signer.public)
    summary = {"certificate": str(target), "digest": document.digest, "signature": document.signature}
    answer(as_json, summary, f"certificate: {target}", by)


verify_app = typer.Typer(add_completion=False)
_MARKS = {True: "yes", False: "NO", None: "–"}


@verify_app.command(epilog="Example: quietgrad verify a9a.certificate.json --public-key signer.key.pub")
def verify(
    file: Annotated[Path, Argument(help="The certificate.", show_default=False)],
    public_key: Annotated[
        str | None,
        Option(help="Require the signature of this key: a .pub file, its text, or 64 hexadecimal digits."),
    ] = None,
    ledger: Annotated[Path | None, Option(help="The ledger itself, if it is at hand.")] = None,
    model: Annotated[Path | None, Option(help="The model file, if it is at hand.")] = None,
    html: Annotated[Path | None, Option(help="Write quietgrad-verify's verdict as a page.")] = None,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Prove a certificate's ε again, by quietgrad and by quietgrad-verify, and check chain, plan and signature.

    Exit code 0 only if ε is proved and nothing was altered. The output states whether one or two accountants proved
    ε. Unsigned, a file shows only that it is consistent.
    """
    demanded = None if public_key is None else read_key(public_key)
    if html is not None and find_spec("quietgrad_verify") is None:
        raise DataError(
            "--html: the page is made by quietgrad-verify; install it with `pip install quietgrad-verify`."
        )
    document = read(file)
    verdict = check(document, public_key=demanded, ledger=ledger, model=model)
    if verdict.ok:
        claim = document.body["claim"]
        say_meaning(explain, float(claim["epsilon"]), float(claim["delta"]), claim.get("unit", "record"))
    rows = [(finding.what, f"{_MARKS[finding.ok]:<5}{finding.words}") for finding in verdict.findings]
    lines = []
    for title, words in (("Shown:", verdict.shown), ("Not shown:", verdict.not_shown)):
        lines += [title, *(sanitize(f"  · {line}") for line in words)] if words else []
    lines.append(
        "Standing of the fields (proved: follows from the rest; bound: held fast; said: the author's word):"
    )
    lines += [sanitize(f"  {kind:<8}{', '.join(names)}", most=2000) for kind, names in verdict.standing.items()]
    if verdict.open:
        lines.append(sanitize(f"  {'OPEN':<8}{', '.join(verdict.open)}: nothing holds them fast", most=2000))
    elif verdict.bound_by:
        lines.append(f"  held fast by {' and '.join(verdict.bound_by)}")
    if html is not None:
        _write_page(file, html, demanded, model)
    signed = any(finding.what == "signature" and finding.ok for finding in verdict.findings)
    holds = (
        "The claim holds as certified." if signed else "The claim follows from the file; the file is not signed."
    )
    by = "" if verdict.accountants == 2 else " One accountant proved it."
    end = holds + by if verdict.ok else "The claim is NOT proved: see what says NO above."
    answer(as_json, {"file": str(file), **verdict.to_json()}, *lines, end, table=(verdict.claim, rows))
    raise typer.Exit(0 if verdict.ok else 1)


def _write_page(file: Path, page_file: Path, demanded: str | None, model: Path | None) -> None:
    """The verdict of quietgrad-verify, whose code is its own, as a page."""
    from quietgrad_verify import check as check_again
    from quietgrad_verify import read as read_again
    from quietgrad_verify.page import page

    claim = read_again(file)
    text = page(claim, check_again(claim, public_key=demanded, model=model), str(file))
    write_atomically(page_file, text.encode())
