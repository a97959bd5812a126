"""`quietgrad federate`: many parties, in one process for a rehearsal or as real institutions over TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from quietgrad.cli.federate_roles import (
    approval,
    coordinate,
    member_logger,
    simulated,
    take_part,
    threat_rows,
    write_options,
)
from quietgrad.cli.options import Explain, Json, Quiet, answer, say, show_json, show_rows, usage
from quietgrad.cli.run_spec import RunSpec, with_options
from quietgrad.cli.train import show as show_result
from quietgrad.federation import provisioning, revocation
from quietgrad.federation.key_files import passphrase as passphrase_of
from quietgrad.federation.pins import pin_of
from quietgrad.federation.plan_file import CLASSES, PlanFile, read_plan, write_job
from quietgrad.federation.provisioning import Credentials
from quietgrad.federation.revocation import COORDINATOR
from quietgrad.federation.run_status import read_status, status_rows

app = typer.Typer(
    help="Train one model with many parties; no party shows its records to another.",
    no_args_is_help=True,
    add_completion=False,
)

Plan = Annotated[Path, Argument(help="The plan that all members agreed on, a TOML file.", show_default=False)]
Keys = Annotated[Path, Option(help="This member's folder of keys, made by `provision`.", show_default=False)]
Ledger = Annotated[Path | None, Option(help="Ledger file; else ledger.jsonl in the folder.")]
Pin = Annotated[str | None, Option(help="The plan's pin, as `show` prints it; refuse any other plan.")]
Account = Annotated[str, Option(help="Ledger account to charge: a name for the people in the data.")]
CapEpsilon = Annotated[float | None, Option(help="Refuse if the account would exceed this ε.")]
Address = Annotated[str | None, Option(help="HOST:PORT, if not the plan's.")]
Data = Annotated[Path, Option(help="This party's records: LIBSVM, CSV, npz or parquet.")]
Patience = Annotated[float, Option(help="Seconds to wait for absent members before giving up.")]


@app.command(
    epilog="Example: quietgrad federate simulate a9a --parties 5 --algorithm dp-srm --steps 200 --batch-size 500 "
    "--epsilon 1 --out runs/five"
)
@with_options(
    "data", "epsilon", "delta", "relation", "algorithm", "steps", "batch_size", "learning_rate", "clip",
    "gamma", "sampling", "settings", "objective", "regularizer", "row_bound", "rows", "label", "classes", "task",
    "non_private",
)  # fmt: skip
def simulate(
    spec: RunSpec,
    parties: Annotated[int, Option(help="How many parties.")] = 5,
    out: Annotated[Path, Option(help="Folder for the model, result, ledgers and report.")] = Path(
        "runs/federation"
    ),
    trust: Annotated[str, Option(help="curator, secure or local: which sums the coordinator may see.")] = "secure",
    secure: Annotated[
        str | None, Option(help="With trust secure: masks, servers or mpc.", show_default="masks")
    ] = None,
    weights: Annotated[str, Option(help="size (every record the same) or equal (every party).")] = "size",
    unevenness: Annotated[float, Option(help="Largest party ÷ smallest party.")] = 1.0,
    dirichlet: Annotated[float | None, Option(help="Skew the parties' labels: α of a Dirichlet.")] = None,
    quorum: Annotated[
        int | None, Option(help="Smallest number of parties that completes a round; else all.")
    ] = None,
    colluders: Annotated[int, Option(help="masks: parties that may work with the coordinator.")] = 1,
    spare: Annotated[int, Option(help="Rounds reserved in the budget to replace lost ones.")] = 0,
    quiet: Quiet = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Rehearse a federation in this process: real plan, real messages, real secure sums, no network."""
    spec.budget()
    if trust == "secure" and secure is None:
        secure = "masks"
    result = simulated(
        spec, out, parties, unevenness=unevenness, dirichlet=dirichlet, quiet=quiet or as_json, trust=trust,
        secure=secure, weights=weights, quorum=quorum, colluders=colluders, spare=spare,
    )  # fmt: skip
    show_result(result, out, as_json=as_json, explain=explain)


