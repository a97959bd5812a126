"""`quietgrad federate`: many parties, in one process for a rehearsal or as real institutions over TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quietgrad.cli.options import Account, CapEpsilon, Explain, Json, say, show_json, show_rows, with_options
from quietgrad.cli.run_spec import RunSpec

app = typer.Typer(
    help="Train one model with many parties; no party shows its records to another.",
    no_args_is_help=True,
    add_completion=False,
)

Plan = Annotated[Path, typer.Argument(help="The plan that all members agreed on, a TOML file.", show_default=False)]
Keys = Annotated[Path, typer.Option(help="This member's folder of keys, made by `provision`.", show_default=False)]
Ledger = Annotated[Path | None, typer.Option(help="Ledger file; else ledger.jsonl in the folder.")]
Pin = Annotated[str | None, typer.Option(help="Digest of the plan that was approved; refuse any other.")]
Address = Annotated[str | None, typer.Option(help="HOST:PORT, if not the plan's.")]
Data = Annotated[Path, typer.Option(help="This party's records: LIBSVM, CSV, npz or parquet.")]
PeopleKey = Annotated[Path | None, typer.Option(help="Matched people: the parties' key.")]
PeopleLists = Annotated[Path | None, typer.Option(help="Matched people: folder of all parties' lists.")]
Patience = Annotated[float, typer.Option(help="Seconds to wait for others who are away before giving up.")]


@app.command(
    epilog="Example: quietgrad federate simulate a9a --parties 5 --algorithm dp-srm --steps 200 --batch-size 500 "
    "--epsilon 1 --out runs/five"
)
@with_options(
    RunSpec, "data", "epsilon", "delta", "relation", "algorithm", "steps", "batch_size", "learning_rate", "clip",
    "gamma", "sampling", "settings", "objective", "regularizer", "row_bound", "rows", "label", "classes", "task",
    "non_private",
)  # fmt: skip
def simulate(
    spec: RunSpec,
    parties: Annotated[int, typer.Option(help="How many parties.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for the model, result, ledgers and report.")] = Path(
        "runs/federation"
    ),
    trust: Annotated[str, typer.Option(help="curator, secure or local: who may see what.")] = "secure",
    secure: Annotated[
        str | None, typer.Option(help="With trust secure: masks, servers or mpc.", show_default="masks")
    ] = None,
    weights: Annotated[str, typer.Option(help="size (every record the same) or equal (every party).")] = "size",
    unevenness: Annotated[float, typer.Option(help="Largest party ÷ smallest party.")] = 1.0,
    dirichlet: Annotated[float | None, typer.Option(help="Skew the parties' labels: α of a Dirichlet.")] = None,
    quorum: Annotated[int | None, typer.Option(help="Fewest parties a round is completed with; else all.")] = None,
    colluders: Annotated[int, typer.Option(help="masks: parties that may work with the coordinator.")] = 1,
    spare: Annotated[int, typer.Option(help="Rounds reserved in the budget to replace lost ones.")] = 0,
    cohort: Annotated[int | None, typer.Option(help="Parties asked in a round, drawn anew; else all.")] = None,
    processes: Annotated[bool, typer.Option("--processes", help="A process for every party.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Rehearse a federation in this process: real plan, real messages, real secure sums, no network."""
    from quietgrad.cli.train import show

    spec.budget()
    from quietgrad.cli.federate_roles import simulated

    if trust == "secure" and secure is None:
        secure = "masks"
    federation: dict[str, Any] = {
        "trust": trust, "secure": secure, "weights": weights, "quorum": quorum,
        "colluders": colluders, "spare": spare, "cohort": cohort, "processes": processes,
    }  # fmt: skip
    split = {"unevenness": unevenness, "dirichlet": dirichlet}
    result = simulated(spec, out, parties, split, federation, quiet=quiet or as_json)
    show(result, out, as_json=as_json, explain=explain)


