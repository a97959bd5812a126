"""Private scores of a model on held-out people: one noisy table of scores and classes, and what it tells.

The model is public. Each held-out person falls into one cell (predicted-probability bin × true class, or predicted
× true class), the counts are released once with noise, and everything else is arithmetic on them. Error bars cover
both the noise and the sampling of the people, by redrawing both.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline

from quietgrad.core.accounting.budget import DEFAULT_RELATION, Budget, Relation
from quietgrad.core.errors import DataError, LedgerWarning
from quietgrad.core.files import write_atomically
from quietgrad.core.ledger.account import Account
from quietgrad.core.plans.counting import PublicCount
from quietgrad.core.session.opening import Terms, counted
from quietgrad.core.session.statement import Privacy
from quietgrad.core.vectors import Vector
from quietgrad.estimators.predicting import AskedOnce, nameless, predict_row_independent
from quietgrad.estimators.runs import params_of
from quietgrad.estimators.transformers import learning_steps
from quietgrad.estimators.validation import PrivacyUnitSpec, is_scan, scan_if_one, take_person_column
from quietgrad.methods.minimizing import minimize
from quietgrad.methods.range_estimation import HistogramRelease
from quietgrad.methods.result import digest_of, load
from quietgrad.methods.score_noise import SCORE_NAMES, is_too_noisy, score_text
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.privacy_units import PersonRule, SurveyData, survey_weights
from quietgrad.tables.queries.counts import Tabulation
from quietgrad.tables.table import Array, Floats, lay_out, numbers_of, rows_in

Number = tuple[float, float]
"""A value and its standard error."""

CellPlaces = Callable[[Any, Any], tuple[Any, Any]]
"""The cells and weights of records, from their features and labels."""

_FEW = 5000  # people below which half the bins leave more in each
_REDRAWS = 200
_CONFIDENCE_BINS = 10


@dataclass(frozen=True)
class PrivateScore:
    """Private scores of a model from one release, each with its standard error.

    ``calibration`` rows are (mean predicted probability, observed frequency, standard error, share of the people);
    ``confusion`` is (true × predicted) shares of the people. ``None`` where a number does not apply. What is too
    noisy to be stated, each number by its own error, is neither printed nor saved; :attr:`too_noisy` names it.
    """

    privacy: Privacy
    accuracy: Number | None = None
    auc: Number | None = None
    log_loss: Number | None = None
    calibration: tuple[tuple[float, float, float, float], ...] = ()
    confusion: Any = None
    confusion_error: float | None = None
    classes: Any = None
    r2: Number | None = None
    rmse: Number | None = None
    mae: Number | None = None
    notes: tuple[str, ...] = field(default=())
    of: tuple[str, ...] = field(default=(), repr=False)
    """Digests of the parameters of the model that was scored, as its run may keep them."""

    @property
    def stated(self) -> dict[str, Number]:
        """The numbers that are worth stating, by name."""
        return {name: number for name, number in self._numbers.items() if name not in self.too_noisy}

    @property
    def too_noisy(self) -> dict[str, float | None]:
        """The numbers that are smaller than their noise, by name, with their errors.

        ``None`` stands for an error that is not finite.
        """
        found = {name: _plain(v[1]) for name, v in self._numbers.items() if is_too_noisy(name, *v)}
        if self.confusion_error is not None and is_too_noisy("confusion", 0.0, self.confusion_error):
            found["confusion"] = _plain(self.confusion_error)
        return found

    @property
    def _numbers(self) -> dict[str, Number]:
        return {name: number for name in SCORE_NAMES if (number := vars(self)[name]) is not None}

    def to_json(self) -> dict[str, Any]:
        numbers = {name: [*map(_plain, number)] for name, number in self.stated.items()}
        shares = None if self.confusion is None or "confusion" in self.too_noisy else self.confusion
        return {
            **numbers,
            "too_noisy": self.too_noisy,
            "calibration": [[_plain(x) for x in row] for row in self.calibration],
            "confusion": None if shares is None else np.asarray(shares).tolist(),
            "confusion_error": self.confusion_error,
            "classes": None if self.classes is None else [str(c) for c in self.classes],
            "notes": list(self.notes),
            "privacy": self.privacy.to_json(),
        }

    def save(self, folder: str | Path) -> Path:
        """Write the score into the run's folder, where ``quietgrad report`` shows it."""
        if _digest(load(folder).params) not in self.of:
            raise DataError(f"{folder}: the run is of another model than the one that was scored.")
        target = Path(folder) / "evaluation.json"
        said = {"result": digest_of(Path(folder)), **self.to_json()}
        write_atomically(target, (json.dumps(said, indent=1) + "\n").encode())
        return target

    def __str__(self) -> str:
        parts = [f"{name} {value:.4g} ± {error:.2g}" for name, (value, error) in self.stated.items()]
        parts += [f"{name} {score_text(None, error)}" for name, error in self.too_noisy.items()]
        return f"{', '.join(parts)} ({self.privacy})"


