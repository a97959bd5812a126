"""One self-contained HTML page about a ledger: accounts against their caps, runs over time, who spent what.

It shows what the ledger's lines say and what follows from them by accounting. It reads no data. From a run's folder
it takes the name of the run alone, to link its report and certificate.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from quietgrad import __version__
from quietgrad.assurance.report.page import page_environment
from quietgrad.assurance.report.spending import LESS_THAN_SUM
from quietgrad.charts import Lines, Series
from quietgrad.core.accounting.accounting import account as epsilon_of
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.events import Event
from quietgrad.core.errors import UnprovableError
from quietgrad.core.files import read_json, write_atomically
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.state import DEFAULT, LedgerState, ReservationState, compose_events, run_of

COUNTED_TOTAL = (
    "some runs were planned from a private count of their records. The total is that of the counts that came out; "
    "other counts would have led to other noise. Each run's own ε at its own δ holds for every count."
)
CLAIMED = "claimed"
"""The reason that closes an entry of another program's run."""
_LINKED = {"report.html": "report", "certificate.json": "certificate"}
_MOST_POINTS = 40  # of a curve: each is an accounting of its own
_MOST_OPEN = 12  # runs of an account that are listed without a click
_HOUR, _DAY = 3600.0, 86400.0  # seconds


@dataclass(frozen=True)
class AccountSpending:
    """One account: what it spent at a δ and relation, and what that rests on."""

    name: str
    delta: float
    relation: Relation
    epsilon: float | None
    """``None`` if no common ε can be proved; then ``problem`` says why."""
    accountant: str | None
    problem: str | None
    unit: str | None
    conditions: tuple[str, ...]
    notes: tuple[str, ...]
    cap: Budget | None

    @property
    def share(self) -> float | None:
        """The part of the cap that is spent."""
        return None if self.cap is None or self.epsilon is None else self.epsilon / self.cap.epsilon


def total_of(ledger: Ledger, book: LedgerState, name: str, delta: float | None = None) -> AccountSpending:
    """Prove what an account spent, at the δ asked for, else the cap's, else that asked for the newest run.

    A run and its score are one: see :meth:`~quietgrad.core.ledger.state.LedgerState.stated_delta`.
    """
    cap = book.cap(name)
    guarantee = cap or book.of(name)[-1].reservation  # an account exists by a cap or by a reservation
    delta = delta or book.stated_delta(name)
    epsilon, accountant, problem = None, None, None
    try:
        proof = ledger.spent(name, delta=delta, relation=guarantee.relation)
        epsilon, accountant = proof.epsilon, str(proof.accountant)
    except (UnprovableError, OverflowError) as error:
        problem = str(error)
    return AccountSpending(
        name, delta, guarantee.relation, epsilon, accountant, problem,
        " and ".join(book.units(name)) or None, book.conditions(name),
        (COUNTED_TOTAL,) if book.counted_runs(name) else (), cap,
    )  # fmt: skip


def spent_without_account(ledger: Ledger, book: LedgerState, delta: float | None = None) -> str | None:
    """The cost of the tables without a named account, were they about the same people; ``None`` below two."""
    tables = book.without_account()
    if len(tables) < 2:
        return None
    total = total_of(ledger, book, DEFAULT, delta)
    cost = total.problem or f"ε = {total.epsilon:.4g} at δ = {total.delta:g} ({total.relation})."
    return (
        f"{len(tables)} tables have no named account, and each is counted apart. If they are about the same "
        f"people, all their runs together cost: {cost}"
    )


@dataclass(frozen=True)
class RunFiles:
    """Where a run is kept: its folder's name, its data's name, and the addresses of its pages by their labels."""

    folder: str = ""
    data: str = ""
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LedgerRun:
    """One run: its entries (a private count, epochs, the run itself), and where its report is."""

    name: str
    entries: tuple[ReservationState, ...]
    files: RunFiles
    certified: bool

    @property
    def title(self) -> str:
        """The run's folder and data, where they were found; else nothing."""
        return ", ".join(filter(None, (self.files.folder, self.files.data)))

    @property
    def time(self) -> str:
        return f"{self.entries[0].time[:16].replace('T', ' ').removesuffix('Z')}"

    @property
    def work(self) -> str:
        """The name of what ran, from the notes of its entries; a private count belongs to the run after it."""
        notes = [entry.note.partition(";")[0] for entry in self.entries]
        return next((note for note in reversed(notes) if note and note != "count"), notes[-1]) or "not named"

    @property
    def state(self) -> str:
        return "open" if any(entry.state == "open" for entry in self.entries) else self.entries[-1].state

    @property
    def is_foreign(self) -> bool:
        return any(entry.reason == CLAIMED for entry in self.entries)

    @property
    def condition(self) -> str | None:
        return next((entry.reservation.condition for entry in self.entries if entry.reservation.condition), None)

    @property
    def counts(self) -> list[Event]:
        return [entry.counts for entry in self.entries if entry.counts is not None]

    @cached_property
    def cost(self) -> str:
        """ε of what counts, by itself, at the run's own δ."""
        first = self.entries[-1].reservation
        return _epsilon_text(self.counts, first.delta, first.relation)