@app.command(
    epilog="Example: quietgrad federate provision plan.toml --out keys   ·   "
    "quietgrad federate provision plan.toml --request hospital-1 --out my-keys"
)
def provision(
    plan: Plan,
    out: Annotated[Path, typer.Option(help="Folder for the keys; new or empty.")] = Path("keys"),
    request: Annotated[
        str | None, typer.Option(help="Make only this member's own keys, and a request to send.")
    ] = None,
    requests: Annotated[
        list[Path] | None, typer.Option("--with", help="Requests that members sent; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the certificates and identities of all members, or this member's own keys."""
    from quietgrad.cli import federate_roles
    from quietgrad.federation import provisioning as keys
    from quietgrad.federation.plan_file import read_plan

    file = read_plan(plan)
    if request is not None:
        if request not in file.members:
            raise typer.BadParameter(
                f"{request!r} is not one of {', '.join(file.members)}.", param_hint="--request"
            )
        made = [keys.request(request, out)]
        advice = f"send {made[0]} to the organiser; the answer goes into {out}. All else in it is secret."
    else:
        sent: dict[str, Path] = {}
        for path in requests or ():
            if (name := keys.asker(path)) in sent:
                raise typer.BadParameter(f"{sent[name]} and {path} are both of {name!r}.", param_hint="--with")
            sent[name] = path
        made = keys.provision(file.members, out, sent)
        advice = federate_roles.handing_out(file, out, sent)
    if as_json:
        show_json({"made": [str(path) for path in made], "plan": file.digest})
    else:
        show_rows(f"keys of {file.name}", [(path.name, str(path)) for path in made])
        say(advice)


@app.command(epilog="Example: quietgrad federate show plan.toml --keys my-keys")
def show(
    plan: Plan,
    keys: Annotated[
        Path | None, typer.Option(help="A member's keys: prints the identities of all members too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a plan: its queries, its cost, the adversary, and its digest."""
    from quietgrad.cli.federate_roles import threat_rows
    from quietgrad.federation import approved
    from quietgrad.federation.plan_file import read_plan

    file = read_plan(plan)
    credentials = None
    if keys is not None:
        from quietgrad.federation.provisioning import Credentials

        credentials = Credentials.read(keys)
    if as_json:
        show_json({"digest": file.digest, "epsilon": file.plan.epsilon() if file.budget else None,
                   "identities": credentials.fingerprint if credentials else None,
                   "plan": file.plan.to_json(), "threats": dict(threat_rows(file.plan))})  # fmt: skip
        return
    say(file.plan.explain())
    say("")
    show_rows(f"{file.name}: {len(file.parties)} parties", threat_rows(file.plan))
    say(f"digest of this plan, the same at all members: {file.digest}")
    say(f"to compare by telephone: {approved.readable_digest(file.digest)}")
    if credentials is not None:
        rows = [(name, key.hex()) for name, key in credentials.publics.items()]
        show_rows("identities", rows)
        say(f"digest of these identities, the same at all members: {credentials.fingerprint}")


@app.command(epilog="Example: quietgrad federate revoke hospital-2 --keys keys/coordinator --reason 'keys stolen'")
def revoke(
    name: Annotated[str, typer.Argument(help="The member that is no longer trusted.", show_default=False)],
    keys: Keys,
    reason: Annotated[str, typer.Option(help="Why; it is shown when the member is refused.")] = "no reason given",
    as_json: Json = False,
) -> None:
    """Trust a member no longer: a coordinator turns it away at once, others refuse plans that list it."""
    from quietgrad.federation.provisioning import Credentials
    from quietgrad.federation.provisioning import revoke as add

    credentials = Credentials.read(keys)
    if name not in credentials.publics or name == credentials.name:
        others = ", ".join(each for each in credentials.publics if each != credentials.name)
        raise typer.BadParameter(f"{name!r}: must be another member of these keys: {others}.")
    known = add(keys, name, reason)
    if as_json:
        show_json(known)
    else:
        show_rows(f"revoked for {credentials.name}", list(known.items()))
        say("tell the other members: each revokes for itself. To readmit a member, provision again.")


@app.command(
    epilog="Example: quietgrad federate match plan.toml --name hospital-1 --data h1.csv --key people.key --new-key"
)
def match(
    plan: Plan,
    name: Annotated[str, typer.Option(help="This party's name in the plan.", show_default=False)],
    data: Annotated[Path, typer.Option(help="This party's records, with the plan's column of people.")],
    key: Annotated[Path, typer.Option(help="The parties' secret key; the coordinator never sees it.")],
    lists: Annotated[Path, typer.Option(help="Folder of lists: this party's is written, others are read.")] = Path(
        "lists"
    ),
    new_key: Annotated[bool, typer.Option("--new-key", help="Draw the key: at one party, once.")] = False,
    as_json: Json = False,
) -> None:
    """Find, with the other parties, the people that several of them know, by a keyed hash of ids."""
    from quietgrad.cli import federate_roles
    from quietgrad.federation.plan_file import read_plan

    rows = federate_roles.matched(read_plan(plan), name, data, key, lists, new_key=new_key)
    if as_json:
        show_json(dict(rows))
    else:
        show_rows(f"people of {name}, matched", rows)


@app.command("threat-model", epilog="Example: quietgrad federate threat-model plan.toml")
def threat_model(plan: Plan, as_json: Json = False) -> None:
    """Say who must work together to learn what."""
    from quietgrad.cli.federate_roles import threat_rows
    from quietgrad.federation.plan_file import read_plan

    rows = threat_rows(read_plan(plan).plan)
    if as_json:
        show_json(dict(rows))
    else:
        show_rows("who must work together to learn what", rows)


@app.command(epilog="Example: quietgrad federate server plan.toml --keys keys/coordinator --out runs/model")
def server(
    plan: Plan,
    keys: Keys,
    out: Annotated[Path, typer.Option(help="Folder for the model, result and ledger.")] = Path("runs/federation"),
    wait: Annotated[float, typer.Option(help="Seconds to wait for all parties at the beginning.")] = 600.0,
    patience: Patience = 7200.0,
    address: Address = None,
    ledger: Ledger = None,
    account: Account = "default",
    cap_epsilon: CapEpsilon = None,
    pin: Pin = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing until the end.")] = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Coordinate a federation, or continue one that was interrupted; with a server's keys, add up its shares."""
    from quietgrad.cli import federate_roles
    from quietgrad.cli.train import show as show_result

    mine = federate_roles.approval(
        plan, keys, out, pin=pin, address=address, ledger=ledger, account=account, cap_epsilon=cap_epsilon
    )
    tell = federate_roles.member_logger(mine.credentials.name, quiet or as_json)
    if mine.credentials.name in mine.file.plan.servers:
        federate_roles.take_part(mine, tell, patience=patience)
        return
    result = federate_roles.coordinate(mine, wait=wait, patience=patience, tell=tell)
    federate_roles.remember_reading(mine.file, out)
    show_result(result, out, as_json=as_json, explain=explain)


@app.command(
    epilog="Example: quietgrad federate party plan.toml --keys keys/hospital-1 --data h1.npz --out hospital-1"
)
def party(
    plan: Plan,
    keys: Keys,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for this party's ledger, journal and model.")] = Path("party"),
    listen: Annotated[
        Path | None, typer.Option(help="Wait behind this socket for an engine's app, instead of calling.")
    ] = None,
    patience: Patience = 7200.0,
    address: Address = None,
    ledger: Ledger = None,
    account: Account = "default",
    cap_epsilon: CapEpsilon = None,
    pin: Pin = None,
    people_key: PeopleKey = None,
    people_lists: PeopleLists = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing until the end.")] = False,
    as_json: Json = False,
) -> None:
    """Take part with this site's records: answer what the approved plan allows, and refuse everything else."""
    from quietgrad.cli import federate_roles

    mine = federate_roles.approval(
        plan, keys, out, pin=pin, address=address, data=data, ledger=ledger, account=account,
        cap_epsilon=cap_epsilon, people_key=people_key, people_lists=people_lists,
    )  # fmt: skip
    tell = federate_roles.member_logger(mine.credentials.name, quiet or as_json)
    if cap_epsilon is not None and ledger is None:
        tell(f"the cap counts what {out / 'ledger.jsonl'} holds; share one --ledger FILE among all runs")
    facts = federate_roles.take_part(mine, tell, patience=patience, listen=listen)
    federate_roles.remember_reading(mine.file, out)
    if as_json:
        show_json(facts)
    else:
        name = mine.credentials.name
        show_rows(f"{name}: {facts['words']}", [(k, str(v)) for k, v in facts.items() if k != "words"])


@app.command(
    epilog="Example: quietgrad federate approve plan.toml --pin '0123 4567 89ab cdef' --keys my-keys --data h1.csv "
    "--out /srv/quietgrad --file local/quietgrad.json"
)
def approve(
    plan: Plan,
    keys: Keys,
    pin: Annotated[str, typer.Option(help="Digest of the plan, as all members compared it.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for this member's ledger, journal and model.")] = Path("party"),
    data: Annotated[Path | None, typer.Option(help="A party's records; servers have none.")] = None,
    file: Annotated[Path, typer.Option(help="The approval; FLARE looks for it in the site's local folder.")] = Path(
        "quietgrad.json"
    ),
    ledger: Ledger = None,
    account: Account = "default",
    cap_epsilon: CapEpsilon = None,
    people_key: PeopleKey = None,
    people_lists: PeopleLists = None,
    as_json: Json = False,
) -> None:
    """Approve one plan for an engine that already runs here; the approval is a local file that is never sent."""
    from quietgrad.cli import federate_roles

    mine = federate_roles.approval(
        plan, keys, out, pin=pin, data=data, ledger=ledger, account=account, cap_epsilon=cap_epsilon,
        people_key=people_key, people_lists=people_lists,
    )  # fmt: skip
    if mine.credentials.name != "coordinator":
        mine.member().close()  # whatever is wrong with keys, records or cap is told here
    mine.write(file)
    rows = [("approval", str(file)), ("plan digest", mine.digest), ("folder", mine.out)]
    if as_json:
        show_json(dict(rows))
    else:
        show_rows(f"{mine.credentials.name} approved {mine.file.name}", rows)


@app.command(epilog="Example: quietgrad federate job plan.toml --engine flare --out job")
def job(
    plan: Plan,
    engine: Annotated[str, typer.Option(help="flare or flower.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the job; new or empty.")] = Path("job"),
    as_json: Json = False,
) -> None:
    """Write the job to submit to an existing FLARE or Flower; it contains no secrets."""
    from quietgrad.cli.options import usage
    from quietgrad.federation.jobs import CLASSES, write_job
    from quietgrad.federation.plan_file import read_plan

    with usage():
        made = write_job(read_plan(plan), engine, out)
    if as_json:
        show_json({"made": [str(path) for path in made]})
        return
    show_rows(f"a job for {engine}", [(path.name, str(path)) for path in made])
    if engine == "flare":
        say(f"every site allows the classes {' and '.join(CLASSES)}; then: nvflare job submit -j {out}")
    else:
        say(f"every party runs `quietgrad federate party --listen SOCKET`; then: flwr run {out}")


@app.command(epilog="Example: quietgrad federate status runs/model")
def status(
    folder: Annotated[Path, typer.Argument(help="A member's --out folder.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Say where a run is: rounds, what is spent, how it ended. For the coordinator, parties and servers alike."""
    from quietgrad.federation.approved import read_status

    facts = read_status(folder)
    if as_json:
        show_json(facts)
    else:
        shown = ("federation", "line", "words", "time")
        show_rows(f"{facts['member']}", [(name.replace("line", "rounds"), str(facts[name])) for name in shown])
