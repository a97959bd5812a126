"""Held-out records of a run: who they are, what a private score of them costs, and that they were not trained on.

A record is held out by a keyed hash of itself (or of its person's id). So its side does not depend on the other
records, neighbouring tables have neighbouring parts, and a resumed run finds the same split.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.files import read_bytes, read_json, write_atomically

if TYPE_CHECKING:
    from quietgrad.cli.run_spec import RunSpec
    from quietgrad.data import Dataset
    from quietgrad.estimators.scoring import PrivateScore
    from quietgrad.privacy.budget import Budget

_TRAINED = ".trained"
"""In a run's folder, for its owner alone: keyed digests of the records that were trained on."""
TOO_NOISY = 0.1
"""A score whose error would be larger is not released."""
_DIGEST = 8  # bytes
_EDGE = 1e-3  # of a declared range
_SURE = 6.0  # deviations: a false alarm in a billion tables
TRAINING_PEOPLE = "training people: this score is of records that the model was trained on, not of held-out ones"


def _digests(X: Any, y: Any, ids: Any, key: bytes) -> npt.NDArray[np.uint64]:
    """One keyed digest per record, of its features and label, or of its person's id."""
    if ids is not None:
        rows: Any = (str(one).encode() for one in ids)
    elif hasattr(X, "indptr"):
        rows = (
            X.indices[a:b].tobytes() + X.data[a:b].tobytes() + np.float64(label).tobytes()
            for a, b, label in zip(X.indptr[:-1], X.indptr[1:], y, strict=True)
        )
    else:
        table = np.ascontiguousarray(np.column_stack([np.asarray(X, np.float64), np.asarray(y, np.float64)]))
        rows = (row.tobytes() for row in table)
    words = b"".join(hashlib.blake2b(row, digest_size=_DIGEST, key=key).digest() for row in rows)
    return np.frombuffer(words, np.uint64)


def hold_out_records(data: Dataset, share: float, key: str) -> Dataset:
    """The data set with a share of its records (of its people, if it has ids of them) held out."""
    if not 0.0 < share < 1.0:
        raise ValueError(f"holdout={share:g}: must be between 0 and 1, such as 0.2.")
    if data.X_test is not None:
        raise DataError(f"{data.name}: has held-out records of its own; leave --holdout out.")
    aside = _digests(data.X, data.y, data.person, bytes.fromhex(key)) < np.uint64(int(share * 2**64))
    if aside.all() or not aside.any():
        raise DataError(f"{data.name}: has too few records to hold some out; give --test.")
    person = None if data.person is None else data.person[~aside]
    return replace(
        data, X=data.X[~aside], y=data.y[~aside], X_test=data.X[aside], y_test=data.y[aside], person=person,
        person_test=None if data.person is None else data.person[aside],
        notes=(*data.notes, f"held out: each record with probability {share:g}, by a keyed hash of itself"),
    )  # fmt: skip


def remember_trained(folder: Path, data: Dataset) -> None:
    """Keep keyed digests of the training records in the run's folder, readable by its owner alone."""
    key = secrets.token_bytes(32)
    marks = np.sort(_digests(data.X, data.y, data.person, key))
    kind = b"p" if data.person is not None else b"r"
    write_atomically(folder / _TRAINED, kind + key + marks.tobytes(), private=True)


def were_trained_on(folder: Path, X: Any, y: Any, ids: Any) -> bool:
    """Whether records are of people the run was trained on.

    With ids, one person in common is enough. Without, records of different people may be equal, so the share of
    known records is held against Good and Turing's estimate of it for new people: 1 − (records met once)/n.
    """
    path = folder / _TRAINED
    if not path.exists():
        return False
    content = read_bytes(path)
    kind, key, known = content[:1], content[1:33], np.frombuffer(content[33:], np.uint64)
    by_id = kind == b"p"
    if by_id and ids is None:
        return False
    marks = _digests(X, y, ids if by_id else None, key)
    met = float(np.isin(marks, known).mean())
    if by_id:
        return met > 0.0
    _, counts = np.unique(known, return_counts=True)
    usual = 1.0 - float((counts == 1).sum()) / len(known)
    spread = math.sqrt(max(usual * (1.0 - usual), 1.0 / len(known)) * (1.0 / len(marks) + 1.0 / len(known)))
    return met > usual + _SURE * spread


