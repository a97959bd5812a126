"""What `quietgrad federate` runs: rehearsals, the coordinator, sum servers and parties, and what they say."""

from __future__ import annotations

import dataclasses
import errno
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quietgrad.cli.options import usage
from quietgrad.errors import BudgetError, DataError, QuietgradError
from quietgrad.shown import shown

if TYPE_CHECKING:
    from quietgrad.cli.runs import RunSpec
    from quietgrad.federation.plan import FederatedPlan
    from quietgrad.federation.provision import Credentials
    from quietgrad.federation.toml_plan import PlanFile
    from quietgrad.privacy.budget import Budget
    from quietgrad.training.result import Result

Tell = Callable[[str], None]
NOT_PRIVATE = "nobody: NOT PRIVATE, this plan adds no noise and what it releases is exact"
_EVERY = 5.0  # seconds between lines of progress


def teller(name: str, quiet: bool) -> Tell:
    """Prints words to stderr with the member's name and the time."""

    def tell(words: str) -> None:
        if not quiet:
            line = shown(f"{time.strftime('%H:%M:%S')} {name}: {words}")  # others wrote some of the words
            sys.stderr.write(line + "\n")  # one write: many threads talk
            sys.stderr.flush()

    return tell


def approved(
    plan: Path, keys: Path, pin: str | None, address: str | None, engine: str
) -> tuple[PlanFile, Credentials]:
    """The plan file and the keys, if the plan is the one that was approved."""
    from quietgrad.federation.provision import COORDINATOR, Credentials
    from quietgrad.federation.revocation import check_none_revoked
    from quietgrad.federation.toml_plan import _address, read_plan

    file = read_plan(plan)
    pin = None if pin is None else "".join(pin.split())  # as it was read out, in groups
    if pin is not None and len(pin) < 16:
        raise typer.BadParameter(f"{pin!r}: give at least 16 digits of the digest.", param_hint="--pin")
    if pin is not None and (not file.digest.startswith(pin.lower())):
        raise BudgetError(f"{plan}: its digest is {file.digest}, not the approved {pin}; nothing was given.")
    if address is not None:
        if engine == "nvflare":
            raise typer.BadParameter(
                "FLARE's kits hold the plan's address; change the plan and provision again.", param_hint="--address"
            )
        with usage():
            host, port = _address(address)
        file = dataclasses.replace(file, host=host, port=port)
    credentials = Credentials.read(keys)
    if credentials.name != COORDINATOR:  # the coordinator turns a revoked party away and may do without it
        check_none_revoked(keys, file.members)
    return file, credentials


def tell_state(out: Path, name: str, tell: Tell) -> None:
    """Say where the run's only secret waits, and remind of keys that other runs left."""
    from quietgrad.cli.keys import reminder

    tell(
        f"what was answered, and the key of the samples, is in {out / f'{name}.journal'} until the run is over: "
        "neither copy nor restore it"
    )
    if (words := reminder()) is not None:
        tell(words)


def cap_of(file: PlanFile, epsilon: float | None) -> Budget | None:
    """The most that an account may spend, at the plan's δ and relation."""
    from quietgrad.privacy.budget import Budget

    if epsilon is None:
        return None
    if file.budget is None:
        raise BudgetError("this plan adds no noise and has no ε: no cap can hold. Leave --cap-epsilon out.")
    with usage():
        return Budget(epsilon, file.budget.delta, file.budget.relation)


def handing_out(file: PlanFile, out: Path, sent: Mapping[str, Path], engine: str) -> str:
    """What to do with the folders that were just provisioned."""
    own = [name for name in file.members if name not in sent]
    kit = "" if engine == "tls" else ", nvflare (with a key: send it safely)"
    lines = [f"send back to {', '.join(sent)}: ca.pem, cert.pem, member.json{kit}."] if sent else []
    if own:
        lines.append(
            f"made here, secret keys included, for {', '.join(own)}: "
            "hand each folder to its member over a safe channel, and remove it here."
        )
    lines.append(f"remove {out / 'authority' / 'ca.key'} too: whoever has it can make certificates of any member.")
    return "\n".join(lines)


def threat_rows(plan: FederatedPlan) -> list[tuple[str, str]]:
    """The threat model of a plan, as questions and answers."""
    from quietgrad.federation.explain import multiplicity
    from quietgrad.privacy.budget import Unit

    if not plan.is_private:
        return [("trust", plan.trust), ("protects against", NOT_PRIVATE)]
    people = [("people", multiplicity(plan))] if plan.unit is Unit.PERSON else []
    if plan.trust == "secure":
        from quietgrad.secure.threat_model import threats

        return [*threats(plan.terms(max(plan.dims.values()))).rows, *people]
    from quietgrad.federation.coordinator import adversary

    return [
        ("trust", plan.trust),
        ("protects against", adversary(plan)),
        ("noise in the sum", f"variance {plan.variance_factor:.4g} times that of a trusted curator"),
        *people,
    ]