def _number(value: float, error: float) -> Number:
    return float(value), float(error)


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def private_score(
    model: Any,
    X: object,
    y: object = None,
    *,
    epsilon: float = 0.3,
    delta: float = 1e-6,
    relation: str | Relation = DEFAULT_RELATION,
    ledger: Any = None,
    account: str | Account = "held-out",
    cap: Budget | None = None,
    n_public: int | None = None,
    target_bounds: tuple[float, float] | None = None,
    person: object = None,
    records_per_person: int | None = None,
    sample_weight: object = None,
    max_weight: float | None = None,
) -> PrivateScore:
    """Score a fitted model on held-out people within (ε, δ), charged to their account.

    Args:
        model: a classifier with ``classes_`` and ``predict_proba`` (or ``decision_function``), or a regressor. It
            is taken as public: a model fitted without privacy must not be published either way. A model of
            another library is asked about one record at a time. A record that it cannot answer about counts as
            wrong: as the most certain wrong answer, or as the farther end of the targets' interval.
        X, y: the held-out people, or a :class:`~quietgrad.data.scanning.Scan` of them; if they are among those the
            model was fitted on, name the same account.
        epsilon: Privacy budget of this release. Smaller is more private and noisier.
        delta: Probability with which the bound e^ε may fail. Choose at most 1/(100 n).
        relation: Neighbouring relation, ``"add-remove"`` or ``"replace-one"``.
        ledger: Path of a ledger file, as in the estimators.
        account: Name of the people in the ledger.
        cap: Refuse the release if the account would exceed this budget.
        n_public: Public number of records; ``None`` counts them privately under add-remove.
        target_bounds: for a regressor without ``target_range_``, the public interval that targets lie in.
        person: one id per record, or the name of a column of ``X``: the guarantee is for people, and every number
            is a mean over people of the mean of their records.
        records_per_person: the most of a person's records that are used.
        sample_weight: survey weights, one per record: scores are weighted means.
        max_weight: the largest weight, as a public number; larger ones are cut to it.

    >>> from quietgrad.estimators import PrivateLogisticRegression
    >>> X = np.random.default_rng(0).standard_normal((8000, 2))
    >>> y = X[:, 0] > 0
    >>> model = PrivateLogisticRegression(classes=[False, True], row_bound=4.0).fit(X[:4000], y[:4000])
    >>> score = private_score(model, X[4000:], y[4000:], epsilon=0.5)
    >>> bool(abs(score.accuracy[0] - 0.98) < 0.1), round(score.privacy.epsilon, 2)
    (True, 0.5)
    """
    budget = Budget(epsilon, delta, Relation.parse(relation))
    X, y = scan_if_one(X, y)
    X, ids = take_person_column(X, person)
    if is_scan(X):
        model = asked = nameless(model, X)
        held = X.named()
    else:
        y = np.asarray(y)
        if y.ndim != 1 or not len(y):
            raise DataError("y: must be one label or number per held-out record.")
        if y.dtype.kind == "c":
            raise DataError("y: Complex data not supported; give labels or real numbers.")
        if len(y) != rows_in(X):
            raise DataError("X and y have different numbers of records.")
        shape: tuple[int, ...] = getattr(X, "shape", ())
        wanted = getattr(model, "n_features_in_", None)
        if wanted is not None and len(shape) == 2 and shape[1] != wanted:  # public, unlike what the rows hold
            raise DataError(f"X: has {shape[1]} columns, the model was fitted on {wanted}. Nothing was spent.")
        held = _HoldoutData(X, y)
        asked = AskedOnce(model)
    if sample_weight is not None and is_scan(X):
        raise DataError("sample_weight: is not known to scans. Give a table in memory. Nothing was spent.")
    weights = None if is_scan(X) else survey_weights(sample_weight, max_weight, len(held))
    whom = PrivacyUnitSpec.of(ids, len(held), PersonRule("mean", records_per_person))._replace(weights=weights)
    terms = Terms.of(
        budget, account=account, ledger=ledger, cap=cap,
        n_public=n_public if budget.relation is Relation.ADD_REMOVE else None,
    )  # fmt: skip
    publisher = _Publisher(terms, held, whom)
    if hasattr(model, "classes_"):
        labels, chances = ClassLabels.of(model.classes_), hasattr(model, "predict_proba")
        score = (_binary if len(labels) == 2 else _multiclass)(asked, labels, chances, publisher)
    else:
        bounds = getattr(model, "target_range_", None) if target_bounds is None else target_bounds
        score = _regression(asked, bounds, publisher)
    uncovered = tuple(learning_steps(model)) if isinstance(model, Pipeline) else ()
    for told in uncovered:
        warnings.warn(told, LedgerWarning, stacklevel=2)
    # A run of the model, or of a pipeline's last step, is recognised by its training or as it was saved.
    last = model[-1] if isinstance(model, Pipeline) else model
    known: list[Vector] = []
    if (result := getattr(last, "result_", None)) is not None:
        known = [result.params, *([params_of(last)] if hasattr(last, "coef_") else [])]
    return replace(score, of=tuple(map(_digest, known)), notes=(*score.notes, *uncovered))


