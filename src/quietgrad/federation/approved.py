"""One member's approval of one plan, and what it makes of it: a party, a server of secure sums, or the coordinator.

``quietgrad federate approve`` writes an approval to a file of the member's own; the other commands make it of their
options. It holds the plan's text, so editing the plan file afterwards changes nothing. Every transport starts here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quietgrad.curators.transcript import LockedAppendFile
from quietgrad.errors import BudgetError, DataError, QuietgradError
from quietgrad.federation.coordinator import AGGREGATES, FederatedCurator
from quietgrad.federation.exchange import PATIENCE, Exchange, Site
from quietgrad.federation.journal import forget
from quietgrad.federation.matching import RecordLinkage, read_matching
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan_file import PlanFile, address_of, parse_plan
from quietgrad.federation.provisioning import COORDINATOR, Credentials, check_none_revoked, revoked
from quietgrad.federation.rounds import largest_reply
from quietgrad.federation.secure_roles import SumMember
from quietgrad.federation.simulation import train
from quietgrad.federation.status import RunStatus
from quietgrad.federation.transport import Bytes, Transport
from quietgrad.federation.wire import Message, WireError, decode, encode
from quietgrad.files import parse_json, read_bytes, read_json, write_atomically
from quietgrad.objectives.person_ids import factorize_ids
from quietgrad.objectives.privacy_units import RecordsWithIds
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.ledger import Ledger
from quietgrad.secure.identity import ProtocolError, Roster
from quietgrad.training.callbacks import Callback
from quietgrad.training.result import Result, load

if TYPE_CHECKING:
    from quietgrad.data import Dataset


FILE = "quietgrad.json"
_DELIVERED = "delivered.json"
_FORMAT = 1
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Approved:
    """One member's approval of one plan.

    Args:
        plan: the text of the plan file.
        digest: the plan's, as it was approved.
        keys: the member's folder of keys.
        out: its folder for ledger, journal and model.
        data: a party's records.
        ledger, account, cap_epsilon: where the cost is charged, and the most that may be spent.
        people_key, people_lists: of matched people.
        address: where the coordinator is called, or listens, if not at the plan's address.
    """

    plan: str
    digest: str
    keys: str
    out: str
    data: str | None = None
    ledger: str | None = None
    account: str = "default"
    cap_epsilon: float | None = None
    people_key: str | None = None
    people_lists: str | None = None
    address: str | None = None

    def write(self, path: Path) -> None:
        """Write the approval to a file that only its owner may read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"
        write_atomically(path, text.encode(), private=True)

    @classmethod
    def read(cls, path: str | Path) -> Approved:
        """Read an approval."""
        try:
            content = read_json(path)
            if content.pop("format") != _FORMAT or content.keys() != {each.name for each in fields(cls)}:
                raise ValueError
            return cls(**content)
        except FileNotFoundError:
            raise DataError(f"{path}: no such approval; make it with `quietgrad federate approve`.") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{path}: not an approval of this version; approve again.") from None

    @cached_property
    def file(self) -> PlanFile:
        """The plan, which must be the approved one."""
        file = parse_plan(self.plan, "the approved plan")
        if file.digest != self.digest:
            raise BudgetError(f"the approval names plan {self.digest[:16]}… and holds {file.digest[:16]}…")
        if self.address is None:
            return file
        host, port = address_of(self.address)
        return replace(file, host=host, port=port)

    @cached_property
    def credentials(self) -> Credentials:
        """The member's keys; those of a revoked federation are refused."""
        found = Credentials.read(self.keys)
        if found.name not in self.file.members:
            raise DataError(f"{self.keys}: {found.name!r} is not a member of this plan.")
        if found.name != COORDINATOR:  # the coordinator leaves a revoked party out and may do without it
            check_none_revoked(self.keys, self.file.members)
        return found

    @property
    def folder(self) -> Path:
        """The folder for what this member keeps."""
        return Path(self.out)

    @property
    def books(self) -> Path | None:
        """The member's ledger; none for a plan without noise."""
        if self.file.budget is None:
            return None
        return self.folder / "ledger.jsonl" if self.ledger is None else Path(self.ledger)

    @property
    def cap(self) -> Budget | None:
        """The most that the account may spend, at the plan's δ and relation."""
        if self.cap_epsilon is None:
            return None
        if self.file.budget is None:
            raise BudgetError("this plan adds no noise and has no ε: no cap can hold. Leave the cap out.")
        return Budget(self.cap_epsilon, self.file.budget.delta, self.file.budget.relation)

    def check(self) -> None:
        """Raise if something in the approval cannot work, before anything is begun."""
        _ = self.file, self.credentials, self.cap

    def check_coordinator(self) -> None:
        """Raise ``DataError`` unless the keys are the coordinator's."""
        if self.credentials.name != COORDINATOR:
            raise DataError(f"{self.keys}: are the keys of {self.credentials.name!r}, not the coordinator's.")

    def member(self, tell: Tell = lambda words: None) -> PartyCurator | SumMember:
        """Make what answers for this member: a party with its records, or a server of a secure sum.

        ``tell`` hears exact numbers of the party's table: only the party may read it.
        """
        file, keys = self.file, self.credentials
        if keys.name in file.plan.servers:
            roster = _roster(file, keys)
            assert roster is not None  # a plan with servers has secure sums
            return SumMember(file.plan, keys.identity, roster)
        if keys.name not in file.parties or self.data is None:
            raise DataError(f"{self.keys}: {keys.name!r} is no party with records; give --data.")
        table = records(file, self.data)
        tell(described(file, keys.name, self.data, table))
        key, lists = (None if path is None else Path(path) for path in (self.people_key, self.people_lists))
        party = make_party(
            file, keys, party_data(table), folder=self.folder, ledger=self.books,
            account=self.account, cap=self.cap, matching=read_matching(key, lists, file.parties),
        )  # fmt: skip
        if file.plan.matched:
            tell(f"{len(party.records)} people are kept here; others that are known here are kept by another party")
        return party

    def site(self, member: PartyCurator | SumMember, tell: Tell) -> Site:
        """Wrap the member for a transport: it answers, and takes what is handed out at the end."""
        status = RunStatus(self.folder, member.name, self.file, tell)

        def finish(words: str, model: Bytes) -> None:
            try:
                if not len(model):
                    raise QuietgradError(f"the coordinator ended the run: {words.rstrip('.')}.")
                if isinstance(member, PartyCurator):
                    save_model(model, self.file, self.folder, member)
                    member.discard()
            except QuietgradError as error:
                if isinstance(member, PartyCurator):
                    free = member.withdraw()
                    cost = (
                        "nothing was asked, so nothing is charged" if free else "what the plan costs stays charged"
                    )
                    tell(cost)
                status.end(str(error))
                raise
            status.end(words)

        return Site(status.watching(member), self.digest, finish, self.credentials.identity)

    def coordinate(
        self, transport: Transport, tell: Tell, *, wait: float = 600.0, patience: float = PATIENCE
    ) -> Result:
        """Train through ``transport`` and hand out the model, or the reason why there is none.

        Args:
            wait: seconds to wait for all members at the beginning, once a quorum is there.
            patience: seconds to wait for a quorum, whenever there is none.
        """
        file, keys = self.file, self.credentials
        self.check_coordinator()
        exchange = Exchange(
            transport, agreement=self.digest, timeout=file.timeout, grace=file.grace, patience=patience,
            most=largest_reply(file.plan), revoked=lambda: revoked(keys.folder), tell=tell,
        )  # fmt: skip
        status = RunStatus(self.folder, COORDINATOR, file, tell)
        before = finished(file, self.folder)
        try:
            result = before or coordinate(
                file, keys, exchange, folder=self.folder, ledger=self.books, account=self.account,
                cap=self.cap, tell=tell, callback=status.callback, wait=wait,
            )  # fmt: skip
        except QuietgradError as error:
            status.end(f"aborted: {error}")
            exchange.finish(f"aborted: {error}")
            raise
        self._hand_out(exchange, result, tell, wait if before else file.grace)
        status.end("the run is complete")
        return result

    def _hand_out(self, exchange: Exchange, result: Result, tell: Tell, seconds: float) -> None:
        """Give the model to those who have not confirmed it yet, and note who has."""
        path = self.folder / _DELIVERED
        have = set(read_json(path)) if path.exists() else set()
        missing = [name for name in exchange.transport.parties() if name not in have]
        have |= {*exchange.hand_out(missing, "the run is complete", final_message(result), seconds)}
        write_atomically(path, json.dumps(sorted(have)).encode())
        if late := [name for name in missing if name not in have]:
            tell(f"{', '.join(late)} did not confirm the model; when they are back, the same command hands it out")


