"""Roles of `quietgrad federate`: rehearsals, the coordinator, sum servers and parties, and their messages."""

from __future__ import annotations

import dataclasses
import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from quietgrad import federation as federations
from quietgrad.cli.ledger import reminder
from quietgrad.cli.options import usage
from quietgrad.cli.run_spec import RunSpec, objective_from
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.cli.train import check_folder, conclude
from quietgrad.cli.training import described
from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.errors import BudgetError, DataError, QuietgradError
from quietgrad.core.files import write_atomically
from quietgrad.core.sanitize import sanitize
from quietgrad.federation import approved
from quietgrad.federation.approved import Approved
from quietgrad.federation.coordinator import AGGREGATES
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.pins import check_pin, pin_of, readable_digest
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.plan_file import beside, parse_plan, read_text
from quietgrad.federation.planning import adversary, multiplicity
from quietgrad.federation.rounds import largest_reply
from quietgrad.federation.secure.identity import DropoutError
from quietgrad.federation.secure.terms import threat_model
from quietgrad.federation.transport.local_socket import serve
from quietgrad.federation.transport.tls import TlsParty, TlsServer
from quietgrad.methods.callbacks import Progress
from quietgrad.methods.result import Result

Tell = Callable[[str], None]
NOT_PRIVATE = "nobody: NOT PRIVATE, this plan adds no noise and what it releases is exact"
_EVERY = 5.0  # seconds between lines of progress


def member_logger(name: str, quiet: bool) -> Tell:
    """Return a function that prints words to stderr with the member's name and the time."""

    def tell(words: str) -> None:
        if not quiet:
            line = sanitize(f"{time.strftime('%H:%M:%S')} {name}: {words}")  # others wrote some of the words
            sys.stderr.write(line + "\n")  # one write: many threads talk
            sys.stderr.flush()

    return tell


def approval(
    plan: Path, keys: Path, out: Path, *, pin: str | None = None, address: str | None = None,
    data: Path | None = None, ledger: Path | None = None, account: str = "default",
    cap_epsilon: float | None = None,
) -> Approved:  # fmt: skip
    """Build a member's approval of the plan as it is now. Refuse a plan that does not match a given ``pin``."""
    text = read_text(plan)
    file = parse_plan(text, str(plan), beside(plan))
    network = file.network
    start = None if network is None or network.start_file is None else plan.parent / network.start_file
    if pin is not None:
        try:
            check_pin(pin, file)
        except BudgetError as error:
            raise BudgetError(f"{plan}: {error}") from None
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--pin") from None

    def absolute(path: Path | None) -> str | None:
        return None if path is None else str(path.resolve())

    approved = Approved(
        plan=text, digest=file.digest, keys=str(keys.resolve()), out=str(out.resolve()), data=absolute(data),
        ledger=absolute(ledger), account=account, cap_epsilon=cap_epsilon, address=address,
        module_text=None if network is None else network.text, start=absolute(start),
    )  # fmt: skip
    with usage():
        approved.check()
    return approved


def threat_rows(plan: FederatedPlan) -> list[tuple[str, str]]:
    """Return the threat model of a plan, as questions and answers."""
    if not plan.is_private:
        return [("trust", plan.trust), ("protects against", NOT_PRIVATE)]
    people = [("people", multiplicity(plan))] if plan.unit is PrivacyUnit.PERSON else []
    if plan.trust == "secure":
        return [*threat_model(plan.terms(max(plan.dims.values()))).rows, *people]
    return [
        ("trust", plan.trust),
        ("protects against", adversary(plan)),
        ("noise in the sum", f"variance {plan.variance_factor:.4g} times that of a trusted curator"),
        *people,
    ]


def simulated(
    spec: RunSpec, out: Path, m: int, *, unevenness: float, dirichlet: float | None, quiet: bool, **federation: Any
) -> Result:
    """Deal a table to ``m`` parties and train; each party has its own ledger below ``out``."""
    data = spec.load_data()
    if isinstance(data, ScannedData):
        raise DataError(f"{spec.data}: parties are dealt the records of one file, which is read whole.")
    method = spec.make_algorithm(data, data.n)
    check_folder(out, overwrite=False)
    with usage():
        loss = objective_from(spec.describe_objective(data))
        people = federations.deal(data.X, data.y, m, unevenness=unevenness, dirichlet=dirichlet)
    if not spec.non_private:
        homes = [out / "parties" / f"party-{i + 1}" for i in range(m)]
        for home in homes:
            home.mkdir(parents=True, exist_ok=True)
        people = [
            dataclasses.replace(p, ledger=home / "ledger.jsonl") for p, home in zip(people, homes, strict=True)
        ]
    spec.save(out)  # tells `predict` how the data were read
    tell, next_line = member_logger("simulation", quiet), time.monotonic()

    def callback(progress: Progress) -> None:
        nonlocal next_line
        if progress.step and (progress.done or time.monotonic() >= next_line):
            next_line = time.monotonic() + _EVERY
            tell(f"round {progress.releases} of {progress.planned}")

    saved: list[Result] = []
    federations.simulate(
        method, loss, people, budget=spec.budget(), ledger=spec.ledger_in(out), folder=out, callback=callback,
        keep=lambda result: saved.append(conclude(spec, out, data, described(spec, data, result))), **federation,
    )  # fmt: skip
    return saved[0]


