"""Runs that are kept, killed, meddled with and opened again; and a witness of what they really released.

A :class:`World` is a machine in a folder: the state folder, one ledger, one run. The :class:`Witness` stands beside
the door and writes down every release that is made, by the key of its noise, so that what a run states can be held
against what it did: no noise on two sums, and one charge for every key.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.events import composed
from quietgrad.core.errors import QuietgradError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.kept import Run
from quietgrad.core.session.session import CentralSession
from quietgrad.core.session.transcript import plan_key
from quietgrad.methods import run
from quietgrad.objectives import Logistic

BUDGET = qg.Budget(1.0, 1e-5)
STEPS = 6
Snapshot = dict[Path, bytes]


class Killed(BaseException):
    """The process dies: nobody handles this."""


class Witness:
    """Every release, by the key that its noise comes from; and how often parties answered each draw."""

    def __init__(self) -> None:
        self.sums: dict[tuple[bytes, str, int], set[bytes]] = defaultdict(set)
        self.runs: dict[bytes, str] = {}  # by key
        self.answers: Counter[int] = Counter()

    @property
    def reused(self) -> int:
        """How often the same noise lay on two different sums."""
        return sum(len(sums) > 1 for sums in self.sums.values())

    def epochs(self, run: str | None = None) -> int:
        """How often the plan must have been charged, for one run or for all."""
        return max([sum(run in (None, name) for name in self.runs.values()), *self.answers.values()], default=0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        from quietgrad.federation.party import PartyCurator

        settled, asked = CentralSession._settled, PartyCurator._ask

        def note(session: CentralSession, begun: Any, settings: Any, *sums: Any) -> bool:
            if not settled(session, begun, settings, *sums):
                return False
            log = session._transcript
            assert log is not None
            digest = hashlib.sha256(repr(settings).encode() + b"".join(np.asarray(s).tobytes() for s in sums))
            key = log.key(session._epoch)
            self.sums[key, begun.slot, begun.number].add(digest.digest())
            self.runs[key] = session.run
            return True

        def answered(party: Any, message: Any) -> Any:
            answer = asked(party, message)
            self.answers[message.fields["draw"]] += 1
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CentralSession, "_settled", note)
            patch.setattr(PartyCurator, "_ask", answered)
            yield


class World:
    """A machine with one ledger and one run of a kind; ``go`` begins the run or goes on with it."""

    saves_itself = True  # else steps are told when they are saved

    def __init__(self, home: Path) -> None:
        self.home, self.folder, self.ledger = home, home / "run", home / "ledger.jsonl"
        self.witness = Witness()
        self.snapshot: Snapshot | None = None
        self.result: Any = None
        self.begun = self.ledger_put_back = False
        home.mkdir(parents=True)

    # --- what each kind says -----------------------------------------------------------------------------------

    def begin(self, data: int, step: Callable[[int], None]) -> Any:
        raise NotImplementedError

    def resume(self, data: int, step: Callable[[int], None]) -> Any:
        raise NotImplementedError

    @property
    def event(self) -> Any:
        """What one charge is for."""
        raise NotImplementedError

    # --- what all do -------------------------------------------------------------------------------------------

    def go(self, data: int = 0, *, kill: int | None = None, look: int | None = None, saved: bool = False) -> bool:
        """Begin or go on, with table ``data``; die after step ``kill``, keep a snapshot at step ``look``.

        Both happen between a release and its checkpoint, or after that if it is to be ``saved``. Whether the run
        came to its end; errors of quietgrad's own are refusals, and pass through.
        """
        save, saved = Run.save, saved and self.saves_itself

        def after(run: Run, state: Any, session: Any, *, now: bool = False) -> None:
            save(run, state, session, now=now)
            if saved:
                step(sum(session.used.values()) if isinstance(state, dict) else state.step)  # a loop's is its own

        def step(number: int) -> None:
            if number == look:
                self.snapshot = self.files()
                time.sleep(0.03)  # a copy is told by the clock of the disk, whose ticks are 10 ms
            if number == kill:
                raise Killed

        with pytest.MonkeyPatch.context() as patch, self.witness.watching():
            patch.setenv("QUIETGRAD_STATE", str(self.home / "state"))
            patch.setattr(Run, "save", after)
            try:
                self.result = (self.resume if self.begun else self.begin)(data, (lambda _: None) if saved else step)
            except Killed:
                return False
            finally:
                self.begun = True
        return True

    def files(self) -> Snapshot:
        """Everything on the machine."""
        return {path: path.read_bytes() for path in sorted(self.home.rglob("*")) if path.is_file()}

    def charges(self) -> int:
        """How often the ledger was charged."""
        return sum(held.counts is not None for held in Ledger(self.ledger).book().held.values())

    def check(self) -> None:
        """What was stated must be true of what was released.

        A ledger that was itself put back has lost charges, which only an anchor tells: then noise alone is judged.
        """
        assert self.witness.reused == 0, "the same noise lies on two sums"
        if self.result is None or self.ledger_put_back:
            return
        owed = self.witness.epochs()
        assert self.charges() >= owed, f"{self.charges()} charges for {owed} epochs"
        owed = self.witness.epochs(self.result.details["run"])
        epsilon = getattr(getattr(self.result, "privacy", None), "epsilon", None)
        if epsilon is not None:
            needed = account(composed([self.event] * owed), delta=1e-5, relation=BUDGET.relation)
            assert epsilon >= needed * (1.0 - 1e-9), f"ε = {epsilon} is stated and ε = {needed} was spent"


def rows(data: int, n: int = 60) -> tuple[Any, Any]:
    """Two tables that differ by a few people."""
    rng = np.random.default_rng(5)
    X = rng.normal(size=(n, 2)) / 3.0
    y = (X[:, 0] > 0) * 1.0
    for batch in range(0, n if data else 0, 10):
        X[batch + 3] *= 0.5
    return X, y


class TableRun(World):
    method: Any = qg.DPGD(steps=STEPS)

    def _settings(self, step: Callable[[int], None]) -> dict[str, Any]:
        return {"folder": self.folder, "checkpoint_seconds": 0.0, "callback": lambda told: step(told.step)}

    def begin(self, data: int, step: Callable[[int], None]) -> Any:
        return qg.minimize(
            Logistic(),
            rows(data),
            self.method,
            budget=BUDGET,
            ledger=self.ledger,
            n_public=60,
            **self._settings(step),
        )

    def resume(self, data: int, step: Callable[[int], None]) -> Any:
        return qg.resume(data=rows(data), **self._settings(step))

    @property
    def event(self) -> Any:
        return qg.plan(self.method, n=60, budget=BUDGET).event

    def undisturbed(self, key: bytes) -> Any:
        """The model of a run with this key that nobody kills."""
        plan = qg.plan(self.method, n=60, budget=BUDGET)
        curator = CentralCurator(Logistic(), rows(0), key=plan_key(key, plan.digest))
        return run(self.method, curator.open(plan), curator.initial()).params


class SampledRun(TableRun):
    method: Any = qg.DPSGD(steps=STEPS, batch_size=20)


class OnceRun(TableRun):
    """Every record once, by its place, under correlated noise."""

    method: Any = qg.DPSGD(steps=STEPS, batch_size=10, sampling="single-pass", noise="correlated")


class NetworkRun(World):
    method: Any = qg.DPSGD(steps=STEPS, batch_size=20)

    def _parts(self, data: int) -> tuple[Any, ...]:
        import torch
        from torch import nn

        X, y = rows(data)
        torch.manual_seed(0)
        table = (torch.tensor(X, dtype=torch.float32), torch.tensor(y, dtype=torch.long))
        return nn.Linear(2, 2), nn.CrossEntropyLoss(reduction="none"), table

    def _settings(self, step: Callable[[int], None]) -> dict[str, Any]:
        told = [lambda progress: step(progress.step)]
        return {"folder": self.folder, "checkpoint_seconds": 0.0, "callbacks": told, "every": 1, "progress": False}

    def begin(self, data: int, step: Callable[[int], None]) -> Any:
        import quietgrad.torch as qt

        model, loss, table = self._parts(data)
        paid: dict[str, Any] = {"budget": BUDGET, "ledger": self.ledger, "n_public": 60, **self._settings(step)}
        return qt.fit(model, loss, table, self.method, **paid)

    def resume(self, data: int, step: Callable[[int], None]) -> Any:
        import quietgrad.torch as qt

        model, loss, table = self._parts(data)
        return qt.resume(model, loss, table, self.method, **self._settings(step))

    @property
    def event(self) -> Any:
        return qg.plan(self.method, n=60, budget=BUDGET).event


class LoopRun(NetworkRun):
    def _loop(self, data: int, **settings: Any) -> Any:
        import torch

        import quietgrad.torch as qt

        model, loss, table = self._parts(data)
        return qt.PrivateLoop(
            model, loss, table, optimizer=torch.optim.Adam(model.parameters()), budget=BUDGET, steps=STEPS,
            batch_size=20, max_grad_norm=1.0, n_public=60, **settings,
        )  # fmt: skip

    def undisturbed(self, key: bytes) -> Any:
        """The model of a loop with this key that nobody kills."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUIETGRAD_STATE", str(self.home / "elsewhere"))
            plan = self._loop(0).plan
            patch.setattr("quietgrad.torch.loops.base.broadcast_loop_key", lambda: plan_key(key, plan.digest))
            loop = self._loop(0)
            for batch in loop:
                loop.step(batch)
        return loop.engine.flatten(loop.parameters()).numpy()

    def begin(self, data: int, step: Callable[[int], None]) -> Any:
        from quietgrad.methods.result import over

        if (result := over(self.folder)) is not None:  # killed while it cleared away
            return result
        loop = self._loop(
            data, ledger=self.ledger, folder=self.folder, checkpoint_seconds=0.0,
            callbacks=[lambda progress: step(progress.step)],
        )  # fmt: skip
        try:
            for batch in loop:
                loop.step(batch)
                self.state_so_far(loop)
            return qg.load(self.folder)
        finally:
            assert loop._kept is not None
            loop._kept.close()

    resume = begin

    def state_so_far(self, loop: Any) -> None:
        """What a loop says on its way must be true as well."""
        if self.ledger_put_back:  # it has lost charges, see check
            return
        owed = self.witness.epochs(loop._session.run)
        assert loop._session.epochs >= owed
        if owed > 1:
            needed = account(composed([self.event] * owed), delta=1e-5, relation=BUDGET.relation)
            assert loop.privacy.epsilon >= needed * (1.0 - 1e-9)
            assert loop.epsilon() >= needed * (1.0 - 1e-9)


