"""A coordinator that keeps to no order: mixed slots, other types, repeated rounds, two runs, frames of the past.

``tests/federation/questions.py`` spoils numbers of one question after another. Here the conversation is spoiled.
Whatever is said in whatever order: two parties with different records answer alike, no record counts for more than
the bound of its query, no slot is answered more often than planned, one run is answered, and nothing escapes a
responder.
"""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.federation.exchange import ASK, FINISH, WHO, Envelope, Responder, agreement_of, body
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import Shape
from quietgrad.federation.plan_file import parse_plan, read_plan
from quietgrad.federation.planning import federate
from quietgrad.federation.secure.identity import Identity, Roster
from quietgrad.federation.wire import Message, WireError, decode, encode, pack, template, unpack
from quietgrad.tables.losses import Logistic
from quietgrad.tables.queries.local_fit import LocalFit
from tests.federation.hostile_members import HostileCoordinator
from tests.federation.questions import length
from tests.federation.test_network import TWO, ended, folder, spent_in, start, two

QUESTIONS, D, N = 2000, 4, 30
_SPIDER: dict[str, Any] = {"batch_size": N, "difference_batch_size": N, "regime": "reuse", "full_queries": 400}
ALGORITHMS: dict[str, Any] = {
    "dp-srm": qg.DPSRM(steps=60, batch_size=N, smoothness=0.5, difference_clip=1.0),
    "whitened-gd": qg.WhitenedGD(steps=60),
    "perturbed-sgd": qg.PerturbedSGD(
        oracle=qg.AdaptiveSpider(kappa=1.0, clip=1.0, smoothness=1.0, **_SPIDER), steps=60, chi=0.1
    ),
    "weighted-average": qg.WeightedAverage(steps=60, method="rounds"),
}
_CELLS = (math.nan, math.inf, -math.inf, -0.0, 5e-324, -5e-324, 2.2e-308, 1e-160, 1.0, 2.0**100, 1e154, 1.79e308)
_OTHERS: tuple[Any, ...] = (True, False, None, 0, 1, -1, 2**63, 10**400, "r", "", [], {}, [[]], {"array": "q0"})
_SCALARS: tuple[Any, ...] = (*_CELLS, *_OTHERS)