def expected_error(n: float, budget: Budget, *, classes: int) -> float:
    """About how uncertain a private accuracy (R² if there are no classes) of ``n`` people is, by n and ε alone.

    >>> from quietgrad.privacy.budget import Budget
    >>> round(expected_error(10_000, Budget(0.3, 1e-6), classes=2), 3)
    0.009
    """
    from quietgrad.privacy.accounting import sensitivity_factor
    from quietgrad.privacy.closed_form_accountants import gaussian_mu

    n = max(n, 1.0)
    noise = sensitivity_factor(budget.relation) / gaussian_mu(budget.epsilon, budget.delta)
    if classes == 0:
        return math.hypot(2.0 * 12.0 * noise / n, 1.0 / math.sqrt(n))
    bins = (10 if n < 5000 else 20) if classes == 2 else classes
    groups = 1.0 if classes == 2 else math.sqrt(2.0)
    return math.hypot(groups * noise * math.sqrt(bins) / n, 0.5 / math.sqrt(n))


def held_out_score(spec: RunSpec, out: Path, data: Dataset, model: Any, n: float) -> PrivateScore | str:
    """A private score of the run's held-out records, paid by its account; or why none was released."""
    from quietgrad.estimators.scoring import private_score

    promise = spec.score_budget()
    assert promise is not None
    expected = n * (spec.holdout or 0.2) / (1.0 - (spec.holdout or 0.2))
    classes = 0 if data.classes is None else len(data.classes)
    error = expected_error(expected, promise, classes=classes)
    if error > TOO_NOISY:
        return (
            f"not released: at this n and ε = {promise.epsilon:.3g} its error would be about ± {error:.1g}; hold "
            "out more, or give the score more of ε (--score-share). This share of ε was not spent"
        )
    y = data.y_test
    assert y is not None
    labels = y if classes == 0 else np.asarray(model.classes_)[y.astype(int)]
    return private_score(
        model, data.X_test, labels, epsilon=promise.epsilon, delta=promise.delta, relation=promise.relation,
        ledger=spec.ledger_in(out), account=spec.account, cap=spec.cap(), person=data.person_test,
    )  # fmt: skip


def clipped_features(details: Mapping[str, Any]) -> list[str]:
    """Features whose privately found range is one end of the declared one: it clips nearly every record.

    >>> clipped_features({"feature_range": [[0.0, 1.0], [0.9, 1.0]], "model": {"feature_names": ["a", "b"]},
    ...                   "declared": [[0, 1], [0, 1]]})
    ['b']
    """
    found, names = details.get("feature_range"), (details.get("model") or {}).get("feature_names")
    declared = details.get("declared")
    if found is None or not names or declared is None:
        return []
    low, high = np.asarray(found[0], float), np.asarray(found[1], float)
    if len(low) != len(names) or len(declared) != len(names):
        return []
    ends = [
        (pair is not None) and (a >= 1.0 - _EDGE or b <= _EDGE)
        for pair, a, b in zip(declared, low, high, strict=True)
    ]
    return [str(name) for name, at_end in zip(names, ends, strict=True) if at_end]


def metrics_of(score: PrivateScore) -> dict[str, Any]:
    """A private score as the metrics of a result: values, errors, and what always saying one class would score."""
    found: dict[str, Any] = {}
    for name in ("accuracy", "auc", "log_loss", "r2", "rmse", "mae"):
        if (value := getattr(score, name)) is not None:
            key = "test_loss" if name == "log_loss" else f"test_{name}"
            found |= {key: float(value[0]), f"{key}_error": float(value[1])}
    if score.confusion is not None:
        shares = np.asarray(score.confusion).sum(axis=1)
        found["majority_accuracy"] = float(np.clip(shares.max(), 0.0, 1.0))
    where = f"held-out records, with noise (ε = {score.privacy.epsilon:.4g})"
    return {**found, "private": True, "computed_on": dict.fromkeys(found, where)}


def save_score(score: PrivateScore, folder: Path, people: str) -> None:
    """Write the score beside its run, with the people it is of: "held-out" or "training"."""
    path = score.save(folder)
    said = {**read_json(path), "people": people}
    write_atomically(path, (json.dumps(said, indent=1) + "\n").encode())
