"""Who does what in a real federation, on any transport: the coordinator's run, a party's and a server's answers.

The coordinator trains and hands the model to everybody at the end; a party checks that the plan proves its promise,
then answers from its records; a server of a secure sum adds up shares it cannot read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quietgrad.curators.transcript import LockedAppendFile
from quietgrad.errors import DataError
from quietgrad.federation.coordinator import AGGREGATES, FederatedCurator
from quietgrad.federation.exchange import Exchange
from quietgrad.federation.journal import forget
from quietgrad.federation.matching import Matching
from quietgrad.federation.members import SumMember
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.provision import COORDINATOR, Credentials
from quietgrad.federation.rounds import largest_reply
from quietgrad.federation.simulation import train
from quietgrad.federation.toml_plan import PlanFile
from quietgrad.federation.transport import Bytes
from quietgrad.federation.wire import Message, WireError, decode, encode
from quietgrad.files import parse_json, read_bytes, write_atomically
from quietgrad.objectives.person_ids import factorize_ids
from quietgrad.objectives.privacy_units import RecordsWithIds
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.ledger import Ledger
from quietgrad.secure.faults import ProtocolError
from quietgrad.secure.identity import Roster
from quietgrad.training.callbacks import Callback
from quietgrad.training.result import Result, load

if TYPE_CHECKING:
    from quietgrad.data import Dataset


def largest_frame(file: PlanFile) -> int:
    """The most bytes that anybody may send in one message of this plan."""
    return largest_reply(file.plan)


def coordinate(
    file: PlanFile,
    credentials: Credentials,
    exchange: Exchange,
    *,
    folder: Path,
    ledger: str | Path | None = None,
    account: str = "default",
    cap: Budget | None = None,
    tell: Callable[[str], None] = lambda words: None,
    callback: Callback | None = None,
    wait: float | None = None,
) -> Result:
    """Train through ``exchange``, or continue the interrupted run in ``folder``, and save the model there.

    ``tell`` is told in words of every round that went wrong; ``wait`` is for how many seconds everybody is waited
    for at the beginning, once a quorum is there.
    """
    curator = FederatedCurator(
        file.objective, exchange, ledger=ledger, account=account, cap=cap,
        identity=credentials.identity, roster=_roster(file, credentials), folder=folder, tell=tell,
    )  # fmt: skip

    def named(result: Result) -> Result:
        details = {**result.details, "model": dict(file.model), "federation": file.name, "plan_file": file.digest}
        return replace(result, details=details, data={"name": file.name, "notes": []})

    return named(
        train(
            file.algorithm, curator, file.plan, file.objective.initial(file.plan.shape), account=account,
            callback=callback, keep=lambda result: named(result).save(folder), wait=wait,
        )
    )  # fmt: skip


def finished(file: PlanFile, folder: Path) -> Result | None:
    """The result of this plan that ``folder`` holds, if it does: a coordinator that restarts only hands it out."""
    if not (folder / "result.json").exists():
        return None
    result = load(folder)
    if result.details.get("plan_file") != file.digest:
        raise DataError(f"{folder}: holds a finished run of another plan; choose another --out.")
    if (folder / AGGREGATES).exists():  # killed after saving
        LockedAppendFile(folder / AGGREGATES, "coordinates this run").remove()
    return result


def check_coordinator(credentials: Credentials) -> None:
    """Refuse to coordinate with the keys of somebody else."""
    if credentials.name != COORDINATOR:
        raise DataError(f"{credentials.folder}: are the keys of {credentials.name!r}, not the coordinator's.")


def party(
    file: PlanFile,
    credentials: Credentials,
    data: Any,
    *,
    folder: Path,
    ledger: str | Path | None = None,
    account: str = "default",
    cap: Budget | None = None,
    matching: Matching | None = None,
) -> PartyCurator:
    """Approve one run of the plan, which answers for a party; the one that ``folder`` has begun, if it has.

    Refuses here if the plan does not prove its promise or the data do not fit it. Without a cap, here or in the
    ledger, the account may spend what the plan costs and no more.
    """
    if (folder / "result.json").exists():
        forget(folder, credentials.name)  # killed after it had saved the model
        raise DataError(f"{folder}: holds a finished run; choose another --out to approve another one.")
    if file.budget is not None:
        file.plan.proves()
    member = PartyCurator(
        credentials.name, file.objective, data, file.plan, ledger=ledger, account=account,
        cap=cap or default_cap(file, ledger, account), identity=credentials.identity,
        roster=_roster(file, credentials), folder=folder, matching=matching,
    )  # fmt: skip
    try:
        member.check_cap()  # now, and not when the others have paid already
    except BaseException:
        member.close()
        raise
    return member


def default_cap(file: PlanFile, ledger: str | Path | None, account: str) -> Budget | None:
    """The ε that the plan promises, unless whoever keeps the ledger has set a cap there."""
    if file.budget is None or ledger is None or Ledger(ledger).cap(account) is not None:
        return None
    return file.budget


def server(file: PlanFile, credentials: Credentials) -> SumMember:
    """What answers for a server of a secure sum."""
    if credentials.name not in file.plan.servers:
        servers = ", ".join(file.plan.servers) or "none"
        raise DataError(f"{credentials.name!r} is not a server of this plan; its servers are: {servers}.")
    roster = _roster(file, credentials)
    assert roster is not None  # a plan with servers has secure sums
    return SumMember(file.plan, credentials.identity, roster)


def parting(result: Result) -> bytearray:
    """The model and its statement, for everybody who took part; both are released already."""
    text = np.frombuffer(json.dumps(result.to_json()).encode(), np.uint8)
    return encode(Message("model", {}, {"params": np.asarray(result.params, np.float64), "result": text}))


def save_parting(data: Bytes, file: PlanFile, folder: Path, party: object = None) -> bool:
    """Write the model that the coordinator handed out; ``False`` if it handed out none.

    What the coordinator states about privacy must follow from the plan that was approved here and, where
    ``party`` is given, from what this party answered.
    """
    if not len(data):
        return False
    from safetensors.numpy import save as to_bytes

    try:
        message = decode(data, most=largest_frame(file))
        statement = parse_json(message.blob("result"))
        params = message.arrays["params"]
        if not isinstance(statement, Mapping) or params.shape != (file.plan.shape.dim,):
            raise WireError("not the model of this plan")
    except (WireError, ValueError, KeyError) as error:
        raise ProtocolError(COORDINATOR, f"handed out something that is not a model ({error})") from None
    if not np.isfinite(params).all():
        raise ProtocolError(COORDINATOR, "handed out a model with numbers that are not finite")
    problem = _unlike_the_plan(statement, file, party.answered() if isinstance(party, PartyCurator) else {})
    if problem is not None:
        raise ProtocolError(COORDINATOR, f"handed out a statement that this plan refutes: {problem}")
    folder.mkdir(parents=True, exist_ok=True)
    statement = {**statement, "details": {**statement["details"], "said_by": COORDINATOR}}
    write_atomically(folder / "model.safetensors", to_bytes({"params": params}))
    write_atomically(folder / "result.json", (json.dumps(statement, indent=2) + "\n").encode())
    return True


def _unlike_the_plan(statement: Mapping[str, Any], file: PlanFile, answered: Mapping[str, int]) -> str | None:
    """Why a statement is not one that a run of this plan can end with."""
    from quietgrad.training.result import Privacy, contradiction

    try:
        said = Privacy.from_json(statement["privacy"])
        dict(statement["details"])
        releases = {str(slot): int(made) for slot, made in said.releases.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it has no readable statement of privacy ({type(error).__name__})"
    plan = file.plan
    if statement.get("algorithm") != plan.algorithm or statement["details"].get("plan_file") != file.digest:
        return "it is of another algorithm or plan"
    if any(releases.get(slot, 0) < made for slot, made in answered.items()):
        return "it lists fewer releases than were answered here"
    allowed = {slot.name: plan.limit(slot.name) for slot in plan.schedule.slots}
    if any(made > allowed.get(slot, 0) for slot, made in releases.items()):
        return "it lists more releases than the plan allows"
    if file.budget is None:
        private = said.is_private or said.epsilon is not None
        return "it is called private, and the plan adds no noise" if private else None
    if said.epsilon is None:
        return "it states no ε"
    if said.delta != file.budget.delta or said.relation is not file.budget.relation:
        return f"δ = {said.delta} under {said.relation} is not what was agreed"
    # Whenever a run stops, all of its plan is spent: spare rounds and what an early stop left are not given back.
    if said.events != plan.event or said.noise_multiplier != plan.noise_multiplier:
        return "it lists other releases or other noise than the plan's"
    return contradiction(said)


def model_digest(folder: Path) -> str:
    """SHA-256 of a saved model: the same at the coordinator and at every party, or somebody has another one."""
    return hashlib.sha256(read_bytes(folder / "model.safetensors")).hexdigest()


def spoken(digest: str) -> str:
    """The first 80 bits of a digest in groups that can be read out over the telephone.

    >>> spoken("0123456789abcdef0123456789abcdef")
    '0123 4567 89ab cdef 0123'
    """
    return " ".join(digest[k : k + 4] for k in range(0, 20, 4))


def records(file: PlanFile, path: str | Path) -> Dataset:
    """A party's table, read as the plan says."""
    from quietgrad.data import load as load_table

    data = load_table(path, **file.reading)
    if data.d != file.features:
        raise DataError(f"{path}: has {data.d} features, the plan {file.features}.")
    data.refuse_uncounted(file.budget)
    return data


def held(data: Dataset) -> Any:
    """What a party's curator takes of its table."""
    table = (data.X, data.y)
    return table if data.person is None else RecordsWithIds(table, data.person)


def described(file: PlanFile, name: str, path: str | Path, data: Dataset) -> str:
    """A party's table in words, for the party itself."""
    said = file.sizes[file.parties.index(name)]
    columns = f"; columns in this order: {', '.join(data.feature_names)}" if data.feature_names else ""
    found = f"{len(data.y)} records"
    if data.person is not None:
        found = f"{factorize_ids(data.person)[1]} people, {found}"
    return f"{path}: {found} (the plan says {said}){columns}"


def _roster(file: PlanFile, credentials: Credentials) -> Roster | None:
    if file.plan.trust != "secure":
        return None
    return credentials.roster((*file.plan.names, *(file.plan.servers or (COORDINATOR,))))
