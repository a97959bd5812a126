"""A run's privacy statement in words: guarantee, releases, assumptions, and what is not covered.

Everything here comes from a saved result and its ledger. Nothing is computed from data.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietgrad.assurance.report.spending import LESS_THAN_SUM
from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import PrivacyUnit, Relation
from quietgrad.core.errors import LedgerError, UnprovableError
from quietgrad.core.files import read_json
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.mechanisms import from_json as mechanism_from
from quietgrad.core.plans.schedule import DECLARED, Slot
from quietgrad.core.session.statement import Privacy
from quietgrad.methods.result import Result, digest_of

RELATION_WORDS = {
    Relation.ADD_REMOVE: "Two data sets are neighbours if one has a single record more than the other. "
    "The number of records itself is protected, unless it was declared public.",
    Relation.REPLACE_ONE: "Two data sets are neighbours if they have the same number of records and differ in the "
    "content of a single one. The number of records is public.",
}
PARTY_WORDS = {
    Relation.ADD_REMOVE: "Two federations are neighbours if they have the same members, and one member that holds "
    "data in the one holds none in the other. Who the members are is public.",
    Relation.REPLACE_ONE: "Two federations are neighbours if they have the same members, one of which holds other "
    "data, whatever and how many. Who the members are is public.",
}
AUDIT_FILE = "audit.json"
UNIT_WORDS = {
    Relation.ADD_REMOVE: "C is the unit of each release: one record more or less moves what is released by "
    "at most C, in L2 norm, before noise",
    Relation.REPLACE_ONE: "C is the unit of each release: one record replaced by any other moves what is released "
    "by at most 2 C, in L2 norm, before noise",
}
_ACCOUNTANTS = {
    "gaussian-exact": "exact composition of Gaussian releases (nothing is lost)",
    "pld-poisson": "privacy-loss distributions, Poisson-sampled Gaussian releases",
    "pld-random-allocation": "privacy-loss distributions, every record in one secret step of each epoch",
    "pld-fixed-size": "privacy-loss distributions, fixed-size batches without replacement",
    "pld": "privacy-loss distributions",
    "zcdp": "zero-concentrated differential privacy",
    "rdp": "Rényi differential privacy",
    "pure": "pure ε-differential privacy, which holds with δ = 0",
}
_COMPOSITION = {
    "sequential": "All releases are about the same people and compose adaptively.",
    "parallel": "Each record takes part in one release only, so the worst release counts.",
    "filter": "Noise levels were chosen during the run under a hard zCDP filter on their total.",
}
_SAMPLING = {
    "full": "every record",
    "poisson": "Poisson, rate {rate:.4g}",
    "random-allocation": "one of {steps_per_epoch} steps of each epoch, drawn in secret",
    "fixed-size": "{batch_size} of {n}, without replacement",
    "single-pass": "{batch_size} fresh records",
    "turns": "one of {cohorts} cohorts, in turn",
    "self-sampled": "drawn by each party for itself, rate {rate:.4g}",
    "coordinator-sampled": "drawn by the coordinator, rate {rate:.4g}, at most {most_rounds} times a party",
    "poisson-turns": "one of {cohorts} cohorts, in turn; of it Poisson, rate {rate:.4g}",
}
_SECRET = ("poisson", "random-allocation", "fixed-size", "poisson-turns", "self-sampled")
_RELEASE_WORDS = {
    "count": "the number of records",
    "labels": "counts of labels, of which the frequent ones leave",
    "ranges": "how many values each feature has per sign and order of magnitude",
    "offsets": "where each feature's values lie within its order of magnitude",
    "octaves": "the mean order of magnitude of each feature",
    "targets": "the order of magnitude of the target",
    "target-bins": "where the targets lie within their range",
    "norms": "how long rows are",
    "constant": "the gradient of the constant term",
    "mean": "the mean of each feature",
    "centred-norms": "how far rows are from the mean",
    "second-moments": "second moments of the features",
    "score": "the gradient at the fitted model, for standard errors",
    "information": "the curvature at the fitted model, for standard errors",
    "dispersion": "the spread of the residuals, for standard errors",
    "gradient": "the gradient of the loss",
    "first": "the gradient at the start",
    "next": "the gradient, and its change since the step before",
    "o1": "the gradient on a new sample",
    "o2": "the change of the gradient since the step before",
    "warm": "the gradient, in steps before the method's own",
    "length": "the choice of a step length",
    "model": "the trained model itself",
    "update": "the clients' updates",
    "evaluation": "a table of scores",
    "norm": "the norm of the gradient",
    "curvature": "the curvature of the loss",
    "select": "the choice among candidates",
    "round": "one round of a private search",
    "cells": "how many records lie in each bin of each feature",
    "shapes": "the shape of each feature's effect",
    "pairs": "which pairs of features act together",
    "stages": "the gradient of each stage",
    "stage": "the gradient of one stage",
    "stretch": "the gradient under one noise level",
}
_PROTECTED = {
    PrivacyUnit.RECORD: "one person's record",
    PrivacyUnit.PERSON: "one person, with all their records",
    PrivacyUnit.PARTY: "one party, with all that it holds",
}
_UNIT = {
    PrivacyUnit.RECORD: (
        "One person is one record. A person with k records is protected only at the k-fold group level."
    ),
    PrivacyUnit.PERSON: (
        "The ids that were given say which records are one person's. A person with several ids is protected as "
        "each of them."
    ),
    PrivacyUnit.PARTY: (
        "One party is a member with all that it holds. The list of members is public. A person whose data "
        "several of them hold is protected only at the group level of so many parties."
    ),
}
_ASSUMPTIONS = (
    "The roles called trusted above published nothing else; the guarantee covers what was released.",
    "Noise and samples came from a cryptographic generator with a fresh secret key, which was destroyed.",
    "Everything in the configuration (bounds, classes, vocabularies, step sizes) was chosen without these records.",
)
SCORES = (
    "Scores marked “private records” or “held out”: they were computed without noise, and held-out people are "
    "people. The section “On held-out people, privately” has a statement of its own."
)
NOT_COVERED = (
    "Hyper-parameter search: earlier runs on the same people spend privacy too. "
    "They count only if they are in the ledger under the same account.",
    SCORES,
    "Side channels: running time, memory, crash messages and log files of the training machine.",
    "Facts about groups or the population: the model is meant to learn them.",
)


@dataclass(frozen=True)
class ReleaseRow:
    """One row of the table of releases."""

    name: str
    made: int
    allowed: int
    sampling: str
    amplification: str
    sensitivity: str
    noise: str
    multiplier: str
    meaning: str = ""
    """What is released, in words."""


@dataclass(frozen=True)
class AccountTotal:
    """The total that all runs of an account have spent in its ledger."""

    file: str
    account: str
    runs: int
    epsilon: float | None
    cap: float | None
    whole: bool
    reserved_at: str | None
    delta: float | None = None
    """δ at which ε is stated: the cap's, else what was asked for the run, its score included."""
    relation: str = ""

    @property
    def note(self) -> str:
        """Why ε of several runs together is not the sum of theirs."""
        return LESS_THAN_SUM if self.runs > 1 and self.epsilon is not None else ""