def matched(
    file: PlanFile, name: str, data: Path, key: Path, lists: Path, *, new_key: bool
) -> list[tuple[str, str]]:
    """Write the list of a party's people; where all lists are there, also what they are agreed on by."""
    from quietgrad.federation import matching, network
    from quietgrad.objectives.person_ids import first_seen

    if name not in file.parties:
        raise DataError(f"{name!r} is not a party of this plan: {', '.join(file.parties)}.")
    table = network.records(file, data)
    if table.person is None:
        raise DataError('the plan names no column of people: add [data] person = "COLUMN".')
    secret = matching.new_key(key) if new_key else matching.read_key(key)
    mine = matching.write_list(lists, matching.PeopleList.of(name, table.person, secret), secret)
    rows = [("people key", f"{key}: for the parties alone, never for the coordinator")] if new_key else []
    rows += [("list of people", f"{mine}: send it to the other parties, not by way of the coordinator")]
    absent = [other for other in file.parties if not (lists / f"{other}{matching.SUFFIX}").exists()]
    if absent:
        return [
            *rows,
            ("still missing", f"the lists of {', '.join(absent)}; put them into {lists}, give this again"),
        ]
    both = matching.Matching.read(secret, lists, file.parties)
    kept = both.kept(name, network.held(table))
    return [
        *rows,
        ("[federation]", f'matched = "{both.digest}"'),
        (
            f"[[party]] {name}",
            f"records = {first_seen(kept.person)[1]} (under add-remove, rounded), of "
            f"{first_seen(table.person)[1]} people known here",
        ),
    ]


def simulated(
    spec: RunSpec, out: Path, m: int, split: Mapping[str, Any], federation: Mapping[str, Any], *, quiet: bool
) -> Result:
    """Deal a table to ``m`` parties and train; each party has its own ledger below ``out``."""
    from quietgrad.cli.runs import objective_from
    from quietgrad.cli.train import _check_folder, finish
    from quietgrad.federation import deal
    from quietgrad.federation.network import report_rounds
    from quietgrad.federation.simulation import simulate

    data = spec.load_data()
    method = spec.make_algorithm(data)
    _check_folder(out, overwrite=False)
    with usage():
        loss = objective_from(spec.describe_objective(data))
        people = deal(data.X, data.y, m, **split)
    homes = [out / "parties" / f"party-{i + 1}" for i in range(m)]
    if not spec.non_private:
        people = [
            dataclasses.replace(p, ledger=home / "ledger.jsonl") for p, home in zip(people, homes, strict=True)
        ]
        for home in homes:
            home.mkdir(parents=True, exist_ok=True)
    spec.save(out)  # tells `predict` how the data were read
    progress = report_rounds(teller("simulation", quiet))
    saved: list[Result] = []
    simulate(
        method, loss, people, budget=spec.budget(), ledger=spec.ledger_in(out), folder=out, callback=progress,
        keep=lambda result: saved.append(finish(spec, out, data, result)), **federation,
    )  # fmt: skip
    return saved[0]


def is_nvflare(engine: str) -> bool:
    """Whether FLARE carries the messages; refuses an engine that does not exist or is not installed."""
    if engine not in ("tls", "nvflare"):
        raise typer.BadParameter(f"{engine!r}: must be tls or nvflare.", param_hint="--engine")
    from importlib.util import find_spec

    if engine == "nvflare" and find_spec("nvflare") is None:
        raise DataError("NVIDIA FLARE is not installed: pip install 'quietgrad[federated]'.")
    return engine == "nvflare"


def coordinate(
    file: PlanFile,
    credentials: Credentials,
    out: Path,
    *,
    wait: float,
    ledger: Path | None,
    account: str,
    cap: Budget | None,
    tell: Tell,
) -> Result:
    """Wait for everybody, train, hand out the model; say goodbye with the reason if it fails."""
    from quietgrad.federation import network
    from quietgrad.federation.aggregate_store import has_ended
    from quietgrad.federation.coordinator import AGGREGATES
    from quietgrad.federation.transport.tls import TlsServer

    network.check_coordinator(credentials)
    over = network.finished(file, out) is not None
    everyone = [name for name in file.members if name != credentials.name]
    try:
        transport = TlsServer(
            credentials, (file.host, file.port), everyone,
            agreement=file.digest, most=network.largest_frame(file), grace=file.grace, tell=tell,
        )  # fmt: skip
    except OSError as error:
        raise DataError(cannot_listen(file.host, file.port, error)) from None
    out.mkdir(parents=True, exist_ok=True)
    tell(f"plan {network.spoken(file.digest)}, listening on {file.host}:{transport.port} for {', '.join(everyone)}")
    if over:
        tell(f"{out} holds the finished run of this plan: its model is handed out, and nobody is asked anything")
    elif (out / AGGREGATES).exists():
        tell(f"continuing the interrupted run in {out}")
    if file.budget is None:
        tell(NOT_PRIVATE)
    try:
        absent = transport.wait_for_all(wait)
        needed = not (over or has_ended(out / AGGREGATES))
        few = len(file.parties) - sum(name in absent for name in file.parties) < file.plan.quorum
        if needed and (few or absent.keys() & set(file.plan.servers)):
            why = "; ".join(f"{name} ({reason})" for name, reason in absent.items())
            raise DataError(f"not enough members came within {wait:g} s: {why}; nothing was asked.")
        result = network.coordinate(
            file, credentials, transport, folder=out, account=account, cap=cap,
            tell=tell,
            ledger=None if file.budget is None else out / "ledger.jsonl" if ledger is None else ledger,
        )  # fmt: skip
        transport.finish("the run is complete", network.parting(result))
    except QuietgradError as error:
        transport.finish(f"aborted: {error}")
        raise
    finally:
        transport.close()
    tell(f"digest of the model, the same at everybody: {network.spoken(network.model_digest(out))}")
    for row in transport.attendance():
        tell(f"{row.name}: {row.answered} answers, {row.missed} missed, {row.mean_seconds:.3f} s on average")
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