class PartyRun(World):
    saves_itself = False

    def begin(self, data: int, step: Callable[[int], None]) -> Any:
        from quietgrad.core.session.queries import GradientQuery
        from quietgrad.federation.party import PartyCurator
        from quietgrad.federation.plan import Shape
        from quietgrad.federation.planning import federate
        from quietgrad.federation.wire import Message, decode, encode, pack

        plan = federate(
            qg.DPGD(steps=STEPS), Logistic(), names=["a", "b"], sizes=[60, 60], shape=Shape(2, 2), budget=BUDGET,
            trust="local",
        )  # fmt: skip
        party = PartyCurator("a", Logistic(), rows(data), plan, ledger=self.ledger, folder=self.folder)

        def say(kind: str, fields: dict[str, Any], arrays: Any = None) -> Any:
            words = {"run": "r1", "plan": plan.digest, **fields}
            reply = decode(bytes(party.handle(encode(Message(kind, words, arrays or {})))))
            if reply.kind == "refused":
                raise QuietgradError(str(reply.fields["reason"]))
            return reply

        try:
            packed, arrays = pack(GradientQuery(np.zeros(2), 1.0))
            opened = say("open", {})
            for t in range(opened.fields.get("round", STEPS) + 1, STEPS):
                say("ask", {"round": t, "slot": "gradient", "draw": t, "rho": None, "query": packed}, arrays)
                step(t + 1)
            return say("close", {"reason": "steps"})
        finally:
            party.close()

    resume = begin

    @property
    def event(self) -> Any:
        return None

    def check(self) -> None:
        if self.result is not None and not self.ledger_put_back:
            assert self.charges() >= self.witness.epochs(), f"{self.charges()} charges for {self.witness.answers}"