@app.command(
    epilog="Example: quietgrad federate provision plan.toml --out keys   ·   "
    "quietgrad federate provision plan.toml --request hospital-1 --out my-keys"
)
def provision(
    plan: Plan,
    out: Annotated[Path, Option(help="Folder for the keys; new or empty.")] = Path("keys"),
    request: Annotated[str | None, Option(help="Make only this member's own keys, and a request to send.")] = None,
    requests: Annotated[
        list[Path] | None, Option("--with", help="Requests that members sent; may be repeated.")
    ] = None,
    passphrase: Annotated[
        bool,
        Option(
            "--passphrase", help="Encrypt the keys with a passphrase, from QUIETGRAD_PASSPHRASE_FILE or asked for."
        ),
    ] = False,
    days: Annotated[int, Option(help="How long the certificates made here are valid.")] = provisioning.DAYS,
    keep_authority_key: Annotated[
        bool,
        Option("--keep-authority-key", help="Keep the key that signs certificates; it is forgotten otherwise."),
    ] = False,
    certificate: Annotated[
        Path | None, Option(help="With --request: the certificate that your institution's authority issued (PEM).")
    ] = None,
    authority: Annotated[
        Path | None, Option(help="With --certificate: that authority's certificate (PEM).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the certificates and identities of all members, or this member's own keys."""
    file = read_plan(plan)
    if (certificate is None) != (authority is None) or (certificate is not None and request is None):
        raise typer.BadParameter("go together, with --request NAME.", param_hint="--certificate, --authority")
    if request is not None and request not in file.members:
        raise typer.BadParameter(f"{request!r} is not one of {', '.join(file.members)}.", param_hint="--request")
    if request is not None and certificate is not None and authority is not None:
        written = [provisioning.certify(request, out, certificate, authority)]
        advice = f"send {written[0]} to the organiser: it carries your authority's certificate."
    elif request is not None:
        secret = passphrase_of(request, new=True) if passphrase else None
        written = [provisioning.request(request, out, secret=secret)]
        advice = (
            f"send {written[0]} to the organiser; the answer goes into {out}. If your institution's own "
            f"authority is to sign, give it {request}.csr.pem first, and this command with --certificate "
            "and --authority.\nkey.pem and identity.key are secret."
        )
    else:
        written, advice = _provisioned(file, out, requests or [], passphrase, days, keep_authority_key)
    summary = {"made": [str(path) for path in written], "plan": file.digest}
    answer(as_json, summary, advice, table=(f"keys of {file.name}", [(path.name, str(path)) for path in written]))


def _provisioned(
    file: PlanFile, out: Path, requests: list[Path], passphrase: bool, days: int, keep: bool
) -> tuple[list[Path], str]:
    """Make all folders, and say what is to be done with them."""
    sent: dict[str, Path] = {}
    for path in requests:
        if (name := provisioning.asker(path)) in sent:
            raise typer.BadParameter(f"{sent[name]} and {path} are both of {name!r}.", param_hint="--with")
        sent[name] = path
    secret = passphrase_of(file.name, new=True) if passphrase else None
    written = provisioning.provision(file.members, out, sent, days=days, secret=secret, keep_authority=keep)
    without_request = [name for name in file.members if name not in sent]
    lines = [f"send back to {', '.join(sent)}: ca.pem, cert.pem, member.json."] if sent else []
    if without_request:
        lines.append(
            f"made here, secret keys included, for {', '.join(without_request)}: "
            "hand each folder to its member over a safe channel, and remove it here."
        )
    if without_request and secret is not None:
        lines.append("tell them the passphrase over another channel.")
    lines.append(f"certificates made here are valid for {days} days.")
    if keep:
        key = out / "authority" / "ca.key"
        lines.append(f"{key} can make certificates of any member that it signs for: lock it away.")
    return written, "\n".join(lines)


@app.command(epilog="Example: quietgrad federate show plan.toml --keys my-keys")
def show(
    plan: Plan,
    keys: Annotated[Path | None, Option(help="A member's keys: prints the identities of all members too.")] = None,
    as_json: Json = False,
) -> None:
    """Show a plan: its queries, its cost, the adversary, and its digest."""
    file = read_plan(plan)
    credentials = None if keys is None else Credentials.read(keys)
    threats = threat_rows(file.plan)
    if as_json:
        show_json({"digest": file.digest, "pin": pin_of(file),
                   "epsilon": file.plan.epsilon() if file.budget else None,
                   "identities": credentials.fingerprint if credentials else None,
                   "identities_pin": credentials.readable if credentials else None,
                   "network": None if file.network is None else dict(file.network.rows()),
                   "module_text": None if file.network is None else file.network.text,
                   "plan": file.plan.to_json(), "threats": dict(threats)})  # fmt: skip
        return
    say(file.plan.explain())
    say("")
    show_rows(f"{file.name}: {len(file.parties)} parties", threats)
    if file.network is not None:  # its text is shown, and no line of it is run
        say(f"--- {file.network.file}, whole ---")
        say(file.network.text)
        show_rows("the network", file.network.rows())
    say(f"digest of this plan, the same at all members: {file.digest}")
    say(f"its pin, to compare by telephone: {pin_of(file)}")
    if credentials is not None:
        show_rows("identities", [(name, key.hex()) for name, key in credentials.publics.items()])
        say(f"digest of these identities, the same at all members: {credentials.fingerprint}")
        say(f"to compare by telephone: {credentials.readable}")


@app.command(epilog="Example: quietgrad federate revoke hospital-2 --keys keys/coordinator --reason 'keys stolen'")
def revoke(
    name: Annotated[str, Argument(help="The member that is no longer trusted.", show_default=False)],
    keys: Keys,
    reason: Annotated[str, Option(help="Why; it is shown when the member is refused.")] = "no reason given",
    as_json: Json = False,
) -> None:
    """Trust a member no longer: a coordinator turns it away and tells all, others refuse plans that list it."""
    credentials = Credentials.read(keys)
    if name not in credentials.publics or name == credentials.name:
        others = ", ".join(each for each in credentials.publics if each != credentials.name)
        raise typer.BadParameter(f"{name!r}: must be another member of these keys: {others}.")
    known = revocation.revoke(keys, name, reason)
    advice = "tell the other members: each revokes for itself. To readmit a member, provision again."
    if credentials.name == COORDINATOR:
        advice = "every member gets this list, signed, with the next keys. To readmit a member, provision again."
    answer(as_json, known, advice, table=(f"revoked for {credentials.name}", list(known.items())))


@app.command(epilog="Example: quietgrad federate server plan.toml --keys keys/coordinator --out runs/model")
def server(
    plan: Plan,
    keys: Keys,
    out: Annotated[Path, Option(help="Folder for the model, result and ledger.")] = Path("runs/federation"),
    wait: Annotated[float, Option(help="Seconds to wait for all parties at the beginning.")] = 600.0,
    patience: Patience = 7200.0,
    address: Address = None,
    ledger: Ledger = None,
    account: Account = "default",
    cap_epsilon: CapEpsilon = None,
    pin: Pin = None,
    quiet: Quiet = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Coordinate a federation, or continue one that was interrupted; with a server's keys, add up its shares."""
    mine = approval(
        plan, keys, out, pin=pin, address=address, ledger=ledger, account=account, cap_epsilon=cap_epsilon
    )
    tell = member_logger(mine.credentials.name, quiet or as_json)
    if mine.credentials.name in mine.file.plan.servers:
        take_part(mine, tell, patience=patience)
        return
    result = coordinate(mine, wait=wait, patience=patience, tell=tell)
    show_result(result, out, as_json=as_json, explain=explain)


@app.command(
    epilog="Example: quietgrad federate party plan.toml --keys keys/hospital-1 --data h1.npz --out hospital-1"
)
def party(
    plan: Plan,
    keys: Keys,
    data: Data,
    out: Annotated[Path, Option(help="Folder for this party's ledger, journal and model.")] = Path("party"),
    listen: Annotated[
        Path | None, Option(help="Wait behind this socket for an engine's app, instead of calling.")
    ] = None,
    patience: Patience = 7200.0,
    address: Address = None,
    ledger: Ledger = None,
    account: Account = "default",
    cap_epsilon: CapEpsilon = None,
    pin: Pin = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Take part with this site's records: answer what the approved plan allows, and refuse everything else."""
    mine = approval(
        plan, keys, out, pin=pin, address=address, data=data, ledger=ledger, account=account,
        cap_epsilon=cap_epsilon,
    )  # fmt: skip
    tell = member_logger(mine.credentials.name, quiet or as_json)
    if cap_epsilon is not None and ledger is None:
        tell(f"the cap counts what {out / 'ledger.jsonl'} holds; share one --ledger FILE among all runs")
    facts = take_part(mine, tell, patience=patience, listen=listen)
    rows = [(key, str(value)) for key, value in facts.items() if key != "words"]
    answer(as_json, facts, table=(f"{mine.credentials.name}: {facts['words']}", rows))


@app.command(
    epilog="Example: quietgrad federate approve plan.toml --pin 'ε=1.0 δ=1e-05 n=456 "
    "0123 4567 89ab cdef 0123 4567 89ab cdef' --keys my-keys --data h1.csv --out /srv/quietgrad "
    "--file local/quietgrad.json"
)
def approve(
    plan: Plan,
    keys: Keys,
    pin: Annotated[str, Option(help="The plan's pin, as all members compared it.", show_default=False)],
    out: Annotated[Path, Option(help="Folder for this member's ledger, journal and model.")] = Path("party"),
    data: Annotated[Path | None, Option(help="A party's records; servers have none.")] = None,
    file: Annotated[Path, Option(help="The approval; FLARE looks for it in the site's local folder.")] = Path(
        "quietgrad.json"
    ),
    ledger: Ledger = None,
    account: Account = "default",
    cap_epsilon: CapEpsilon = None,
    as_json: Json = False,
) -> None:
    """Approve one plan for an engine that already runs here; the approval is a local file that is never sent."""
    mine = approval(
        plan, keys, out, pin=pin, data=data, ledger=ledger, account=account, cap_epsilon=cap_epsilon,
    )  # fmt: skip
    if mine.credentials.name != "coordinator":
        mine.member().close()  # errors in keys, records or cap are raised here
    if mine.credentials.name not in mine.file.plan.servers:
        write_options(mine)
    mine.write(file)
    rows = [("approval", str(file)), ("plan digest", mine.digest), ("folder", mine.out)]
    answer(as_json, dict(rows), table=(f"{mine.credentials.name} approved {mine.file.name}", rows))


@app.command(epilog="Example: quietgrad federate job plan.toml --engine flare --out job")
def job(
    plan: Plan,
    engine: Annotated[str, Option(help="flare or flower.", show_default=False)],
    out: Annotated[Path, Option(help="Folder for the job; new or empty.")] = Path("job"),
    as_json: Json = False,
) -> None:
    """Write the job to submit to an existing FLARE or Flower; it contains no secrets."""
    with usage():
        written = write_job(read_plan(plan), engine, out)
    advice = f"every site allows the classes {' and '.join(CLASSES)}; then: nvflare job submit -j {out}"
    if engine != "flare":
        advice = f"every party runs `quietgrad federate party --listen SOCKET`; then: flwr run {out}"
    rows = [(path.name, str(path)) for path in written]
    answer(as_json, {"made": [path for _, path in rows]}, advice, table=(f"a job for {engine}", rows))


@app.command(epilog="Example: quietgrad federate status runs/model")
def status(
    folder: Annotated[Path, Argument(help="A member's --out folder.", show_default=False)], as_json: Json = False
) -> None:
    """Say where a run is, for every role: rounds, cost, the certificate's end, absent members, revoked members."""
    facts = read_status(folder)
    answer(as_json, facts, table=(f"{facts['member']}", status_rows(facts)))