@dataclass(frozen=True)
class PrivacyReport:
    """A result's privacy statement, ready to be printed."""

    releases: tuple[ReleaseRow, ...]
    composition: str
    account: AccountTotal | None
    protected: str
    """What an attacker learns little about."""
    relation_words: str
    """The neighbouring relation in words."""
    unit_words: str
    """What C means, which is not the same under the two relations."""
    accountant_words: str
    samplers: tuple[str, ...]
    """How records are drawn; releases that draw alike share a line."""
    best_guess: float | None
    """The most often that an attacker with 5 % false alarms can detect one record."""


def assumptions(privacy: Iterable[Privacy]) -> tuple[str, ...]:
    """Return the assumptions that the statements of some runs rest on."""
    units = dict.fromkeys(one.unit for one in privacy)
    return (*(_UNIT[unit] for unit in units), *_ASSUMPTIONS)


def detection(epsilon: float, delta: float, false_alarms: float) -> float:
    """The largest true-positive rate that (ε, δ)-DP leaves to any test with that many false alarms.

    min{e^ε·α + δ, 1 − e^(−ε)(1 − δ − α)}, from the two orders of the neighbours.

    >>> round(detection(1.0, 1e-5, 0.05), 3), detection(0.0001, 1e-5, 0.05) < 0.0501
    (0.136, True)
    """
    epsilon = min(epsilon, 700.0)
    upper = math.exp(epsilon) * false_alarms + delta
    return min(1.0, upper, 1.0 - math.exp(-epsilon) * (1.0 - delta - false_alarms))


