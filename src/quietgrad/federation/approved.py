"""What one member approved, as one value: the plan itself, whose keys and records, and what may be spent.

``quietgrad federate approve`` writes it to a file of the member's own; the other commands make it of their options.
Whatever carries the frames, a party, a server of secure sums and the coordinator are made here and nowhere else.
The plan's text is in the file: editing the plan file afterwards changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from quietgrad.errors import BudgetError, DataError, QuietgradError
from quietgrad.federation import network
from quietgrad.federation.exchange import PATIENCE, Exchange
from quietgrad.federation.matching import read_matching
from quietgrad.federation.members import SumMember
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.progress import Progress
from quietgrad.federation.provision import COORDINATOR, Credentials
from quietgrad.federation.revocation import check_none_revoked, revoked
from quietgrad.federation.site import Site
from quietgrad.federation.toml_plan import PlanFile, address_of, parse_plan
from quietgrad.federation.transport import Bytes, Transport
from quietgrad.files import read_json, write_atomically
from quietgrad.privacy.budget import Budget
from quietgrad.training.result import Result

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
        out: its folder for what it keeps: ledger, journal, model.
        data: a party's records.
        ledger, account, cap_epsilon: where and for whom is booked, and the most that may be spent.
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

    # --- what is in it ----------------------------------------------------------------------------------------

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
        """Refuse what cannot work, before anything is begun."""
        _ = self.file, self.credentials, self.cap

    # --- what is made of it -----------------------------------------------------------------------------------

    def member(self, tell: Tell = lambda words: None) -> PartyCurator | SumMember:
        """What answers for this member: a party with its records, or a server of a secure sum."""
        name = self.credentials.name
        if name in self.file.plan.servers:
            return network.server(self.file, self.credentials)
        if name not in self.file.parties or self.data is None:
            raise DataError(f"{self.keys}: {name!r} is no party with records; give --data, or use its own command.")
        table = network.records(self.file, self.data)
        tell(network.described(self.file, name, self.data, table))
        key, lists = (None if path is None else Path(path) for path in (self.people_key, self.people_lists))
        party = network.party(
            self.file, self.credentials, network.held(table), folder=self.folder, ledger=self.books,
            account=self.account, cap=self.cap, matching=read_matching(key, lists, self.file.parties),
        )  # fmt: skip
        if self.file.plan.matched:
            tell(f"{len(party.records)} people are kept here; others that are known here are kept by another party")
        return party

    def site(self, member: PartyCurator | SumMember, tell: Tell) -> Site:
        """The member as every transport needs it: it answers, and takes what is handed out at the end."""
        progress = Progress(self.folder, member.name, self.file, tell)

        def finish(words: str, parting: Bytes) -> None:
            try:
                self._take(member, words, parting, tell)
            except QuietgradError as error:
                progress.end(str(error))
                raise
            progress.end(words)

        return Site(progress.watching(member), self.digest, finish, self.credentials.identity)

    def _take(self, member: PartyCurator | SumMember, words: str, parting: Bytes, tell: Tell) -> None:
        """Keep the model, or find out that there is none and what that means here."""
        try:
            if isinstance(member, SumMember):
                if not len(parting):
                    raise QuietgradError(f"the coordinator ended the run: {words.rstrip('.')}.")
                return
            if not network.save_parting(parting, self.file, self.folder, member):
                raise QuietgradError(f"the coordinator ended the run: {words.rstrip('.')}.")
            member.discard()
        except QuietgradError:
            if isinstance(member, PartyCurator):
                free = member.withdraw()
                tell("nothing was asked, so nothing is charged" if free else "what the plan costs stays charged")
            raise

    def coordinate(
        self, transport: Transport, tell: Tell, *, wait: float = 600.0, patience: float = PATIENCE
    ) -> Result:
        """Train through ``transport`` and hand out the model; whoever fails is told why.

        Args:
            wait: seconds to wait for everybody at the beginning, once a quorum is there.
            patience: seconds to wait for a quorum, whenever there is none.
        """
        file, credentials = self.file, self.credentials
        network.check_coordinator(credentials)
        exchange = Exchange(
            transport, agreement=self.digest, timeout=file.timeout, grace=file.grace, patience=patience,
            most=network.largest_frame(file), revoked=lambda: revoked(credentials.folder), tell=tell,
        )  # fmt: skip
        progress = Progress(self.folder, COORDINATOR, file, tell)
        before = network.finished(file, self.folder)
        try:
            result = before or network.coordinate(
                file, credentials, exchange, folder=self.folder, ledger=self.books, account=self.account,
                cap=self.cap, tell=tell, callback=progress.callback, wait=wait,
            )  # fmt: skip
        except QuietgradError as error:
            progress.end(f"aborted: {error}")
            exchange.finish(f"aborted: {error}")
            raise
        self._hand_out(exchange, result, tell, wait if before else file.grace)
        progress.end("the run is complete")
        return result

    def _hand_out(self, exchange: Exchange, result: Result, tell: Tell, seconds: float) -> None:
        """Give the model to those who have not confirmed it yet, and note who has."""
        path = self.folder / _DELIVERED
        have = set(read_json(path)) if path.exists() else set()
        missing = [name for name in exchange.transport.parties() if name not in have]
        have |= {*exchange.hand_out(missing, "the run is complete", network.parting(result), seconds)}
        write_atomically(path, json.dumps(sorted(have)).encode())
        if late := [name for name in missing if name not in have]:
            tell(f"{', '.join(late)} did not confirm the model; when they are back, the same command hands it out")
