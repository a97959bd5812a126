"""Held-out records of a run: who they are, what a private score of them costs, and that they were not trained on.

Under add-remove a record is held out by a keyed hash of itself (or of its person's id), under replace-one by its
position. So its side does not depend on the other records, neighbouring tables have neighbouring parts, and a
resumed run finds the same split.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from quietgrad.cli.options import say
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.files import read_bytes, read_json, write_atomically
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.core.ledger.state import fingerprint
from quietgrad.data.dataset import Dataset, Labels, Matrix, public_order
from quietgrad.methods.score_noise import TOO_NOISY, score_text
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.range_queries import FeatureBox

if TYPE_CHECKING:
    from quietgrad.cli.run_spec import RunSpec
    from quietgrad.data.scanning import Scan
    from quietgrad.estimators.scoring import PrivateScore

Details: TypeAlias = Mapping[str, Any]  # what a result.json holds
_TRAINED = ".trained"
"""In a run's folder: the name under which its owner keeps digests of the records that were trained on."""
_DIGEST = 8  # bytes
_MOST_NAMES = 10  # of classes in one line
_EDGE = 0.02  # of a declared range
_SURE = 6.0  # deviations: a false alarm in a billion tables
TRAINING_PEOPLE = "training people: this score is of records that the model was trained on, not of held-out ones"


Ids: TypeAlias = npt.NDArray[np.generic] | None


def _digests(X: Matrix, y: Labels, ids: Ids, key: bytes) -> npt.NDArray[np.uint64]:
    """One keyed digest per record, of its features and label, or of its person's id."""
    rows: Iterable[bytes]
    if ids is not None:
        rows = (str(one).encode() for one in ids)
    elif not isinstance(X, np.ndarray):
        rows = (
            X.indices[a:b].tobytes() + X.data[a:b].tobytes() + np.float64(label).tobytes()
            for a, b, label in zip(X.indptr[:-1], X.indptr[1:], y, strict=True)
        )
    else:
        table = np.ascontiguousarray(np.column_stack([np.asarray(X, np.float64), np.asarray(y, np.float64)]))
        rows = (row.tobytes() for row in table)
    words = b"".join(hashlib.blake2b(row, digest_size=_DIGEST, key=key).digest() for row in rows)
    return np.frombuffer(words, np.uint64)


def hold_out_records(data: Dataset, share: float, key: str, *, fixed: bool) -> Dataset:
    """The data set with a share of its records (of its people, if it has ids of them) held out.

    ``fixed`` holds out a fixed number by position: under replace-one the sizes of both parts are public.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"holdout={share:g}: must be between 0 and 1, such as 0.2.")
    if data.X_test is not None:
        raise DataError(f"{data.name}: has held-out records of its own; leave --holdout out.")
    if fixed and data.person is not None:
        raise DataError(
            "--holdout: under replace-one it splits records only, because replacing one person could move others "
            "to the other side. Use --relation add-remove, or give held-out people with --test."
        )
    if fixed:  # n is public, and a record that replaces another has its place
        aside = np.isin(np.arange(data.n), public_order(data.n, int(key, 16))[: int(share * data.n)])
    else:
        secret = bytes.fromhex(key)
        coins = _digests(data.X, data.y, data.person, secret)
        if data.person is None and len(np.unique(coins)) < len(coins):
            # Records that are equal have a coin each, by how many such came before.
            marks, seen = coins, Counter[int]()
            coins = marks.copy()
            for row, mark in enumerate(marks.tolist()):
                if before := seen[mark]:
                    said = marks[row].tobytes() + before.to_bytes(8, "little")
                    word = hashlib.blake2b(said, digest_size=_DIGEST, key=secret).digest()
                    coins[row] = np.frombuffer(word, np.uint64)[0]
                seen[mark] += 1
        aside = coins < np.uint64(int(share * 2**64))
    person = None if data.person is None else data.person[~aside]
    return replace(
        data, X=data.X[~aside], y=data.y[~aside], X_test=data.X[aside], y_test=data.y[aside], person=person,
        person_test=None if data.person is None else data.person[aside],
        notes=(*data.notes, f"held out: {share:.0%} of records {'by position' if fixed else 'by a keyed hash'}"),
    )  # fmt: skip


def remember_trained(folder: Path, data: Dataset) -> None:
    """Keep keyed digests of the training records beside this user's keys; the run's folder has their name alone.

    A copy of the folder tells nothing of the records, not even how many there are.
    """
    salt = secrets.token_bytes(32)
    kept, key = _kept_marks(salt)
    marks = np.sort(_digests(data.X, data.y, data.person, key))
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(kept, (b"r" if data.person is None else b"p") + marks.tobytes(), private=True)
    write_atomically(folder / _TRAINED, salt, private=True)


def _kept_marks(salt: bytes) -> tuple[Path, bytes]:
    """Where this user keeps the digests of a run, and the key that they are made with."""
    key = bytes.fromhex(fingerprint([b"trained", salt]))
    return KeyFile.directory().parent / "trained" / salt[:16].hex(), key


def were_trained_on(folder: Path, X: Matrix, y: Labels, ids: Ids) -> bool:
    """Whether records are of people the run was trained on.

    With ids, one person in common is enough. Without, records of different people may be equal, so the share of
    known records is held against Good and Turing's estimate of it for new people: 1 − (records met once)/n.
    """
    path = folder / _TRAINED
    if not path.exists():
        return False
    kept, key = _kept_marks(read_bytes(path))
    if not kept.exists():  # another user's run, or another machine's
        return False
    content = read_bytes(kept)
    kind, known = content[:1], np.frombuffer(content[1:], np.uint64)
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

    >>> from quietgrad.core.accounting.budget import Budget
    >>> round(expected_error(10_000, Budget(0.3, 1e-6), classes=2), 3)
    0.008
    """
    n = max(n, 1.0)
    noise = sensitivity_factor(budget.relation) / gaussian_mu(budget.epsilon, budget.delta)
    if classes == 0:
        return math.hypot(2.0 * 12.0 * noise / n, 1.0 / math.sqrt(n))
    bins = (10 if n < 5000 else 20) if classes == 2 else classes
    groups = 1.0 if classes == 2 else math.sqrt(2.0)
    return math.hypot(groups * noise * math.sqrt(bins) / n, 0.5 / math.sqrt(n))