def privacy_report(result: Result, ledger: Path | None) -> PrivacyReport:
    """Describe a saved result; ``ledger`` is the file its cost was reserved in, if any."""
    privacy, unit = result.privacy, result.privacy.unit
    composition = _COMPOSITION.get(str(result.details.get("composition", "sequential")), "")
    for slot in result.details.get("slots", ()):
        together = mechanism_from(slot.get("mechanism", "gaussian")).together
        composition = f"{together[0].upper()}{together[1:]}." if together else composition
    relation_words = unit_words = ""
    if privacy.relation is not None:
        unit_words = unit.in_words(UNIT_WORDS[privacy.relation])
        relation_words = unit.in_words(RELATION_WORDS[privacy.relation])
        if unit is PrivacyUnit.PARTY:
            relation_words = PARTY_WORDS[privacy.relation]
    if relation_words and unit is PrivacyUnit.PERSON:
        declared = any(str(note).endswith(DECLARED) for note in privacy.notes)
        secret = "" if declared else "; how many is not public"
        relation_words += f" A person includes all the records about them, however many{secret}."
    protected = _PROTECTED[unit]
    best_guess = None
    if privacy.epsilon is not None and privacy.delta is not None:
        best_guess = detection(privacy.epsilon, privacy.delta, 0.05)
    accountant = privacy.accountant or ""
    samplers = sampler_words(privacy.sampling, [str(slot["name"]) for slot in result.details.get("slots", ())])
    return PrivacyReport(
        _releases(result), unit.in_words(composition), _account(result, ledger), protected, relation_words,
        unit_words, _ACCOUNTANTS.get(accountant, accountant), samplers, best_guess,
    )  # fmt: skip


def audit_of(folder: Path, privacy: Privacy) -> dict[str, Any] | None:
    """Read what ``quietgrad audit RUN`` left in the folder of a run, if it is of this claim."""
    try:
        entry = read_json(folder / AUDIT_FILE)
        if entry["result"] != digest_of(folder) or entry["verdict"] not in ("pass", "violation", "vacuous"):
            return None  # of a run that was here before, or not an audit
        numbers = {key: float(entry[key]) for key in ("epsilon_lower", "epsilon_claimed", "confidence")}
        audit = {**numbers, "runs": int(entry["runs"]), "verdict": entry["verdict"]}
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    same = privacy.epsilon is not None and math.isclose(numbers["epsilon_claimed"], privacy.epsilon, rel_tol=1e-3)
    return audit if same else None


def _releases(result: Result) -> tuple[ReleaseRow, ...]:
    privacy = result.privacy
    factor = None if privacy.relation is None else sensitivity_factor(privacy.relation)
    sensitivity = "–" if factor is None else "C" if factor == 1.0 else f"{factor:g} C"
    slots = {slot["name"]: slot for slot in result.details.get("slots", ())}
    rows = []
    for name, release_count in privacy.releases.items():
        slot = slots.get(name, {})
        sampling, mechanism = slot.get("sampling", {}), mechanism_from(slot.get("mechanism", "gaussian"))
        noise, multiplier, amplification = "none", "0", "none"
        if privacy.epsilon is not None:
            scale = Slot.from_json(slot).multiplier(privacy.noise_multiplier) if slot else privacy.noise_multiplier
            filtered = result.details.get("composition") == "filter"
            noise = "chosen per release" if filtered else mechanism.stated(scale)
            multiplier = "varies" if filtered else f"{scale:.4g}"
        counted = result.details.get("counted")
        if name == "count" and counted is not None:  # made before the plan, with noise of its own
            sampling, scale = {"sampling": "full"}, float(counted["noise_multiplier"])
            noise = f"Gaussian, σ = {scale:.4g} C" if counted["gaussian"] else f"Laplace, scale {scale:.4g} C"
            multiplier = f"{scale:.4g}"
        if sampling.get("sampling") == "single-pass":
            amplification = "no record is used twice"
        elif sampling.get("sampling") in _SECRET and not mechanism.whole_run and sampling.get("rate") != 1.0:
            amplification = "by secret sampling"
        how = privacy.unit.in_words(sampling_words(sampling)), privacy.unit.in_words(amplification)
        planned, words = slot.get("count", release_count), privacy.unit.in_words(release_words(name))
        rows.append(ReleaseRow(name, release_count, planned, *how, sensitivity, noise, multiplier, words))
    return tuple(rows)