def _digest(params: Vector) -> str:
    return hashlib.sha256(np.ascontiguousarray(params, dtype=np.float64).tobytes()).hexdigest()


@dataclass(frozen=True)
class _HoldoutData:
    """Held-out people in memory."""

    X: object
    y: Array

    def __len__(self) -> int:
        return len(self.y)

    def with_rows(self, turned: CellPlaces) -> tuple[Any, ...]:
        """Return a tabulation's input: cells and weights, and the people's rows if they are numbers.

        A ledger recognises the people by these rows. A model may take something else.
        """
        cells, weights = turned(self.X, self.y)
        try:
            return cells, weights, lay_out(self.X)
        except (DataError, ValueError, TypeError):
            return cells, weights


@dataclass(frozen=True)
class _Released:
    counts: Floats
    noise: float
    n: float | None  # public, or None where it must be read off the counts
    privacy: Privacy


class _Publisher:
    """Counts the people, and releases one table of them."""

    def __init__(self, terms: Terms, held: Any, whom: PrivacyUnitSpec) -> None:
        self._terms, self._held, self._whom = terms, held, whom

    def count(self, places: CellPlaces) -> int:
        """About how many people there are; after ``places`` has shown that the model can be asked about them."""
        whom = self._whom
        data = whom.of_data(self._held.with_rows(places))
        self._terms = counted(whom.asks(Tabulation()), data, HistogramRelease(1, 1), self._terms)
        return self._size.n

    @property
    def _size(self) -> PublicCount:
        size = self._terms.n_public
        assert isinstance(size, PublicCount)
        return size

    def publish(self, places: CellPlaces, cells: int, groups: int) -> _Released:
        people, weights = self._whom.people, self._whom.weights
        rows = self._held.with_rows(places)
        result = minimize(
            Tabulation(),
            rows if weights is None else SurveyData(rows, weights),
            HistogramRelease(cells, groups),
            budget=self._terms.budget,
            account=self._terms.account,
            n_public=self._size,
            person=people,
            records_per_person=None if people is None else people.rule.records_per_person,
        )
        # What the cells add up to has less noise than a count with a hundredth of the budget.
        n = None if self._size.counted or weights is not None else float(self._size.n)
        return _Released(np.asarray(result.params), float(result.details["noise"]), n, result.privacy)


def _binary_places(
    model: object, edges: Floats, known: ClassLabels, chances: bool, X: object, y: Array
) -> tuple[Array, None]:
    """The cell of each person: the bin of the log-odds of the second class, and the class."""
    codes = known.encode(y)
    if chances:
        p = np.clip(predict_row_independent(model, "predict_proba", X, 2)[:, 1], 1e-12, 1.0 - 1e-12)
        odds = np.log(p) - np.log1p(-p)
    else:
        odds = predict_row_independent(model, "decision_function", X, None)
    # No answer counts as the most certain wrong one.
    odds = np.where(np.isnan(odds), np.where(codes == 1, -np.inf, np.inf), odds)
    return np.where(codes < 0, -1, np.searchsorted(edges, odds) * 2 + codes)[:, None], None


