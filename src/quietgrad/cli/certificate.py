"""`quietgrad certificate`: a run's claim as one file that somebody else can check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietgrad.cli.options import Json, say, show_json

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: quietgrad keys generate signer.key   ·   "
    "quietgrad certificate runs/a9a -o a9a.certificate.json --key signer.key"
)
def certificate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; else certificate.json in the folder.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Sign with this key, which `quietgrad keys generate` made.")
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Where the run was paid, if its folder does not say.", show_default=False),
    ] = None,
    run_only: Annotated[
        bool, typer.Option("--run-only", help="Leave out the ledger's lines of other runs and accounts.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write plan, releases, ledger lines and versions of a run as canonical JSON, signed if a key is given.

    The run's ε is proved again first; what its options or ledger refute is not certified. No record is in the file.
    """
    from quietgrad.certificates import SigningKey, issue

    signer = None if key is None else SigningKey.read(key)  # before the work, so that a mistake is told at once
    document = issue(folder, whole_ledger=not run_only, ledger=ledger)
    if signer is not None:
        document = signer.sign(document)
    target = document.write(output or folder / "certificate.json")
    if as_json:
        show_json({"certificate": str(target), "digest": document.digest, "signature": document.signature})
        return
    say(f"certificate: {target}")
    if signer is None:
        say("It is not signed: others can check that it is consistent, not who made it (--key signs it).")
    else:
        say(f"Signed by {signer.public}. Give others the public key by another way than the file.")