@dataclass(frozen=True)
class AccountView:
    """One account as the page shows it."""

    total: AccountSpending
    anchor: str
    runs: tuple[LedgerRun, ...]
    curve: str
    others: int = 0
    """Runs of other accounts that count here too: those that name no account count for ``default``."""

    @property
    def is_open(self) -> bool:
        return len(self.runs) <= _MOST_OPEN

    @property
    def note(self) -> str:
        """Why ε of several runs together is not the sum of theirs."""
        return LESS_THAN_SUM if len(self.runs) > 1 and self.total.epsilon is not None else ""

    @property
    def foreign(self) -> int:
        return sum(run.is_foreign for run in self.runs)

    @property
    def conditional(self) -> int:
        return sum(run.condition is not None for run in self.runs)

    @property
    def certified(self) -> int:
        return sum(run.certified for run in self.runs)

    @property
    def unfinished(self) -> int:
        return sum(run.state == "open" for run in self.runs)

    @cached_property
    def shares(self) -> list[tuple[str, int, str]]:
        """(what ran, number of runs, ε of these together), the most runs first."""
        ordered = sorted(self.runs, key=lambda run: run.work)
        groups = [(work, list(runs)) for work, runs in groupby(ordered, key=lambda run: run.work)]
        rows = []
        for work, runs in sorted(groups, key=lambda group: -len(group[1])):
            events = [event for run in runs for event in run.counts]
            provable = self.total.epsilon is not None
            text = _epsilon_text(events, self.total.delta, self.total.relation) if provable else "no common ε"
            rows.append((work, len(runs), text))
        return rows


def write_ledger_page(ledger: Ledger, target: Path, folders: Sequence[Path] = ()) -> Path:
    """Write the page about ``ledger`` to ``target``; ``folders`` are searched for runs whose reports are linked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, render_ledger(ledger, files_in(folders, target.parent)).encode())
    return target


def render_ledger(ledger: Ledger, files: Mapping[str, RunFiles]) -> str:
    """Return the page as text; ``files`` say, by run, where it is kept."""
    entries, book = ledger.entries(), ledger.book()
    certified = {str(entry.body.get("run")) for entry in entries if entry.kind == "certificate"}
    views = []
    for k, name in enumerate(book.accounts()):
        total, runs = total_of(ledger, book, name), tuple(_runs(book.lines(name), files, certified))
        counted = book.of(name)
        curve = "" if total.epsilon is None else _curve(counted, total)
        others = len(tuple(_runs(counted, files, certified))) - len(runs)
        views.append(AccountView(total, f"account-{k + 1}", runs, curve, others))
    longest = max((view.total.epsilon or 0.0 for view in views if view.total.cap is None), default=0.0)
    page = page_environment().get_template("ledger.html.j2")
    return page.render(
        file=ledger.path.name,
        head=ledger.head() if entries else None,
        entries=len(entries),
        since=entries[0].time[:10] if entries else "",
        until=entries[-1].time[:10] if entries else "",
        views=views,
        together=spent_without_account(ledger, book),
        runs=sum(len(view.runs) for view in views),
        longest=longest,
        version=__version__,
        date=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
    )


def files_in(folders: Iterable[Path], start: Path) -> dict[str, RunFiles]:
    """Find the finished runs in and below ``folders``; by run, its files' addresses as seen from ``start``."""
    files_by_run: dict[str, RunFiles] = {}
    for folder in folders:
        for file in sorted(folder.rglob("result.json")):
            try:
                record = read_json(file)
                run, data = str(record["details"]["run"]), str((record.get("data") or {}).get("name") or "")
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            pages = {label: file.with_name(name) for name, label in _LINKED.items()}
            links = {
                label: quote(Path(os.path.relpath(page.resolve(), start.resolve())).as_posix())
                for label, page in pages.items()
                if page.is_file()
            }
            files_by_run[run] = RunFiles(file.parent.name, data, links)
    return files_by_run


def _runs(
    lines: Sequence[ReservationState], files: Mapping[str, RunFiles], certified: set[str]
) -> Iterable[LedgerRun]:
    by_run: dict[str, list[ReservationState]] = {}
    for line in lines:
        by_run.setdefault(run_of(line.reservation.run), []).append(line)
    for name, entries in by_run.items():
        yield LedgerRun(name, tuple(entries), files.get(name, RunFiles()), name in certified)


def _curve(lines: Sequence[ReservationState], total: AccountSpending) -> str:
    """Draw the account's ε after each entry, as a staircase, and its cap as a level line."""
    counted = [(_seconds(line.time), line.counts) for line in lines if line.counts is not None]
    if len(counted) < 3:
        return ""
    start, end = counted[0][0], counted[-1][0]
    unit, label = (_DAY, "days") if end - start >= 2.0 * _DAY else (_HOUR, "hours")
    by_time = end - start >= 2.0 * _HOUR  # else by number: lines tell the minute, not more
    step = max(1, -(-len(counted) // _MOST_POINTS))
    places = [*range(step, len(counted), step), len(counted)]
    points = [(0.0, 0.0)]
    for place in places:
        event = compose_events(event for _, event in counted[:place])
        assert event is not None
        x = (counted[place - 1][0] - start) / unit if by_time else float(place)
        points += [(x, points[-1][1]), (x, epsilon_of(event, delta=total.delta, relation=total.relation))]
    series = [Series("spent", points)]
    if total.cap is not None:
        series.append(Series("cap", [(0.0, total.cap.epsilon), (points[-1][0], total.cap.epsilon)], level=True))
    since = f"{label} since {lines[0].time[:10]}" if by_time else "entries"
    return Lines(f"ε of {total.name} over time", series, since, "ε in all", zero=True).svg()


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def _epsilon_text(events: Sequence[Event], delta: float, relation: Relation) -> str:
    event = compose_events(events)
    if event is None:
        return "0"
    try:
        return f"{epsilon_of(event, delta=delta, relation=relation):.4g}"
    except (UnprovableError, OverflowError):
        return "not provable"