def coordinate(
    file: PlanFile,
    credentials: Credentials,
    exchange: Exchange,
    *,
    folder: Path,
    ledger: str | Path | None = None,
    account: str = "default",
    cap: Budget | None = None,
    tell: Tell = lambda words: None,
    callback: Callback | None = None,
    wait: float | None = None,
) -> Result:
    """Train through ``exchange``, or continue the interrupted run in ``folder``, and save the model there."""
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
    """Return the result of this plan that ``folder`` holds, if any: a restarted coordinator only hands it out."""
    if not (folder / "result.json").exists():
        return None
    result = load(folder)
    if result.details.get("plan_file") != file.digest:
        raise DataError(f"{folder}: holds a finished run of another plan; choose another --out.")
    if (folder / AGGREGATES).exists():  # killed after saving
        LockedAppendFile(folder / AGGREGATES, "coordinates this run").remove()
    return result


def make_party(
    file: PlanFile,
    credentials: Credentials,
    data: Any,
    *,
    folder: Path,
    ledger: str | Path | None = None,
    account: str = "default",
    cap: Budget | None = None,
    matching: RecordLinkage | None = None,
) -> PartyCurator:
    """Approve one run of the plan for a party, or continue the one that ``folder`` has begun.

    Raises if the plan does not prove its guarantee or the data do not fit it. Without a cap, here or in the
    ledger, the account may spend what the plan costs and no more.
    """
    if (folder / "result.json").exists():
        forget(folder, credentials.name)  # killed after it had saved the model
        raise DataError(f"{folder}: holds a finished run; choose another --out to approve another one.")
    if file.budget is not None:
        file.plan.proves()
    if cap is None and ledger is not None and Ledger(ledger).cap(account) is None:
        cap = file.budget
    member = PartyCurator(
        credentials.name, file.objective, data, file.plan, ledger=ledger, account=account, cap=cap,
        identity=credentials.identity, roster=_roster(file, credentials), folder=folder, matching=matching,
    )  # fmt: skip
    try:
        member.check_cap()  # now, and not when the others have paid already
    except BaseException:
        member.close()
        raise
    return member


