"""One member's approval of one plan, and what it makes of it: a party, a server of secure sums, or the coordinator.

``quietgrad federate approve`` writes an approval to a file of the member's own; the other commands make it of their
options. It holds the plan's text, so editing the plan file afterwards changes nothing. Every transport starts here.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save as to_safetensors

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import BudgetError, DataError, QuietgradError
from quietgrad.core.files import os_error_text, parse_json, read_bytes, read_json, write_atomically
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.log import LockedAppendFile
from quietgrad.core.ledger.state import check_account_name
from quietgrad.core.session.statement import Privacy, contradiction
from quietgrad.core.settings import Within, fields_of
from quietgrad.federation.coordinator import AGGREGATES, FederatedCurator
from quietgrad.federation.exchange import PATIENCE, Exchange, Responder, Tell
from quietgrad.federation.journal import forget
from quietgrad.federation.members import SumMember
from quietgrad.federation.network import NetworkSource
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.pins import readable_digest
from quietgrad.federation.plan_file import PlanFile, address_of, parse_plan
from quietgrad.federation.provisioning import Credentials
from quietgrad.federation.record_format import PartyRecords
from quietgrad.federation.revocation import COORDINATOR, check_none_revoked, revoked
from quietgrad.federation.rounds import largest_reply
from quietgrad.federation.run_status import RunStatus
from quietgrad.federation.secure.identity import ProtocolError, Roster
from quietgrad.federation.simulation import train
from quietgrad.federation.transport import Bytes, Transport
from quietgrad.federation.wire import Message, WireError, decode, encode
from quietgrad.methods.callbacks import Callback
from quietgrad.methods.result import Result, load
from quietgrad.named_settings import check_types
from quietgrad.tables.person_ids import factorize_ids
from quietgrad.tables.privacy_units import RecordsWithIds

if TYPE_CHECKING:
    from quietgrad.data import Dataset


FILE = "quietgrad.json"
_DELIVERED = "delivered.json"
_FORMAT = 1
_OF_NETWORKS = {"module_text", "start"}  # fields that approvals of tables need not have
_COMPLETE = "the run is complete"


@dataclass(frozen=True)
class Approved:
    """One member's approval of one plan: the plan's text and digest, and this member's own files and limits.

    ``address`` is where the coordinator is called, or listens, if not at the plan's address. Of a network,
    ``module_text`` is the code that was approved, and ``start`` the file of its start weights.
    """

    plan: str
    digest: str
    keys: str
    out: str
    data: str | None = None
    ledger: str | None = None
    account: str = "default"
    cap_epsilon: float | None = None
    address: str | None = None
    module_text: str | None = None
    start: str | None = None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"
        write_atomically(path, text.encode(), private=True)

    @classmethod
    def read(cls, path: str | Path) -> Approved:
        try:
            content = check_types(read_json(path), "the approval", {"format": int, **fields_of(cls)})
            names = fields_of(cls).keys()
            if content.pop("format", None) != _FORMAT or not names - _OF_NETWORKS <= content.keys() <= names:
                raise ValueError("its fields are those of another version.")
            approval = cls(**content)
            approval.check_own()
            return approval
        except FileNotFoundError:
            raise DataError(f"{path}: no such approval; make it with `quietgrad federate approve`.") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({os_error_text(error)}).") from None
        except ValueError as error:
            raise DataError(f"{path}: not an approval of this version: {error} Approve again.") from None

    @cached_property
    def file(self) -> PlanFile:
        file = parse_plan(self.plan, "the approved plan", self._beside)
        if file.digest != self.digest:
            names, holds = readable_digest(self.digest), readable_digest(file.digest)
            raise BudgetError(f"the approval names plan {names} and holds {holds}; approve again.")
        if not isinstance(file.objective, NetworkSource) and (self.module_text, self.start) != (None, None):
            raise DataError("the approval holds code or weights, and its plan has no network; approve again.")
        if self.address is None:
            return file
        host, port = address_of(self.address)
        return replace(file, host=host, port=port)

    def _beside(self, name: str, most: int) -> bytes:
        """Return a file that the plan names: the approved code, or weights whose digest the plan's digest holds."""
        if name.endswith(".py"):
            if self.module_text is None:
                raise DataError("the approval holds no code of the plan's network; approve again.")
            return self.module_text.encode()
        if self.start is None:
            raise DataError("the approval names no start weights of the plan's network; approve again.")
        return read_bytes(self.start, most=most)

    @cached_property
    def objective(self) -> Any:
        """The objective to train. For a network this runs the approved code, and no other text as code."""
        network = self.file.network
        return self.file.objective if network is None else network.build()

    @cached_property
    def credentials(self) -> Credentials:
        credentials = Credentials.read(self.keys)
        if credentials.name not in self.file.members:
            raise DataError(f"{self.keys}: {credentials.name!r} is not a member of this plan.")
        credentials.check_dates()
        if credentials.name != COORDINATOR:  # which leaves a revoked party out and may do without it
            check_none_revoked(self.keys, self.file.members)
            if why := revoked(self.keys).get(credentials.name):
                raise DataError(f"{self.keys}: the coordinator has revoked this member ({why}).")
        return credentials

    @cached_property
    def roster(self) -> Roster | None:
        plan = self.file.plan
        if plan.secure is None:
            return None
        return self.credentials.roster((*plan.names, *(plan.servers or (COORDINATOR,))))

    @property
    def folder(self) -> Path:
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

    def check_own(self) -> None:
        """Raise ``ValueError`` if what this member says beside the plan cannot be meant."""
        check_account_name(self.account)
        if self.address is not None:
            address_of(self.address)
        if self.cap_epsilon is not None:
            Within(0.0, sys.float_info.max, closed=False).check("cap_epsilon", self.cap_epsilon)
        paths = {"keys": self.keys, "out": self.out, "data": self.data, "ledger": self.ledger, "start": self.start}
        for name, path in paths.items():
            if path is not None and (not path or "\0" in path):
                raise ValueError(f"{name}={path!r}: is not a path.")
        if self.ledger is not None and Path(self.ledger).is_dir():
            raise ValueError(f"ledger={self.ledger!r}: is a folder; name a file.")

    def check(self) -> None:
        """Raise if something in the approval cannot work, before anything is begun."""
        self.check_own()
        _ = self.file, self.credentials, self.cap

    def check_coordinator(self) -> None:
        if self.credentials.name != COORDINATOR:
            raise DataError(f"{self.keys}: are the keys of {self.credentials.name!r}, not the coordinator's.")

    def member(self, tell: Tell = lambda words: None) -> PartyCurator | SumMember:
        """Make what answers for this member: a party with its records, or a server of a secure sum.

        ``tell`` hears exact numbers of the party's table: only the party may read it.
        """
        file, name = self.file, self.credentials.name
        if name in file.plan.servers and self.roster is not None:
            keys = self.credentials
            return SumMember(file.plan, keys.identity, self.roster, revocations=keys.revocations)
        if name not in file.parties or self.data is None:
            raise DataError(f"{self.keys}: {name!r} is no party with records; give --data.")
        table = records(file, self.data)
        tell(described(file, name, self.data, table))
        if isinstance(table, PartyRecords):
            return self.party(table.held)
        return self.party(
            (table.X, table.y) if table.person is None else RecordsWithIds((table.X, table.y), table.person)
        )

    def party(self, data: object) -> PartyCurator:
        """Approve one run of the plan for these records, or continue the one that the folder has begun.

        Without a cap, here or in the ledger, the account may spend what the plan costs and no more.
        """
        file, keys, cap = self.file, self.credentials, self.cap
        if (self.folder / "result.json").exists():
            forget(self.folder, keys.name)  # killed after it had saved the model
            raise DataError(f"{self.folder}: holds a finished run; choose another --out to approve another one.")
        if file.budget is not None:
            file.plan.proves()
        if cap is None and self.books is not None and Ledger(self.books).cap(self.account) is None:
            cap = file.budget
        member = PartyCurator(
            keys.name, self.objective, data, file.plan, ledger=self.books, account=self.account, cap=cap,
            identity=keys.identity, roster=self.roster, folder=self.folder, revocations=keys.revocations,
        )  # fmt: skip
        try:
            member.approval.check_cap()  # now, and not when the others have paid already
        except BaseException:
            member.close()
            raise
        return member

    def site(self, member: PartyCurator | SumMember, tell: Tell) -> Responder:
        """Wrap the member for a transport: it answers, and takes what is handed out at the end."""
        role = "party" if isinstance(member, PartyCurator) else "server of secure sums"
        status = RunStatus(self.folder, self.credentials, self.file, tell, role)
        status.write("waiting for the coordinator")

        def handle(message: Bytes) -> Bytes:
            reply = member.handle(message)
            status.answered(sum(member.answered().values()) if isinstance(member, PartyCurator) else member.rounds)
            return reply

        def finish(words: str, model: Bytes) -> None:
            try:
                if not len(model):
                    raise QuietgradError(f"the coordinator ended the run: {words.rstrip('.')}.")
                if isinstance(member, PartyCurator):
                    self.save_model(model, member)
                    member.discard()
            except QuietgradError as error:
                if isinstance(member, PartyCurator):
                    charged = "what the plan costs stays charged"
                    tell("nothing was asked, so nothing is charged" if member.withdraw() else charged)
                status.write(str(error))
                raise
            status.write(words)

        return Responder(handle, self.digest, finish, self.credentials.identity)

    def coordinate(
        self, transport: Transport, tell: Tell, *, wait: float = 600.0, patience: float = PATIENCE
    ) -> Result:
        """Train through ``transport`` and hand out the model, or the reason why there is none.

        Waits ``wait`` seconds for all members at the beginning, once a quorum is there, and ``patience`` seconds
        for a quorum whenever there is none.
        """
        self.check_coordinator()
        file, folder = self.file, self.credentials.folder
        exchange = Exchange(
            transport, agreement=self.digest, timeout=file.timeout, grace=file.grace, patience=patience,
            most=largest_reply(file.plan), revoked=lambda: revoked(folder), tell=tell,
        )  # fmt: skip
        status = RunStatus(self.folder, self.credentials, file, tell, COORDINATOR, lambda: exchange.away)
        before = self.finished()
        try:
            result = before or self.train(exchange, tell, status.callback, wait)
        except QuietgradError as error:
            status.write(f"aborted: {error}")
            exchange.finish(f"aborted: {error}")
            raise
        path = self.folder / _DELIVERED  # who has confirmed the model
        have = set(read_json(path)) if path.exists() else set()
        missing = [name for name in transport.parties() if name not in have]
        have |= {*exchange.finish(_COMPLETE, final_message(result), wait if before else file.grace, missing)}
        write_atomically(path, json.dumps(sorted(have)).encode())
        if late := [name for name in missing if name not in have]:
            tell(f"{', '.join(late)} did not confirm the model; when they are back, the same command hands it out")
        status.write(_COMPLETE)
        return result

    def train(
        self, exchange: Exchange, tell: Tell = lambda words: None, callback: Callback | None = None,
        wait: float | None = None,
    ) -> Result:  # fmt: skip
        """Train through ``exchange``, or continue the interrupted run in the folder, and save the model there."""
        file = self.file
        curator = FederatedCurator(
            self.objective, exchange, ledger=self.books, account=self.account, cap=self.cap,
            identity=self.credentials.identity, roster=self.roster, folder=self.folder, tell=tell,
            revocations=self.credentials.revocations,
        )  # fmt: skip

        def named(result: Result) -> Result:
            facts = {"model": dict(file.model), "federation": file.name, "plan_file": file.digest}
            return replace(result, details={**result.details, **facts}, data={"name": file.name, "notes": []})

        result = train(
            file.algorithm, curator, file.plan, self.objective.initial(file.plan.shape), account=self.account,
            callback=callback, keep=lambda result: named(result).save(self.folder), wait=wait,
        )  # fmt: skip
        return named(result)

    def save_network(self) -> None:
        """Write the network's code and start weights beside the model, if the plan has a network."""
        if (network := self.file.network) is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / network.file, network.text.encode())
        if network.start is not None and network.start_file is not None:
            write_atomically(self.folder / network.start_file, network.start)

    def finished(self) -> Result | None:
        """The result of this plan that the folder holds, if any: a restarted coordinator only hands it out."""
        if not (self.folder / "result.json").exists():
            return None
        result = load(self.folder)
        if result.details.get("plan_file") != self.digest:
            raise DataError(f"{self.folder}: holds a finished run of another plan; choose another --out.")
        if (self.folder / AGGREGATES).exists():  # killed after saving
            LockedAppendFile(self.folder / AGGREGATES, "coordinates this run").remove()
        return result

    def save_model(self, data: Bytes, party: PartyCurator) -> None:
        """Write the model that the coordinator handed out.

        Its privacy statement must follow from the approved plan and from what ``party`` answered.
        """
        file, folder = self.file, self.folder
        try:
            message = decode(data, most=largest_reply(file.plan))
            statement = parse_json(message.blob("result"))
            params = message.arrays["params"]
            kind = np.float64 if file.network is None else np.float32
            if not isinstance(statement, Mapping) or params.shape != (file.plan.shape.dim,) or params.dtype != kind:
                raise WireError("not the model of this plan")
            if not np.isfinite(params).all():
                raise WireError("numbers are not finite")
        except (WireError, ValueError, KeyError) as error:
            raise ProtocolError(COORDINATOR, f"handed out something that is not a model ({error})") from None
        problem = _unlike_the_plan(statement, file, party.answered())
        if problem is not None:
            raise ProtocolError(COORDINATOR, f"handed out a statement that this plan refutes: {problem}")
        folder.mkdir(parents=True, exist_ok=True)
        # The run here is the entry that pays for it in this party's own ledger, under its own account.
        details = {
            **statement["details"],
            "said_by": COORDINATOR,
            "coordinator_run": statement["details"].get("run"),
        }
        details["run"] = party.approval.journal.entry
        privacy = {**statement["privacy"], "account": party.approval.account if file.budget else None}
        statement = {**statement, "privacy": privacy, "details": details}
        write_atomically(folder / "model.safetensors", to_safetensors({"params": params}))
        write_atomically(folder / "result.json", (json.dumps(statement, indent=2) + "\n").encode())