def held_out_score(spec: RunSpec, out: Path, data: Dataset, n: float) -> PrivateScore | str:
    """A private score of the run's held-out records, paid by its account; or why none was released."""
    from quietgrad import estimators  # loads scikit-learn

    model = estimators.from_run(out)
    model.__dict__.pop("feature_names_in_", None)  # names were compared when the file was read
    guarantee = spec.budget(of_score=True)
    assert guarantee is not None
    classes = 0 if data.classes is None else len(data.classes)
    if spec.holdout is not None:  # how many a --test file holds is a secret until the score counts them
        error = expected_error(n * spec.holdout / (1.0 - spec.holdout), guarantee, classes=classes)
        if error > TOO_NOISY:
            return (
                f"not released: at this n and ε = {guarantee.epsilon:.3g} its error would be about ± {error:.1g}; "
                "hold out more, or give the score more of ε (--score-share). This share of ε was not spent"
            )
    if not classes and data.label_bounds is None and not np.isfinite(model.target_range_).all():
        return "not released: its error needs public bounds of the target; declare them in a schema"
    try:
        return estimators.private_score(
            model, data.X_test, data.targets_test, epsilon=guarantee.epsilon, delta=guarantee.delta,
            relation=guarantee.relation, account=spec.payer(out), person=data.person_test,
            target_bounds=data.label_bounds,
        )  # fmt: skip
    except BudgetError as refused:  # the model is trained and paid for: it is not undone for want of a score
        return f"not released: {refused}"


def clipped_features(details: Details) -> list[str]:
    """Bounded features whose noisy mean, which the fit paid for, is one end of their declared [0, 1].

    >>> told = {"feature_means": [0.5, 0.999], "feature_mean_errors": [0.001, 0.001], "bounded": ["a", "b"]}
    >>> clipped_features({**told, "model": {"feature_names": ["a", "b"]}})
    ['b']
    """
    means, errors = details.get("feature_means"), details.get("feature_mean_errors")
    names, bounded = (details.get("model") or {}).get("feature_names"), details.get("bounded") or ()
    if means is None or not names or len(means) != len(names):
        return []
    at_an_end = [
        mean - 3.0 * error > 1.0 - _EDGE or mean + 3.0 * error < _EDGE
        for mean, error in zip(means, errors or (), strict=True)
    ]
    return [name for name, end in zip(names, at_an_end, strict=True) if end and name in bounded]


def score_rows(score: PrivateScore) -> list[tuple[str, str]]:
    """Every number of a score with its error, or that it is too noisy."""
    rows = [(name, score_text(*number)) for name, number in score.stated.items()]
    rows += [(name, score_text(None, error)) for name, error in score.too_noisy.items()]
    return [(name.replace("_", " "), text) for name, text in rows]


def metrics_of(score: PrivateScore) -> dict[str, Any]:
    """A private score as the metrics of a result: values, errors, and what always saying one class would score."""
    found: dict[str, Any] = {}
    for name, (value, error) in score.stated.items():
        found |= {_metric(name): float(value), f"{_metric(name)}_error": float(error)}
    if score.confusion is not None and "accuracy" in score.stated:
        shares = np.asarray(score.confusion).sum(axis=1)
        found["majority_accuracy"] = float(np.clip(shares.max(), 0.0, 1.0))
    where = f"held-out records, with noise (ε = {score.privacy.epsilon:.4g})"
    noisy = {_metric(name): error for name, error in score.too_noisy.items()}
    return {**found, "too_noisy": noisy, "private": True, "computed_on": dict.fromkeys(found, where)}