class Storm:
    """Two parties behind their sites, and everything that was ever sent to them."""

    def __init__(self, name: str, seed: int, **trust: Any) -> None:
        self.rng = np.random.default_rng(seed)
        objective: Any = Logistic(row_bound=2.0, rows="clip")
        algorithm, shape = ALGORITHMS[name], Shape(D, D)
        self.plan = federate(
            algorithm, objective, names=["a", "b", "c"], sizes=[N] * 3, shape=shape, spare=3, **trust,
            budget=None,
        )  # fmt: skip
        people = [Identity(each) for each in ("a", "b", "c", "coordinator")]
        secure: dict[str, Any] = {"identity": people[0], "roster": Roster.of(people)} if trust else {}
        # Powers of two: a bound is reached, not approached.
        tables = [np.array([[2.0, 0.0, 0.0, 0.0]]), np.array([[1e300, -1e300, 1e-300, 5e-324]])]
        self.parties = [
            PartyCurator("a", objective, (X, np.array([k])), self.plan, seed=0, **secure)
            for k, X in enumerate(tables)
        ]
        self.sites = [Responder(party.handle, "plan") for party in self.parties]
        self.initial = objective.initial(shape)
        slots = {slot.name for slot in self.plan.schedule.slots}
        setting = type("Setting", (), {
            "objective": objective, "plan": self.plan, "regularizer": objective.regularizer,
            "expected_batch": lambda self, slot: float(N),
        })()  # fmt: skip
        self.asks = [
            (slot, *pack(template(each)[0]))
            for slot, each in algorithm.asks(self.initial, setting)
            if slot in slots
        ]
        self.past: list[bytearray] = []
        self.answered: dict[int, bytes] = {}
        self.made = dict.fromkeys(slots, 0)
        self.runs: set[str] = set()
        self.session, self.number, self.round = os.urandom(16), 0, 0
        self.draws = dict.fromkeys(slots, 0)

    def some(self, choices: Any) -> Any:
        """One of ``choices``."""
        return choices[int(self.rng.integers(len(choices)))]

    def array(self, array: Any) -> Any:
        """An array of the same place and another kind."""
        kind = self.rng.integers(9)
        if kind == 0:
            return array.astype(self.some(["<f4", "<i8", "u1"]))
        if kind == 1:
            return np.append(array.ravel(), 1.0)[: max(0, array.size + int(self.rng.integers(-1, 2)))]
        if kind == 2:
            return np.repeat(array.ravel(), 2)[::2].reshape(array.shape)[..., ::-1]  # strides of its own
        if kind == 3:
            return array.reshape((*array.shape, 1)[:2]) if array.ndim < 2 else array.T
        if kind == 4:
            return np.full(array.shape, self.some(_CELLS))
        if kind == 5:
            return self.rng.choice(_CELLS, size=array.shape)
        return self.rng.normal(size=array.shape)

    def question(self) -> Message:
        """A question of the plan, or what is left of one."""
        rng = self.rng
        slot, fields, arrays = copy.deepcopy(self.some(self.asks))
        if rng.random() < 0.5:
            arrays = {name: rng.normal(size=each.shape) for name, each in arrays.items()}
        words = {
            "run": self.some(["r1", "r1", "r1", "r2"]), "round": self.round, "slot": slot,
            "draw": self.draws[slot], "dim": self.plan.dims[slot], "query": fields,
        }  # fmt: skip
        for _ in range(int(rng.integers(0, 3))):
            kind = rng.integers(8)
            if kind == 0:  # the query of another slot, or its fields in this one
                other = copy.deepcopy(self.some(self.asks))
                words["slot" if rng.random() < 0.5 else "query"] = other[0 if rng.random() < 0.5 else 1]
            elif kind == 1 and arrays:
                name = self.some(list(arrays))
                arrays[name] = self.array(arrays[name])
            elif kind == 2 and len(arrays) > 1:
                values = list(arrays.values())
                arrays = dict(zip(arrays, values[1:] + values[:1], strict=True))
            elif kind == 3:
                words["round"] = self.some([0, self.round - 1, self.round, self.round + 1, 2**61, *_SCALARS])
            elif kind == 4:
                words["draw"] = self.some([0, self.draws[slot] - 1, self.draws[slot], 10**9, *_SCALARS])
            elif kind == 5:
                words[self.some(list(words))] = self.some(_SCALARS)
            elif kind == 6 and isinstance(words.get("query"), dict) and words["query"]:
                words["query"][self.some(list(words["query"]))] = self.some(_SCALARS)
            else:
                words.pop(self.some(list(words)), None)
        return Message(self.some(["ask"] * 40 + ["sum", "meet", "reveal", "prepare", "hello"]), words, arrays)

    def frame(self) -> bytearray:
        """The next frame: a question, a run, or something of the past, whole or cut."""
        rng, choice = self.rng, self.rng.random()
        if choice < 0.1 and self.past:
            return self.some(self.past)  # type: ignore[no-any-return]
        if choice < 0.15:
            self.session, self.number = os.urandom(16), 0
        if choice < 0.25:
            run = self.some(["r1", "r1", "r1", "r2"])
            message = Message("open", {"run": run, "plan": self.plan.digest if rng.random() < 0.9 else "other"})
        elif choice < 0.26:
            message = Message("close", {"run": self.some(["r3", None, 1]), "reason": "enough"})
        else:
            message = self.question()
        try:
            text = encode(message)
        except (WireError, ValueError, TypeError):
            text = bytearray(b"nonsense")
        if rng.random() < 0.02:
            text = text[: int(rng.integers(len(text) + 1))]
        if choice > 0.8 and self.past:
            old = self.some(self.past)
            text = bytearray(body(old)) if rng.random() < 0.1 else text  # an old question under a new number
        self.number += int(rng.choice([1, 1, 1, 1, 0, -1, 10]))
        kind = int(rng.choice([ASK] * 60 + [WHO, FINISH, 0, 255]))
        plan = agreement_of("plan" if rng.random() < 0.98 else "other")
        return Envelope(kind, max(0, self.number), self.session, plan).around(text)

    def send(self) -> str:
        """Send a frame to both; what became of it."""
        frame = self.frame()
        self.past.append(frame)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replies = [decode(bytes(body(site.answer(bytearray(frame))))) for site in self.sites]
        first, second = replies
        assert first.kind == second.kind
        assert {**first.fields} == {**second.fields}, "what is said depends on a record"
        assert not any(party.private_notes for party in self.parties), self.parties[0].private_notes
        if first.kind == "sum":
            self.check(frame, replies)
        return first.kind

    def check(self, frame: bytearray, replies: list[Message]) -> None:
        """The bound, the number of releases, and that a repetition repeats."""
        sums = [reply.arrays["total"] for reply in replies]
        given, t = b"".join(each.tobytes() for each in sums), replies[0].fields["round"]
        if t in self.answered:  # a frame of an answered number, whatever is in it, or the same question
            assert given == self.answered[t], "one round gave two sums"
            return
        self.answered[t], asked = given, decode(bytearray(body(frame)))
        assert (asked.fields["round"], asked.fields["run"]) == (t, replies[0].fields["run"])
        slot = asked.fields["slot"]
        query = unpack(asked.fields["query"], asked.arrays, self.initial)
        if isinstance(query, LocalFit):
            assert length(sums[0] - sums[1]) <= 2.0 * query.bound * (1.0 + 1e-9)
        else:
            assert max(map(length, sums)) <= query.bound * (1.0 + 1e-9), (slot, query)
        self.runs.add(asked.fields["run"])
        assert len(self.runs) == 1
        self.made[slot] += 1
        assert self.made[slot] <= self.plan.limit(slot)
        self.round = max(self.round, t + 1)
        self.draws[slot] = max(self.draws[slot], asked.fields["draw"] + 1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_conversation_in_any_order_takes_no_more_than_the_plan(name: str) -> None:
    storm = Storm(name, seed=7)
    kinds = [storm.send() for _ in range(QUESTIONS)]
    assert kinds.count("sum") > 20
    assert kinds.count("refused") > QUESTIONS // 4
    before = len(storm.answered)
    for party in storm.parties:
        party.handle(encode(Message("close", {"run": party.run, "reason": ""})))
    said = {storm.send() for _ in range(200)}
    assert len(storm.answered) == before, f"a question was answered after the end ({said})"


def test_nothing_escapes_from_masks_either() -> None:
    storm = Storm("dp-srm", seed=3, trust="secure", secure="masks")
    kinds = {storm.send() for _ in range(QUESTIONS)}
    assert kinds <= {"refused", "ready", "closed", "hello", "ok", "confirmed"}, kinds


__all__ = ["folder", "start"]  # fixtures of the other file
STEPS = 25
PLAN = TWO.replace("steps = 300", f"steps = {STEPS}").replace('trust = "curator"', 'trust = "local"')


@pytest.mark.usefixtures("folder")
def test_coordinator_who_wants_more_than_was_approved(start: Any) -> None:
    """300 releases are tried where 25 (and 3 spare) were approved, and every way around the plan's noise."""
    words = two(Path(), PLAN)
    file = read_plan("plan.toml")
    louder = parse_plan(PLAN.replace("epsilon = 1.0", "epsilon = 50.0")).plan
    silent = parse_plan(
        PLAN.replace("spare = 3", "private = false").replace("[budget]\nepsilon = 1.0\ndelta = 1e-5\n", "")
    ).plan
    hostile, party = HostileCoordinator(file, Path("keys")), start(*words["b"])
    for other in (louder, silent):  # two plans, and a plan without noise
        assert "not the one that was approved" in hostile.say("open", run="r0", plan=other.digest).fields["reason"]
    given = 0
    for k in range(12):
        hostile.say("open", run=f"r{k}")
        given += hostile.releases(f"r{k}", 0, STEPS)
    assert given == STEPS
    tricks: list[dict[str, Any]] = [{"clip": 9.0}, {"draw": 0}, {"round": 3}]
    for fields in tricks:
        assert hostile.ask("r0", **{"t": STEPS, **fields}).kind == "refused"
    given += hostile.releases("r0", STEPS, STEPS)
    assert given == STEPS + 3
    hostile.say("close", run="r0", reason="steps", data_dependent=False)
    assert hostile.say("open", run="r99").fields["code"] == "plan"
    hostile.finish("thank you")
    code, _, err = ended(party)
    assert (code, "what the plan costs stays charged" in err) == (1, True)
    assert spent_in(Path("b"), "default", 1e-5) == pytest.approx(file.plan.epsilon(), rel=1e-6)
    # An operator who starts it again in its folder continues that run, and approves no other.
    hostile, party = HostileCoordinator(file, Path("keys")), start(*words["b"])
    assert "one run was approved here" in hostile.say("open", run="r100").fields["reason"]
    assert hostile.ask("r0", 99).kind == "refused"
    hostile.finish("bye")
    assert ended(party)[0] == 1
    assert len(Ledger("b/ledger.jsonl").book().held) == 1


@pytest.mark.usefixtures("folder")
def test_plan_without_noise_runs_and_says_so_everywhere(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = PLAN.replace('trust = "local"', 'trust = "secure"\nsecure = "masks"\nprivate = false')
    words = two(Path(), text.replace("[budget]\nepsilon = 1.0\ndelta = 1e-5\n", ""))
    capfd.readouterr()
    assert main(["federate", "show", "plan.toml"]) == 0
    shown = capfd.readouterr().out
    assert "NOT PRIVATE" in shown
    assert "times that of a trusted curator" not in shown
    assert main(["federate", *words["b"], "--cap-epsilon", "1"]) == 1
    assert "no cap can hold" in capfd.readouterr().err
    running = [start(*words[name]) for name in ("server", "a", "b")]
    for process in running:
        code, out, err = ended(process)
        assert code == 0, err
        assert "NOT PRIVATE" in out
        assert "NOT PRIVATE" in err
    for name in ("model", "a", "b"):
        privacy = json.loads((Path(name) / "result.json").read_text())["privacy"]
        assert (privacy["is_private"], privacy["epsilon"]) == (False, None)
        assert privacy["adversary"].startswith("nobody: NOT PRIVATE")
        assert not (Path(name) / "ledger.jsonl").exists()
    np.testing.assert_array_equal(qg.load("a").params, qg.load("model").params)
