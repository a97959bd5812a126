"""`quietgrad keys`: secret keys that wait for their runs to be resumed or closed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from quietgrad.cli.options import Json, say, show_json, show_rows

app = typer.Typer(
    help="Keys of runs that were not closed. Whoever holds one can subtract its run's noise: keep none too long.",
    no_args_is_help=True,
    add_completion=False,
)
_DAY = 86400.0
_OLD = 7.0  # days


@app.command("list", epilog="Example: quietgrad keys list")
def list_keys(as_json: Json = False) -> None:
    """List the keys that wait, since when, and whether the folder of their run is still there."""
    from quietgrad.privacy.keys import KeyFile

    keys = KeyFile.waiting()
    if as_json:
        show_json([{**vars(key), "orphaned": key.orphaned} for key in keys])
        return
    if not keys:
        say(f"{KeyFile.directory()}: no keys wait here.")
        return
    rows = []
    for key in keys:
        state = "its folder is gone" if key.orphaned else key.folder or "its folder was not noted"
        rows.append((key.run, f"{_age(key.since):.1f} days, {state}"))
    show_rows(f"{len(keys)} in {KeyFile.directory()}", rows)
    say("resume or finish these runs, or destroy what has no use: `quietgrad keys destroy RUN`.")


@app.command(epilog="Example: quietgrad keys destroy --orphaned   ·   quietgrad keys destroy 3f2a… --older-than 30")
def destroy(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Runs, as `list` names them.", show_default=False)
    ] = None,
    orphaned: Annotated[bool, typer.Option("--orphaned", help="All whose folder is gone.")] = False,
    older_than: Annotated[float | None, typer.Option(help="All that have waited for so many days.")] = None,
    as_json: Json = False,
) -> None:
    """Overwrite and remove keys. Their runs cannot be resumed; what they spent stays in the ledger."""
    from quietgrad.privacy.keys import KeyFile

    waiting = {key.run: key for key in KeyFile.waiting()}
    if unknown := [run for run in runs or () if run not in waiting]:
        raise typer.BadParameter(f"{unknown[0]!r}: there is no such key; see `quietgrad keys list`.")
    chosen = set(runs or ())
    if orphaned:
        chosen |= {run for run, key in waiting.items() if key.orphaned}
    if older_than is not None:
        chosen |= {run for run, key in waiting.items() if _age(key.since) > older_than}
    if not (runs or orphaned or older_than is not None):
        raise typer.BadParameter("say which: RUN, --orphaned or --older-than DAYS.")
    for run in sorted(chosen):
        KeyFile.destroy(run)
    if as_json:
        show_json({"destroyed": sorted(chosen)})
    else:
        say(f"{len(chosen)} key{'' if len(chosen) == 1 else 's'} destroyed.")


@app.command(epilog="Example: quietgrad keys generate signer.key")
def generate(
    file: Annotated[Path, typer.Argument(help="Where the key goes; its public half goes beside it, as .pub.")],
    as_json: Json = False,
) -> None:
    """Make an Ed25519 key that signs certificates, readable by you alone; it never replaces a file."""
    from quietgrad.certificates import new_key

    public = new_key(file)
    if as_json:
        show_json({"key": str(file), "public": f"{file}.pub", "public_key": public})
    else:
        say(f"key: {file} (keep it), public half: {file}.pub (give it away)\npublic key: {public}")


def reminder() -> str | None:
    """A line for the start of a run if keys have outlived their use."""
    from quietgrad.privacy.keys import KeyFile

    stale = [key for key in KeyFile.waiting() if key.orphaned or _age(key.since) > _OLD]
    if not stale:
        return None
    what = "1 key waits" if len(stale) == 1 else f"{len(stale)} keys wait"
    return f"{what} for runs that were abandoned or never resumed; see `quietgrad keys list`."


def _age(since: float) -> float:
    return max(0.0, time.time() - since) / _DAY