def final_message(result: Result) -> bytearray:
    text = np.frombuffer(json.dumps(result.to_json()).encode(), np.uint8)
    params = result.params if isinstance(result.params, np.ndarray) else result.params.detach().cpu().numpy()
    return encode(Message("model", {}, {"params": params, "result": text}))


def _unlike_the_plan(statement: Mapping[str, Any], file: PlanFile, answered: Mapping[str, int]) -> str | None:
    """Return why no run of this plan can end with this statement, or ``None`` if one can."""
    try:
        stated_privacy = Privacy.from_json(statement["privacy"])
        dict(statement["details"])
        releases = {str(slot): int(release_count) for slot, release_count in stated_privacy.releases.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return f"it has no readable statement of privacy ({type(error).__name__})"
    plan = file.plan
    if statement.get("algorithm") != plan.algorithm or statement["details"].get("plan_file") != file.digest:
        return "it is of another algorithm or plan"
    if any(releases.get(slot, 0) < release_count for slot, release_count in answered.items()):
        return "it lists fewer releases than were answered here"
    allowed = {slot.name: plan.limit(slot.name) for slot in plan.schedule.slots}
    if any(release_count > allowed.get(slot, 0) for slot, release_count in releases.items()):
        return "it lists more releases than the plan allows"
    if file.budget is None:
        private = stated_privacy.is_private or stated_privacy.epsilon is not None
        return "it is called private, and the plan adds no noise" if private else None
    if stated_privacy.epsilon is None:
        return "it states no ε"
    if stated_privacy.delta != file.budget.delta or stated_privacy.relation is not file.budget.relation:
        return f"δ = {stated_privacy.delta} under {stated_privacy.relation} is not what was agreed"
    # Whenever a run stops, all of its plan is spent: spare rounds and what an early stop left are not given back.
    if stated_privacy.events != plan.event or stated_privacy.noise_multiplier != plan.noise_multiplier:
        return "it lists other releases or other noise than the plan's"
    return contradiction(stated_privacy)


def model_digest(folder: Path) -> str:
    """SHA-256 of a saved model; it must be the same at all members."""
    return hashlib.sha256(read_bytes(folder / "model.safetensors")).hexdigest()


def records(file: PlanFile, path: str | Path) -> Dataset | PartyRecords:
    """Read a party's file by the plan's format."""
    data = file.table.load(path)
    if not isinstance(data, PartyRecords):
        data.refuse_uncounted(file.budget)
    return data


def described(file: PlanFile, name: str, path: str | Path, data: Dataset | PartyRecords) -> str:
    """Describe a party's records, for that party alone: the numbers are exact."""
    if isinstance(data, PartyRecords):
        return data.in_words(path, file.sizes[file.parties.index(name)])
    people = "" if data.person is None else f"{factorize_ids(data.person)[1]} people, "
    counts = f"{people}{len(data.y)} records (the plan says {file.sizes[file.parties.index(name)]})"
    columns = f"; columns in this order: {', '.join(data.feature_names)}" if data.feature_names else ""
    classes = file.model.get("class_names") or ()
    labels = f"; any label but {', '.join(classes)} counts as {classes[0]}" if classes else ""
    return f"{path}: {counts}{columns}{labels}"