def coordinate(mine: Approved, *, wait: float, patience: float, tell: Tell) -> Result:
    """Listen, train, hand out the model; say goodbye with the reason if it fails."""
    file, credentials, out = mine.file, mine.credentials, mine.folder
    mine.check_coordinator()
    over = mine.finished() is not None
    everyone = [name for name in file.members if name != credentials.name]
    try:
        transport = TlsServer(
            credentials, (file.host, file.port), everyone, agreement=file.digest,
            most=largest_reply(file.plan), timeout=file.timeout, tell=tell,
        )  # fmt: skip
    except OSError as error:
        raise DataError(cannot_listen(file.host, file.port, error)) from None
    out.mkdir(parents=True, exist_ok=True)
    write_options(mine)
    where = f"{file.host}:{transport.port}"
    tell(f"plan {pin_of(file)}, listening on {where} for {', '.join(everyone)}")
    if over:
        tell(f"{out} holds the finished run of this plan: its model is handed out, and no party is asked again")
    elif (out / AGGREGATES).exists():
        tell(f"continuing the interrupted run in {out}")
    if file.budget is None:
        tell(NOT_PRIVATE)
    try:
        result = mine.coordinate(transport, tell, wait=wait, patience=patience)
    finally:
        transport.close()
    tell(f"digest of the model, the same at all members: {readable_digest(approved.model_digest(out))}")
    return result


def cannot_listen(host: str, port: int, error: OSError) -> str:
    """Why an address cannot be listened on, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port}: the port is in use; end what listens there, or is another coordinator running?"
    if error.errno == errno.EACCES:
        return f"{host}:{port}: this user may not listen on ports below 1024; choose another in the plan."
    return (
        f"{host}:{port}: is not an address of this machine ({error.strerror}); behind a router or a public name, "
        f"listen with --address 0.0.0.0:{port}."
    )


def take_part(mine: Approved, tell: Tell, *, patience: float, listen: Path | None = None) -> dict[str, Any]:
    """Be a party, or a server of a secure sum, until the run is over; a party saves the model that comes out."""
    file, credentials, out = mine.file, mine.credentials, mine.folder
    if file.budget is None:
        tell(NOT_PRIVATE)
    member = mine.member(tell)
    try:
        if isinstance(member, PartyCurator):
            write_options(mine)
        site = mine.site(member, tell)
        where = f"calling {file.host}:{file.port}" if listen is None else f"listening at {listen}"
        plan = f"plan {pin_of(file)}"
        if not isinstance(member, PartyCurator):
            words = f"adding up for {plan}"
        else:
            tell(
                f"what was answered is in {out / f'{member.name}.journal'}, the key of the samples beside it, "
                "until the run is over: neither copy nor restore them"
            )
            if (stale := reminder()) is not None:
                tell(stale)
            rounds = sum(member.answered().values())
            words = f"continuing the run of {plan} that was approved before, with {rounds} rounds answered"
            if member.run is None:
                words = f"approved one run of {plan}"
        tell(f"{words}; {where}")
        most = largest_reply(file.plan)
        if listen is not None:
            serve(site, listen, most=most)
        else:
            TlsParty(
                credentials, (file.host, file.port), site, agreement=file.digest, most=most, timeout=file.timeout,
                patience=patience, tell=tell,
            ).run()  # fmt: skip
        if site.error is not None:
            raise site.error
    except QuietgradError as error:
        if isinstance(error, DropoutError) and isinstance(member, PartyCurator) and member.withdraw():
            tell("nothing was asked, so nothing is charged")
        raise
    finally:
        member.close()
    facts: dict[str, Any] = {"words": site.words, "messages answered": site.answered}
    if credentials.name in file.plan.servers:
        return facts
    facts |= {
        "model": str(out / "model.safetensors"),
        "model digest": readable_digest(approved.model_digest(out)),
        "plan": pin_of(file),
    }  # fmt: skip
    if file.budget is None:
        return {**facts, "privacy": NOT_PRIVATE, "ledger": "none: this plan has no noise"}
    return {**facts, "ledger": str(mine.books)}


def write_options(mine: Approved) -> None:
    """Write ``run.json`` before anything is asked: how files like the parties' are read, and what pays."""
    file, out = mine.file, mine.folder
    options: dict[str, Any] = {**file.table.options(), "account": mine.account}
    out.mkdir(parents=True, exist_ok=True)
    if (schema := file.table.schema_text()) is not None:
        write_atomically(out / "schema.json", schema.encode())
        options["schema"] = out / "schema.json"
    if mine.books is not None:
        options["ledger"] = mine.books
    budget = {"non_private": True} if file.budget is None else file.budget.to_json()
    RunSpec.from_options(**options, **budget).save(out)
    mine.save_network()