def release_words(name: str) -> str:
    """What a release is about, by its name in the plan; empty for a name that a program chose for itself.

    >>> release_words("offsets-2"), release_words("mine")
    ("where each feature's values lie within its order of magnitude, estimate 2", '')
    """
    if name in _RELEASE_WORDS:
        return _RELEASE_WORDS[name]
    if name.startswith("lines-"):  # of the straight lines that an additive model fits first
        words = release_words(name.removeprefix("lines-"))
        return f"{words}; first fit, by straight lines" if words else ""
    start, _, number = name.rpartition("-")
    words = _RELEASE_WORDS.get(start, "")
    if not (words and number.isdecimal()):
        return ""
    return f"{words}, {'estimate' if start == 'offsets' else 'number'} {number}"


def sampler_words(sampling: str, names: Sequence[str]) -> tuple[str, ...]:
    """A statement's sampling with equal samplers said once.

    >>> sampler_words("a: every record; b: every record; c: one batch; drawn in secret", ("a", "b", "c"))
    ('a, b: every record', 'c: one batch; drawn in secret')
    >>> sampler_words("a: every record; b: every record", ("a", "b"))
    ('every record',)
    """
    name_pattern = "|".join(re.escape(name) for name in names)
    parts = re.split(rf"(?:^|; )({name_pattern}): ", sampling) if name_pattern else [sampling]
    if parts[0] or len(parts) < 3:
        return (sampling,)
    groups: dict[str, list[str]] = {}
    for name, words in zip(parts[1::2], parts[2::2], strict=True):
        groups.setdefault(words, []).append(name)
    if len(groups) == 1:
        return tuple(groups)
    return tuple(f"{', '.join(names)}: {words}" for words, names in groups.items())


def sampling_words(sampling: Mapping[str, object]) -> str:
    """A sampling scheme in a few words.

    >>> sampling_words({"sampling": "poisson", "rate": 0.01})
    'Poisson, rate 0.01'
    """
    kind = str(sampling.get("sampling", "as stated above"))
    return _SAMPLING[kind].format(**sampling) if kind in _SAMPLING else kind


def _account(result: Result, file: Path | None) -> AccountTotal | None:
    privacy = result.privacy
    if file is None or not file.exists() or privacy.account is None or privacy.delta is None:
        return None
    ledger = Ledger(file)
    try:
        whole, book = ledger.verify().ok, ledger.book()
    except LedgerError:
        return AccountTotal(file.name, privacy.account, 0, None, None, False, None)
    mine = book.find(str(result.details.get("run")))
    name = privacy.account if mine is None else mine.reservation.account
    held, cap, epsilon = book.of(name), book.cap(name), None
    delta = privacy.delta if mine is None else book.stated_delta(name, str(result.details.get("run")))
    relation = (privacy.relation or "add-remove") if cap is None else cap.relation
    # Runs under different relations have no common ε; the page says so.
    with contextlib.suppress(UnprovableError):
        epsilon = ledger.spent(name, delta=delta, relation=relation).epsilon
    last = f"{held[-1].time[:16].replace('T', ' ')} UTC" if held else None
    limit = None if cap is None else cap.epsilon
    return AccountTotal(
        file.name, privacy.account, book.runs(name), epsilon, limit, whole, last, delta, str(relation)
    )