def serve_sums(file: PlanFile, credentials: Credentials, tell: Tell, *, patience: float) -> None:
    """Be a server of a secure sum until the run is over."""
    from quietgrad.federation import network

    tell(f"plan {file.digest[:16]}…; calling {file.host}:{file.port}")
    farewell = _member(file, credentials, network.server(file, credentials).handle, tell, patience).run()
    tell(farewell.words)
    if not len(farewell.parting):
        raise typer.Exit(1)


def take_part(
    file: PlanFile,
    credentials: Credentials,
    data: Path,
    out: Path,
    tell: Tell,
    *,
    ledger: Path,
    account: str,
    cap: Budget | None,
    patience: float,
    people_key: Path | None = None,
    people_lists: Path | None = None,
) -> dict[str, Any]:
    """Be a party until the run is over; save the model that comes out."""
    from quietgrad.federation import network
    from quietgrad.federation.matching import read_matching

    if credentials.name not in file.parties:
        raise DataError(f"{credentials.folder}: {credentials.name!r} is not a party of this plan.")
    table = network.records(file, data)
    said = file.sizes[file.parties.index(credentials.name)]
    columns = f"; columns in this order: {', '.join(table.feature_names)}" if table.feature_names else ""
    found = f"{len(table.y)} records"
    if table.person is not None:
        from quietgrad.objectives.person_ids import first_seen

        found = f"{first_seen(table.person)[1]} people, {found}"
    tell(f"{data}: {found} (the plan says {said}){columns}")
    if file.budget is None:
        tell(NOT_PRIVATE)
    kept = None if file.budget is None else ledger
    party = network.party(
        file, credentials, network.held(table), folder=out, ledger=kept, account=account, cap=cap,
        matching=read_matching(people_key, people_lists, file.parties),
    )  # fmt: skip
    if file.plan.matched:
        tell(f"{len(party.records)} people are kept here; others that are known here are kept by another party")
    tell_state(out, credentials.name, tell)
    tell(f"approved one run of plan {network.spoken(file.digest)}; calling {file.host}:{file.port}")
    member = _member(file, credentials, party.handle, tell, patience)
    try:
        farewell = member.run()
        if not network.save_parting(farewell.parting, file, out, party):
            raise QuietgradError(f"the coordinator ended the run: {farewell.words.rstrip('.')}.")
        party.discard()
    except QuietgradError as error:
        free = party.withdraw()
        tell("nothing was asked, so nothing is charged" if free else "what the plan costs stays charged")
        raise error from None
    finally:
        party.close()
    facts = {
        "words": farewell.words, "messages answered": member.answered, "model": str(out / "model.safetensors"),
        "model digest": network.spoken(network.model_digest(out)), "plan digest": network.spoken(file.digest),
    }  # fmt: skip
    if file.budget is None:
        return {**facts, "privacy": NOT_PRIVATE, "ledger": "none: this plan has no noise"}
    return {**facts, "ledger": str(ledger)}


def remember_reading(file: PlanFile, out: Path) -> None:
    """Leave what `quietgrad predict` needs to read other files like the parties'."""
    from quietgrad.cli.runs import RunSpec

    RunSpec(reading={k: v for k, v in file.reading.items() if k != "n_features"}).save(out)


def _member(file: PlanFile, credentials: Credentials, handler: Any, tell: Tell, patience: float) -> Any:
    from quietgrad.federation import network
    from quietgrad.federation.transport.tls_party import TlsParty

    return TlsParty(
        credentials, (file.host, file.port), _counted(handler, tell),
        agreement=file.digest, most=network.largest_frame(file), timeout=file.timeout, patience=patience,
        greeting=file.grace, tell=tell,
    )  # fmt: skip


def _counted(handler: Any, tell: Tell) -> Any:
    """The handler, with a line of progress now and then."""
    count, next_line = 0, time.monotonic() + _EVERY

    def handle(message: Any) -> Any:
        nonlocal count, next_line
        reply = handler(message)
        count += 1
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + _EVERY
            tell(f"{count} message{'' if count == 1 else 's'} answered")
        return reply

    return handle