def final_message(result: Result) -> bytearray:
    """Encode the model and its statement for all members; both are released already."""
    text = np.frombuffer(json.dumps(result.to_json()).encode(), np.uint8)
    return encode(Message("model", {}, {"params": np.asarray(result.params, np.float64), "result": text}))


def save_model(data: Bytes, file: PlanFile, folder: Path, party: PartyCurator | None = None) -> None:
    """Write the model that the coordinator handed out.

    Its privacy statement must follow from the approved plan and from what ``party`` answered.
    """
    from safetensors.numpy import save as to_bytes

    try:
        message = decode(data, most=largest_reply(file.plan))
        statement = parse_json(message.blob("result"))
        params = message.arrays["params"]
        if not isinstance(statement, Mapping) or params.shape != (file.plan.shape.dim,):
            raise WireError("not the model of this plan")
    except (WireError, ValueError, KeyError) as error:
        raise ProtocolError(COORDINATOR, f"handed out something that is not a model ({error})") from None
    if not np.isfinite(params).all():
        raise ProtocolError(COORDINATOR, "handed out a model with numbers that are not finite")
    problem = _unlike_the_plan(statement, file, {} if party is None else party.answered())
    if problem is not None:
        raise ProtocolError(COORDINATOR, f"handed out a statement that this plan refutes: {problem}")
    folder.mkdir(parents=True, exist_ok=True)
    statement = {**statement, "details": {**statement["details"], "said_by": COORDINATOR}}
    write_atomically(folder / "model.safetensors", to_bytes({"params": params}))
    write_atomically(folder / "result.json", (json.dumps(statement, indent=2) + "\n").encode())


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
    """SHA-256 of a saved model; it must be the same at all members."""
    return hashlib.sha256(read_bytes(folder / "model.safetensors")).hexdigest()


def readable_digest(digest: str) -> str:
    """The first 80 bits of a digest in groups to read aloud.

    >>> readable_digest("0123456789abcdef0123456789abcdef")
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


def party_data(data: Dataset) -> Any:
    """What a party's curator takes of its table."""
    table = (data.X, data.y)
    return table if data.person is None else RecordsWithIds(table, data.person)


def described(file: PlanFile, name: str, path: str | Path, data: Dataset) -> str:
    """Describe a party's table, for that party alone: the numbers are exact."""
    said = file.sizes[file.parties.index(name)]
    found = f"{len(data.y)} records"
    if data.person is not None:
        found = f"{factorize_ids(data.person)[1]} people, {found}"
    columns = f"; columns in this order: {', '.join(data.feature_names)}" if data.feature_names else ""
    classes = file.model.get("class_names") or ()
    labels = f"; any label but {', '.join(classes)} counts as {classes[0]}" if classes else ""
    return f"{path}: {found} (the plan says {said}){columns}{labels}"


def _roster(file: PlanFile, credentials: Credentials) -> Roster | None:
    if file.plan.trust != "secure":
        return None
    return credentials.roster((*file.plan.names, *(file.plan.servers or (COORDINATOR,))))