def _metric(name: str) -> str:
    return "test_loss" if name == "log_loss" else f"test_{name}"


def save_score(score: PrivateScore, folder: Path, people: str) -> None:
    """Write the score beside its run, with the people it is of: "held-out" or "training"."""
    path = score.save(folder)
    said = {**read_json(path), "people": people}
    write_atomically(path, (json.dumps(said, indent=1) + "\n").encode())


def say_undeclared(data: Dataset) -> None:
    """Tell the owner of the records, on the terminal alone, of labels that are none of the classes.

    A refusal would tell others that there are such labels, and so would anything that is stored: this is neither.
    """
    if data.class_labels is None:
        return
    count = data.X.undeclared() if isinstance(data, ScannedData) else data.undeclared
    if not count:
        return
    held_out = 0 if data.X_test is None or isinstance(data, ScannedData) else data.X_test.shape[0]
    rows, names = data.X.shape[0] + held_out, data.class_labels.names
    known = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
    whose = "No label is" if count == rows else f"{count} of {rows} labels are not"
    say(
        f"{data.name}: {whose} among the classes {known}; such labels count as {names[0]!r}. Nothing is charged "
        "yet: stop here if that is not meant.\n(For the records' owner: only this terminal shows it, and no file.)",
        err=True,
    )


def exact_scores(model: Any, data: Dataset) -> dict[str, Any]:
    """Scores of a fitted estimator on the held-out records, without noise; nothing if there are no such records."""
    if data.X_test is None or data.targets_test is None:
        return {}
    truth, answers = data.targets_test, np.asarray(model.predict(data.X_test))
    if data.class_labels is None:
        found = {"test_rmse": float(np.sqrt(np.mean((answers - truth) ** 2)))}
    else:
        known = ClassLabels.of(model.classes_)
        found = {"test_accuracy": float(np.mean(known.agree(answers, truth)))}
        if hasattr(model, "predict_proba"):
            own = np.take_along_axis(model.predict_proba(data.X_test), known.encode_known(truth)[:, None], axis=1)
            found["test_loss"] = float(-np.mean(np.log(np.maximum(own, 1e-300))))
    return {**found, "private": False, "computed_on": dict.fromkeys(found, HELD_OUT)}


HELD_OUT = "held-out records, without noise"
TRAINING = "private training records, without noise"


def plain_scores(
    objective: LinearObjective, params: npt.NDArray[np.float64], data: Dataset, frame: FeatureBox | None, *,
    test: bool, train: bool,
) -> dict[str, Any]:  # fmt: skip
    """Scores without noise on the held-out part, if there is one and ``test`` says so, and likewise for ``train``.

    ``frame`` is the box that the model keeps rows and predictions in. ``"private": false`` marks all scores;
    ``"computed_on"`` says whose records each was computed on.
    """
    metrics: dict[str, Any] = {}
    where: dict[str, str] = {}
    if test and data.X_test is not None:
        scores = _scores_on(objective, params, data.X_test, data.y_test, data.task, frame)
        metrics |= {f"test_{name}": value for name, value in scores.items()}
        where |= {f"test_{name}": HELD_OUT for name in scores}
    if train:
        scores = _scores_on(objective, params, data.X, data.y, data.task, frame)
        records = objective.prepare(data.X if isinstance(data, ScannedData) else (data.X, data.y))
        gradient = float(np.linalg.norm(objective.risk_gradient(records, params)))
        metrics |= {f"train_{name}": value for name, value in scores.items()} | {"gradient_norm": gradient}
        where |= {name: TRAINING for name in metrics if not name.startswith("test_")}
    return {**metrics, "private": False, "computed_on": where} if metrics else {}


def _scores_on(
    objective: LinearObjective, params: npt.NDArray[np.float64], table: Matrix | Scan, labels: Labels | None,
    task: str, frame: FeatureBox | None,
) -> dict[str, float]:  # fmt: skip
    loss, good, seen = 0.0, 0.0, 0
    blocks: Any = [(table, labels)] if labels is not None else cast("Scan", table).by_row().blocks()
    for rows, y in blocks:
        X = rows if frame is None else frame.clipped(rows)
        records = objective.prepare((X, y))
        loss += len(y) * (objective.risk(records, params) - objective.regularizer.value(params))
        answers = objective.predict(records, params)
        if frame is not None and frame.target is not None:
            answers = np.clip(answers, *frame.target)
        good += float(np.sum((answers - y) ** 2 if task == "regression" else answers == y))
        seen += len(y)
    if task == "regression":
        return {"loss": loss / seen, "rmse": math.sqrt(good / seen)}
    return {"loss": loss / seen, "accuracy": good / seen}
