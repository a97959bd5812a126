"""`quietgrad ledger` and `quietgrad keys`: what each account has spent, and the keys of open runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer import Argument, Option

from quietgrad.assurance.report.ledger_page import spent_without_account, total_of, write_ledger_page
from quietgrad.cli.options import Json, RelationName, answer, budget, say, show_json, show_table, usage
from quietgrad.core.accounting.budget import DEFAULT_RELATION, check_delta
from quietgrad.core.accounting.events import Event
from quietgrad.core.errors import QuietgradError
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import LedgerState, canonical_account_name
from quietgrad.core.sanitize import sanitize
from quietgrad.methods.result import Result, ledger_of

app = typer.Typer(
    help="The record of what privacy was spent: show it, check it, cap it.",
    no_args_is_help=True,
    add_completion=False,
)

File = Annotated[Path, Argument(help="The ledger, such as ledger.jsonl.", show_default=False)]
Row: TypeAlias = dict[str, Any]  # of an account, as it is printed
_COUNTS = 60  # characters of what a run counts as


@app.command(epilog="Example: quietgrad ledger show ledger.jsonl --account patients --delta 1e-6")
def show(
    file: File,
    account: Annotated[str | None, Option(help="Only this account.")] = None,
    delta: Annotated[
        float | None, Option(help="State ε at this δ; else the cap's, or the newest run's and its score's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what every account has spent and on which runs; open reservations count in full."""
    ledger = _existing(file)
    if delta is not None:
        with usage():
            check_delta(delta)
    book = ledger.book()
    if account is not None and book.name(account) not in book.accounts():
        known = ", ".join(book.accounts()) or "none"
        raise typer.BadParameter(
            f"{account!r} is not in {file}; its accounts are: {known}.", param_hint="--account"
        )
    names = book.accounts() if account is None else (book.name(account),)
    rows = [_account_row(ledger, book, name, delta) for name in names]
    together = None if account is not None else spent_without_account(ledger, book, delta)
    if as_json:
        show_json({"file": str(file), "accounts": rows, "without_account": together})
    elif rows:
        _print_tables(rows)
        if together is not None:
            say(sanitize(together))
    else:
        say(f"{file}: nothing was reserved yet.")