def _binary(model: object, known: ClassLabels, chances: bool, publisher: _Publisher) -> PrivateScore:
    fine = np.linspace(-6.0, 6.0, 19)
    n = publisher.count(partial(_binary_places, model, fine, known, chances))
    edges = np.linspace(-4.0, 4.0, 9) if n < _FEW else fine  # 0, where a prediction changes, is one of them
    bins = len(edges) + 1
    released = publisher.publish(partial(_binary_places, model, edges, known, chances), 2 * bins, 1)
    width = edges[1] - edges[0]
    middles = np.concatenate([[edges[0] - width], (edges[:-1] + edges[1:]) / 2, [edges[-1] + width]])
    probability = 1.0 / (1.0 + np.exp(-middles))

    def read(counts: Floats) -> Floats:
        table = counts.reshape(bins, 2)
        n = _total(released, table)
        right = table[middles < 0, 0].sum() + table[middles > 0, 1].sum()
        loss = -(table[:, 0] * np.log1p(-probability) + table[:, 1] * np.log(probability)).sum()
        return np.array([right / n, _auc(table), loss / n])

    value = read(released.counts)
    error = _errors(read, released)
    table = released.counts.reshape(bins, 2)
    predicted = (middles > 0).astype(int)
    total = _total(released, table)
    confusion = np.array([[table[predicted == p, c].sum() for p in (0, 1)] for c in (0, 1)]) / total
    notes = [] if chances else ["the model gives scores, not probabilities: no log loss"]
    return PrivateScore(
        released.privacy,
        accuracy=_number(min(max(value[0], 0.0), 1.0), error[0]),
        auc=_number(value[1], error[1]),
        log_loss=_number(value[2], error[2]) if chances else None,
        calibration=_calibration(table, probability, released),
        confusion=confusion,
        confusion_error=released.noise * math.sqrt(bins / 2) / total,
        classes=known.values,
        notes=tuple(notes),
    )


def _total(released: _Released, table: Floats) -> float:
    return released.n if released.n is not None else max(float(table.sum()), 1.0)


def _auc(table: Floats) -> float:
    """P(score of a random positive > that of a random negative), ties in a bin counting half; NaN without both."""
    negative, positive = table[:, 0], table[:, 1]
    if negative.sum() <= 0.0 or positive.sum() <= 0.0:
        return math.nan
    below = np.cumsum(negative) - 0.5 * negative
    return float(np.clip((positive @ below) / (positive.sum() * negative.sum()), 0.0, 1.0))


def _calibration(table: Floats, probability: Floats, released: _Released) -> Any:
    """One row per bin whose count stands five deviations out of the noise."""
    rows = []
    for (no, yes), p in zip(table, probability, strict=True):
        count = no + yes
        if count > 5.0 * released.noise * math.sqrt(2.0):
            share = min(max(yes / count, 0.0), 1.0)
            variance = share * (1.0 - share) / count + (released.noise / count) ** 2 * (
                share**2 + (1.0 - share) ** 2
            )
            rows.append((float(p), float(share), math.sqrt(variance), float(count / _total(released, table))))
    return tuple(rows)


def _errors(read: Callable[[Floats], Floats], released: _Released) -> Floats:
    """Standard errors by redrawing the people from the released table and the noise on top."""
    rng = np.random.default_rng(0)  # post-processing of what was released: no secret is in it
    sizes = np.maximum(released.counts, 0.0)
    draws = []
    for _ in range(_REDRAWS):
        # A released count is off by noise already, so the noise is drawn once more and not twice.
        fresh = rng.poisson(sizes) + released.noise * rng.standard_normal(len(sizes))
        draws.append(read(fresh))
    values = np.array(draws)
    # A number that some redraws do not have (an AUC without one of the classes) has no finite error.
    return np.where(np.isfinite(values).all(axis=0), np.nan_to_num(values).std(axis=0), np.inf)


def _class_places(
    model: object, edges: Floats, known: ClassLabels, chances: bool, X: object, y: Array
) -> tuple[Array, None]:
    """Two groups of cells: (true × predicted), and the bin of the probability given to the true class."""
    codes, k = known.encode(y), len(known)
    scores = predict_row_independent(model, "predict_proba" if chances else "decision_function", X, k)
    # No answer counts as the most certain wrong one.
    silent = np.asarray(np.isnan(scores).any(axis=1, keepdims=True))
    scores = np.where(silent, np.eye(k)[(codes + 1) % k], scores)
    cells = [codes * k + scores.argmax(axis=1)]
    if chances:
        cells.append(k * k + np.searchsorted(edges, scores[np.arange(len(codes)), codes]))
    # Cells below zero count nowhere: a refusal would tell that a record has a label that the model does not know.
    return np.where(codes[:, None] < 0, -1, np.stack(cells, axis=1)), None