KINDS = {
    "table": TableRun, "sampled": SampledRun, "network": NetworkRun, "loop": LoopRun, "once": OnceRun,
    "party": PartyRun,
}  # fmt: skip


# --- what may happen to files -----------------------------------------------------------------------------------


def put_back(path: Path, content: bytes, rng: Any) -> None:
    """As ``cp`` does, into the file that is there; or as ``rsync`` does, in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if rng.random() < 0.5 and path.exists():
        with path.open("r+b") as file:
            file.truncate()
            file.write(content)
    else:
        fresh = path.with_name("restored")
        fresh.write_bytes(content)
        fresh.chmod(0o600)
        os.replace(fresh, path)


def meddle(world: World, other: World, rng: Any) -> str:
    """One thing that goes wrong with the files of a machine; what it was."""
    now, old = world.files(), world.snapshot or {}
    if not now:
        return "nothing is there"
    path = list(now)[int(rng.integers(len(now)))]
    kind = str(
        rng.choice(["edit", "number", "cut", "line", "delete", "older", "all older", "run older", "other's"])
    )
    content = bytearray(now[path])
    at = int(rng.integers(max(1, len(content))))
    if kind == "edit":
        for _ in range(int(rng.integers(1, 4))):
            if content:
                content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
    elif kind == "number":  # the digits of some number, as somebody does who knows what he wants
        digits = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
        for i in digits[at % (len(digits) or 1) :][:1]:
            content[i] = 48 + (content[i] - 48 + int(rng.integers(1, 10))) % 10
        path.write_bytes(content)
    elif kind == "cut":
        with path.open("r+b") as file:
            file.truncate(at)
    elif kind == "line":
        lines = bytes(content).splitlines(keepends=True)
        k = int(rng.integers(len(lines))) if lines else 0
        path.write_bytes(b"".join(lines[:k] + lines[k + 1 :]) if rng.random() < 0.5 else b"".join(lines[:k]))
    elif kind == "delete":
        path.unlink()
    elif kind == "other's":
        role = path.relative_to(world.home).parts[0], path.suffix
        alike = [p for p in other.files() if (p.relative_to(other.home).parts[0], p.suffix) == role]
        if alike:
            put_back(path, alike[0].read_bytes(), rng)
    else:
        time.sleep(0.03)
        for place, before in old.items():
            of_ledger = place.name.startswith("ledger")
            if kind == "all older" or (kind == "run older" and not of_ledger) or place == path:
                put_back(place, before, rng)
                world.ledger_put_back |= of_ledger and before != now.get(place)
    return f"{kind} {path.name}" if kind in ("edit", "number", "cut", "line", "delete", "older") else kind


def storm(world: World, other: World, rng: Any) -> str:
    """A life of a run: begun, killed, meddled with, opened again; "true" or "refused"."""
    told: list[str] = []

    def go(most: int, **settings: Any) -> bool:
        return world.go(int(rng.integers(2)), kill=int(rng.integers(1, most)), saved=rng.random() < 0.5, **settings)

    try:
        over = go(STEPS, look=int(rng.integers(1, STEPS)))
        for _ in range(int(rng.integers(1, 4))):
            if not over and rng.random() < 0.5:
                over = go(STEPS + 1)
                told.append(f"went on, {over}")
            if rng.random() < 0.4:
                world.snapshot = world.files()
                time.sleep(0.03)
            if not over:
                told.append(meddle(world, other, rng))
                over = go(2 * STEPS)
                told.append(f"went on, {over}")
        if not over:
            told.append(f"ended, {world.go(int(rng.integers(2)))}")
    except (QuietgradError, ValueError) as refusal:
        told.append(f"refused: {type(refusal).__name__}")
        world.result = None
    try:
        world.check()
    except AssertionError as error:
        raise AssertionError(f"{error}, after {told}") from None
    except QuietgradError:  # the ledger itself was altered, and says so to everybody
        return "refused"
    return "refused" if world.result is None else "true"


def undisturbed_epsilon(world: World) -> float:
    """ε of a run that was charged once."""
    value = account(world.event, delta=1e-5, relation=BUDGET.relation)
    assert math.isfinite(value)
    return value


def believe_what_is_found(patch: pytest.MonkeyPatch) -> None:
    """The bug: neither the ledger nor the file itself is asked whether a transcript is the newest."""
    from quietgrad.core.ledger.log import SealedLog

    patch.setattr(SealedLog, "agrees", lambda self, openings: True)
    patch.setattr(SealedLog, "untouched", property(lambda self: True, lambda self, value: None), raising=False)