@app.command(epilog="Example: quietgrad ledger verify ledger.jsonl")
def verify(
    file: File,
    head: Annotated[
        str | None, Option(help="What `ledger head` printed earlier, kept elsewhere.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every line, the hash chain and the head; exit code 1 if the file was cut, altered or restored."""
    with usage():
        report = _existing(file).verify(head)
    if report.ok:
        torn = "; an append that never finished ends it, and paid for nothing" if report.torn_tail else ""
        words = f"whole; {report.entries} entries, accounts: {', '.join(report.accounts) or 'none'}{torn}."
    else:
        more = len(report.problems) - 1
        words = report.problems[0] + (f" ({more} more with --json.)" if more else "")
    if as_json:
        show_json({"file": str(file), **vars(report)})
    else:
        say(f"{file}: {words}", err=not report.ok)
    raise typer.Exit(0 if report.ok else 1)


@app.command(epilog="Example: quietgrad ledger head ledger.jsonl >> anchors-kept-elsewhere.txt")
def head(file: File, as_json: Json = False) -> None:
    """Print a digest of the whole ledger to keep elsewhere; `verify --head` then detects a restored backup."""
    digest = _existing(file).head()
    answer(as_json, {"file": str(file), "head": digest}, digest)


@app.command(epilog="Example: quietgrad ledger page ledger.jsonl -o ledger.html --runs runs")
def page(
    file: File,
    output: Annotated[Path, Option("--output", "-o", help="The page.")] = Path("ledger.html"),
    runs: Annotated[
        list[Path] | None, Option(help="Folders with runs, to link reports; else `runs` beside the ledger.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page: accounts against their caps, runs over time, cost by kind of run."""
    ledger = _existing(file)
    for folder in runs or ():
        if not folder.is_dir():
            raise typer.BadParameter(f"{folder} is not a folder.", param_hint="--runs")
    beside = ledger.path.parent / "runs"
    target = write_ledger_page(ledger, output, runs or ([beside] if beside.is_dir() else []))
    answer(as_json, {"page": str(target)}, f"ledger page: {target}")


@app.command(epilog="Example: quietgrad ledger cap ledger.jsonl patients --epsilon 3 --delta 1e-6")
def cap(
    file: File,
    account: Annotated[str, Argument(help="The account to cap.", show_default=False)],
    epsilon: Annotated[float, Option(help="The most that all its runs together may spend.", show_default=False)],
    delta: Annotated[float, Option(help="The δ at which ε is stated.", show_default=False)],
    relation: RelationName = DEFAULT_RELATION,
) -> None:
    """Cap what an account may spend from now on; the ledger is made if it does not exist."""
    with usage():
        Ledger(file).set_cap(account, budget(epsilon, delta, relation))
    say(f"{account}: at most ε={epsilon:g} at δ={delta:g} ({relation}) from now on.")


@app.command(epilog='Example: quietgrad ledger adopt ledger.jsonl --reason "copied to a new machine"')
def adopt(
    file: File, reason: Annotated[str, Option(help="Why; it is written into the ledger.", show_default=False)]
) -> None:
    """Accept a ledger that lost its .head file, on your word that its end is not cut."""
    ledger = _existing(file)
    ledger.adopt(reason=reason)
    say(f"{file}: adopted with {len(ledger.entries())} entries.")


@app.command(epilog="Example: quietgrad ledger add ledger.jsonl claim.json --account patients")
def add(
    file: Annotated[Path, Argument(help="The ledger; it is made if it does not exist.", show_default=False)],
    claim: Annotated[Path, Argument(help="The claim of a run, by any library.", show_default=False)],
    account: Annotated[str, Option(help="The people that the run was about.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Charge a run of another program or machine to an account, within its cap.

    Its releases are proved again first. Its assumptions are not checked, so the entry is conditional and says so.
    """
    from quietgrad.assurance.certificates import charge_claim, read  # slow to load, and `train` needs this module

    with usage():
        charged = charge_claim(Ledger(file), read(claim), account)
    ledger = Ledger(file)
    # It is charged by now: a total that cannot be proved is said, and no error.
    row = _account_row(ledger, ledger.book(), charged.account, None)
    summary = {
        "file": str(file), "account": charged.account, "run": charged.run, "epsilon": charged.epsilon,
        "delta": charged.delta, "relation": str(charged.relation), "unit": str(charged.unit),
        "condition": charged.condition, "spent": row["epsilon"],
    }  # fmt: skip
    cost = f"ε={charged.epsilon:.4g} at δ={charged.delta:g} ({charged.relation}, per {charged.unit})"
    total = row["problem"] or f"ε={row['epsilon']:.4g} is spent in all at δ={row['delta']:g} ({row['relation']})."
    answer(
        as_json, summary,
        sanitize(f"{charged.account}: charged {cost}, conditional: it holds {charged.condition}."),
        sanitize(f"{charged.account}: {total}"),
    )  # fmt: skip


def _existing(file: Path) -> Ledger:
    # A head without its ledger is a finding of the check, not a mistyped name.
    if not file.exists() and not file.with_name(file.name + ".head").exists():
        raise typer.BadParameter(f"{file} does not exist.", param_hint="FILE")
    return Ledger(file)


def _account_row(ledger: Ledger, book: LedgerState, name: str, delta: float | None) -> Row:
    """One account as it is printed: its total, what that rests on, its cap and its entries."""
    total = total_of(ledger, book, name, delta)
    row: Row = {
        "account": name, "delta": total.delta, "relation": str(total.relation), "epsilon": total.epsilon,
        "accountant": total.accountant, "problem": total.problem, "unit": total.unit,
        "conditions": list(total.conditions), "notes": list(total.notes),
        "cap": total.cap.to_json() if total.cap else None,
    }  # fmt: skip
    warned = book.past_warnings(name)
    row["reservations"] = [
        {
            "id": each.reservation.id, "run": each.reservation.run, "condition": each.reservation.condition,
            "time": each.time, "state": each.state, "reason": each.reason, "note": each.note,
            "reserved": each.reservation.event.to_json(),
            "counts": None if each.counts is None else each.counts.to_json(),
            "counts_in_words": "nothing" if each.counts is None else in_words(each.counts),
            "warnings": warned.get(each.reservation.id, []),
        }
        for each in book.lines(name)
    ]  # fmt: skip
    return row


def _print_tables(rows: list[Row]) -> None:
    accounts = [
        (
            row["account"],
            "not provable" if row["epsilon"] is None else f"{row['epsilon']:.4g}",
            f"{row['delta']:g}",
            row["relation"],
            row["unit"] or "none yet",
            f"{row['cap']['epsilon']:g}" if row["cap"] else "none",
            row["accountant"] or "none",
        )
        for row in rows
    ]
    runs = [(row["account"], run) for row in rows for run in row["reservations"]]
    show_table(("account", "spent ε", "δ", "relation", "per", "cap ε", "proved by"), accounts, "Accounts")
    if runs:
        cells = [
            (name, run["run"], run["time"][:16].replace("T", " "), run["state"],
             sanitize(_first_parts(run["counts_in_words"]), most=_COUNTS))  # --json has all of it
            for name, run in runs
        ]  # fmt: skip
        show_table(("account", "run", "reserved at (UTC)", "state", "counts as"), cells, "Runs")
    for _, run in runs:
        if counts := str(run["note"]).partition("; ")[2]:  # numbers that were declared public
            say(sanitize(f"run {run['run'][:16]}: {counts}"))
        for warning in run["warnings"]:
            say(sanitize(f"run {run['run'][:16]}: warning: {warning}"))
    for row in rows:
        for condition in row["conditions"]:
            say(sanitize(f"{row['account']}: ε holds {condition}."))
        for note in row["notes"]:
            say(sanitize(f"{row['account']}: {note}"))
        if row["problem"]:
            say(sanitize(f"{row['account']}: {row['problem']}"))


def _first_parts(words: str) -> str:
    """The parts of a composition that fit a cell, and the number of the others.

    >>> _first_parts("gaussian(noise 30.19) + gaussian(noise 42.69) + gaussian(noise 24) + 32 × gaussian(noise 20)")
    'gaussian(noise 30.19) + 3 more'
    """
    parts = words.split(" + ")
    shown = parts[:1]
    for part in parts[1:]:
        if len(" + ".join([*shown, part])) > _COUNTS // 2:
            break
        shown.append(part)
    left = len(parts) - len(shown)
    return " + ".join(shown) + (f" + {left} more" if left else "")


def so_far(result: Result, folder: Path) -> list[tuple[str, str]]:
    """Return a row with the total that a run's account has spent, or no row if its ledger does not know the run."""
    privacy, path = result.privacy, ledger_of(folder)
    if privacy.delta is None or privacy.relation is None or not path.exists():
        return []
    try:
        ledger = Ledger(path)
        entry = ledger.find(str(result.details.get("run")))
        if entry is None:
            return []
        account = entry.reservation.account
        book, unit = ledger.book(), privacy.unit
        runs = book.runs(account, unit)
        delta = book.stated_delta(account, entry.reservation.run)
        spent = ledger.spent(account, delta=delta, relation=privacy.relation, unit=unit).epsilon
    except QuietgradError:  # the total is a service; the run's own statement stands
        return []
    many = "1 run" if runs == 1 else f"{runs} runs"
    named = canonical_account_name(account) == canonical_account_name(privacy.account or "")
    people = repr(account) if named else "this table"
    if len(book.units(account)) > 1:
        people += f", of those by {unit}; others do not add up with them"
    return [("spent so far", f"ε = {spent:.4g} at δ = {delta:g} by {many} on {people}")]


_NAMES = {"noise_multiplier": "noise", "total_variation": "distance"}  # shorter in a table


def in_words(event: Event) -> str:
    """An event on one line.

    >>> from quietgrad.core.accounting.events import poisson_gaussian
    >>> in_words(poisson_gaussian(rate=0.01, noise_multiplier=1.1, steps=100))
    '100 × poisson(rate 0.01, gaussian(noise 1.1))'
    """
    return _in_words(event.to_json())


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        fields = {name: item for name, item in value.items() if name != "event"}
        if value["event"] == "repeated":
            return f"{fields['count']} × {_in_words(fields['inner'])}"
        if value["event"] == "composed":
            return " + ".join(map(_in_words, fields["parts"]))
        inside = (
            _in_words(v) if isinstance(v, dict | list) else f"{_NAMES.get(k, k)} {_in_words(v)}"
            for k, v in fields.items()
        )
        return f"{value['event']}({', '.join(inside)})"
    if isinstance(value, list):
        shown = [_in_words(item) for item in value[:3]]
        return ", ".join([*shown, f"… {len(value)} in all"] if len(value) > 3 else shown)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


keys_app = typer.Typer(
    help="Keys of runs that were not closed. Anyone with such a key can subtract the run's noise. "
    "Resume or destroy old keys.",
    no_args_is_help=True,
    add_completion=False,
)
_DAY = 86400.0
_OLD = 7.0  # days


@keys_app.command("list", epilog="Example: quietgrad keys list")
def list_keys(as_json: Json = False) -> None:
    """List the keys of unfinished runs, their age, and whether the run's folder still exists."""
    keys = KeyFile.waiting()
    summary = [{**vars(key), "orphaned": key.orphaned} for key in keys]
    if not keys:
        answer(as_json, summary, f"{KeyFile.directory()}: no keys wait here.")
        return
    rows = []
    for key in keys:
        state = "its folder is gone" if key.orphaned else key.folder or "its folder was not noted"
        rows.append((key.run, f"{_age(key.since):.1f} days, {state}"))
    advice = "resume or finish these runs, or destroy what has no use: `quietgrad keys destroy RUN`."
    answer(as_json, summary, advice, table=(f"{len(keys)} in {KeyFile.directory()}", rows))


@keys_app.command(
    epilog="Example: quietgrad keys destroy --orphaned   ·   quietgrad keys destroy 3f2a… --older-than 30"
)
def destroy(
    runs: Annotated[list[str] | None, Argument(help="Runs, as `list` names them.", show_default=False)] = None,
    orphaned: Annotated[bool, Option("--orphaned", help="Destroy all keys whose run folder is gone.")] = False,
    older_than: Annotated[float | None, Option(help="Destroy all keys older than this many days.")] = None,
    as_json: Json = False,
) -> None:
    """Overwrite and remove keys. Their runs cannot be resumed; what they spent stays in the ledger."""
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
    many = f"{len(chosen)} key{'' if len(chosen) == 1 else 's'} destroyed."
    answer(as_json, {"destroyed": sorted(chosen)}, many)


@keys_app.command(epilog="Example: quietgrad keys generate signer.key")
def generate(
    file: Annotated[Path, Argument(help="Where the key goes; its public half goes beside it, as .pub.")],
    as_json: Json = False,
) -> None:
    """Make an Ed25519 key that signs certificates, readable by you alone; it never replaces a file."""
    from quietgrad.assurance.certificates import new_key  # slow to load, and `train` needs this module

    public = new_key(file)
    summary = {"key": str(file), "public": f"{file}.pub", "public_key": public}
    answer(
        as_json, summary, f"key: {file} (keep it), public half: {file}.pub (give it away)", f"public key: {public}"
    )


def reminder() -> str | None:
    """A line for the start of a run if keys have outlived their use."""
    stale = [key for key in KeyFile.waiting() if key.orphaned or _age(key.since) > _OLD]
    if not stale:
        return None
    what = "1 key waits" if len(stale) == 1 else f"{len(stale)} keys wait"
    return f"{what} for runs that were abandoned or never resumed; see `quietgrad keys list`."


def _age(since: float) -> float:
    return max(0.0, time.time() - since) / _DAY