def _multiclass(model: object, known: ClassLabels, chances: bool, publisher: _Publisher) -> PrivateScore:
    k = len(known)
    edges = np.exp2(-np.arange(_CONFIDENCE_BINS - 1, 0, -1) / 1.5)  # of the true class's probability
    size = k * k + (_CONFIDENCE_BINS if chances else 0)
    places = partial(_class_places, model, edges, known, chances)
    publisher.count(places)
    released = publisher.publish(places, size, 2 if chances else 1)
    middles = np.exp(np.concatenate([[np.log(edges[0]) - 0.5], np.log(edges) + 0.5 * math.log(2) / 1.5]))

    def read(counts: Floats) -> Floats:
        table = counts[: k * k].reshape(k, k)
        total = _total(released, table)
        tail = counts[k * k :]
        loss = -(tail @ np.log(np.minimum(middles, 1.0))) / total if chances else math.nan
        return np.array([np.trace(table) / total, loss])

    value, error = read(released.counts), _errors(read, released)
    table = released.counts[: k * k].reshape(k, k)
    return PrivateScore(
        released.privacy,
        accuracy=_number(min(max(value[0], 0.0), 1.0), error[0]),
        log_loss=_number(value[1], error[1]) if chances else None,
        confusion=table / _total(released, table),
        confusion_error=released.noise / _total(released, table),
        classes=known.values,
    )


def _error_places(model: object, low: float, high: float, X: object, y: Array) -> tuple[Array, Floats]:
    """(e/w)², |e|/w, t, t² with w the width of the targets' interval and t the target's place in it."""
    answers = predict_row_independent(model, "predict", X, None)
    target = np.clip(numbers_of(y, "y"), low, high)
    # No answer counts as the farther end of the interval.
    farther = np.where(target - low > high - target, low, high)
    predicted = np.clip(np.where(np.isnan(answers), farther, answers), low, high)
    error, place = np.abs(predicted - target) / (high - low), (target - low) / (high - low)
    sums = np.stack([error**2, error, place, place**2], axis=1)
    return np.tile(np.arange(4), (len(y), 1)), sums


def _regression(model: object, bounds: tuple[float, float] | None, publisher: _Publisher) -> PrivateScore:
    if bounds is None:
        raise ValueError("target_bounds: declare the public (low, high) that the targets lie in.")
    low, high = float(bounds[0]), float(bounds[1])
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("target_bounds: must be (low, high) with low < high, both finite and public.")
    width = high - low
    places = partial(_error_places, model, low, high)
    n = float(publisher.count(places))
    released = publisher.publish(places, 4, 4)

    def spread(counts: Floats) -> float:
        return float(counts[3] / n - (counts[2] / n) ** 2)

    def read(counts: Floats) -> Floats:
        square = counts[0] / n
        error, off = math.sqrt(max(square, 0.0)) * width, max(counts[1] / n, 0.0) * width
        return np.array([1.0 - square / max(spread(counts), 1e-12), error, off])

    rng = np.random.default_rng(0)
    # Each value lies in [0, 1], so one person's variance is at most mean·(1 − mean); a target's is the spread v,
    # and that of its square about the mean a is at most v, beside the part 2a that goes with the target itself.
    mean, own = np.clip(released.counts / n, 0.0, 1.0), min(max(spread(released.counts), 0.0), 0.25)
    deviation = np.sqrt(n * np.array([*(mean[:2] * (1.0 - mean[:2])), own, own]))
    fresh = []
    for noise, sampling in zip(*rng.standard_normal((2, _REDRAWS, 4)), strict=True):
        moved = deviation * sampling
        moved[3] += 2.0 * mean[2] * moved[2]
        fresh.append(released.counts + released.noise * noise + moved)
    draws = np.array([read(counts) for counts in fresh])
    value, errors = read(released.counts), draws.std(axis=0)
    r2, rmse, mae = map(_number, value, errors)
    # R² divides by the targets' variance: where noise may have made that out of nothing, no number is one.
    if min(spread(counts) for counts in [released.counts, *fresh]) < 0.25 * max(spread(released.counts), 1e-12):
        hidden = "the variance of the targets does not stand out of the noise, so R² cannot be estimated"
        notes = (f"{hidden}: evaluate with a larger ε, on more people, or with narrower target_bounds",)
        return PrivateScore(released.privacy, rmse=rmse, mae=mae, notes=notes)
    return PrivateScore(released.privacy, r2=r2, rmse=rmse, mae=mae)
