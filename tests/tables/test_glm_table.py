"""Tables: what is refused, in which words, and that nothing is copied that need not be."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse

from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery, RecursiveMomentumQuery
from quietgrad.tables.losses import Hinge, Huber, Logistic, Multinomial, Squared
from quietgrad.tables.regularizers import L2, Nonconvex
from quietgrad.tables.table import Affine, lay_out

GOOD = np.array([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ([[1.0, np.nan], [0.0, 0.0]], [0, 1], "X: contains NaN or infinite values"),
        ([[1.0, np.inf], [0.0, 0.0]], [0, 1], "X: contains NaN or infinite values"),
        (sparse.csr_array([[1.0, np.nan], [0.0, 0.0]]), [0, 1], "X: contains NaN or infinite values"),
        (np.zeros((0, 2)), [], "X: has no records"),
        (np.zeros((2, 0)), [0, 1], "X: has no features"),
        (sparse.csr_array((0, 2)), [], "X: has no records"),
        ([1.0, 2.0], [0, 1], "X: has 1 dimension"),
        ([["a", "b"], ["c", "d"]], [0, 1], "Encode categories"),
        ([[1.0, 2.0], [3.0]], [0, 1], "rows of different lengths"),
        (np.array([[1, None]], dtype=object), [0], "must be numbers"),
        (GOOD, [0, 1, 1], "different numbers of records"),
        (GOOD, [[0], [1]], "one number per record"),
        (GOOD, ["no", "yes"], "one number per record"),
        (GOOD, [0.0, np.nan], "y: contains NaN"),
        (GOOD, [-1, 1], "labels must be 0 and 1"),
        (GOOD, [0.5, 1.0], "labels must be 0 and 1"),
    ],
)
def test_bad_tables_are_refused(X: Any, y: Any, message: str) -> None:
    for objective in (Logistic(), Hinge()):
        with pytest.raises(DataError, match=message):
            objective.prepare((X, y))


@pytest.mark.parametrize("y", [[0, 3], [-1, 0], [0.5, 1.0]])
def test_class_codes_are_checked(y: Any) -> None:
    with pytest.raises(DataError, match="0 to 2"):
        Multinomial(3).prepare((GOOD, y))
    with pytest.raises(DataError, match="pair"):
        Logistic().prepare(GOOD[0, 0])


def test_long_rows_are_shortened_and_nobody_is_told() -> None:
    assert Squared(row_bound=4.0).prepare((GOOD, [0.0, 0.0])).norms.max() <= 4.0 * (1 + 1e-12)
    records = Squared(row_bound=5.0).prepare((GOOD, [0.0, 0.0]))
    assert records.norms.max() <= 5.0 * (1 + 1e-12)
    barely = Squared(row_bound=5.0 * (1 - 1e-7)).prepare((GOOD, [0.0, 0.0]))
    assert barely.norms.max() <= 5.0 * (1 - 1e-7) * (1 + 1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Logistic(row_bound=-1.0),
        lambda: Logistic(row_bound=float("nan")),
        lambda: Logistic(rows="normalize"),
        lambda: Logistic(rows="refuse", row_bound=1.0),  # type: ignore[arg-type]
        lambda: Logistic(rows="cut", row_bound=1.0),  # type: ignore[arg-type]
        lambda: Logistic(intercept_scale=0.0),
        lambda: Multinomial(1),
        lambda: Huber(0.0),
        lambda: Hinge(-1.0),
        lambda: L2(-1.0),
        lambda: Nonconvex(float("inf")),
        lambda: L2(1.0, unpenalized=-1),
        lambda: Affine(np.zeros(2), np.ones(3)),
        lambda: Affine(np.array([np.nan]), np.ones(1)),
    ],
)
def test_bad_settings_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must|needs|one per"):
        make()


def test_a_transform_must_fit_the_features() -> None:
    with pytest.raises(DataError, match="one per feature"):
        Logistic(transform=Affine(np.ones(1), np.ones(1))).prepare((GOOD, [0, 1]))


def test_parameters_must_fit_the_records() -> None:
    objective = Logistic()
    records = objective.prepare((GOOD, [0, 1]))
    with pytest.raises(ValueError, match="params: has 3"):
        objective.risk(records, np.zeros(3))
    with pytest.raises(ValueError, match="must have 2 numbers"):
        GradientQuery(np.zeros(2), 1.0).sum_into(objective, Batch(records, np.array([0])), np.zeros(3))


def test_an_index_outside_the_table_is_an_error_not_a_read() -> None:
    for objective in (Logistic(), Multinomial(2)):
        records = objective.prepare((GOOD, [0, 1]))
        for index in (-1, 2):
            with pytest.raises(IndexError):
                GradientQuery(objective.initial(records), 1.0).sum_into(
                    objective, Batch(records, np.array([index])), objective.initial(records)
                )


def test_duplicate_sparse_entries_are_summed_before_norms() -> None:
    X = sparse.csr_array((np.array([3.0, 3.0]), np.array([0, 0]), np.array([0, 2])), shape=(1, 2))
    records = Squared().prepare((X, [0.0]))
    assert records.norms[0] == pytest.approx(6.0)
    assert X.nnz == 2  # the caller's matrix is left alone


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_matrices_are_shared_not_copied(index_type: type) -> None:
    rng = np.random.default_rng(0)
    X = sparse.csr_array((rng.random((50, 6)) * (rng.random((50, 6)) < 0.3)).astype(np.float32))
    X.indices, X.indptr = X.indices.astype(index_type), X.indptr.astype(index_type)
    y = np.zeros(50)
    first = Squared().prepare((X, y))
    again = Squared(intercept=True, transform=Affine(np.ones(6), np.ones(6))).prepare(first)
    for records in (first, again):
        assert np.shares_memory(records.X.data, X.data)
        assert np.shares_memory(records.X.indices, X.indices)
        assert records.y is y
    out = np.zeros(7)
    GradientQuery(np.ones(7), 1.0).sum_into(Squared(intercept=True), Batch(again, np.array([3])), out)
    assert 0 < np.linalg.norm(out) <= 1
    dense = X.toarray()
    assert np.shares_memory(Squared().prepare((dense, y)).X, dense)


def test_numbers_of_other_types_are_converted() -> None:
    assert lay_out(np.array([[1, 0]], dtype=np.uint8)).dtype == np.float32
    assert lay_out(np.array([[1, 0]])).dtype == np.float64
    assert lay_out(np.asfortranarray(GOOD)).flags.c_contiguous
    assert lay_out(sparse.coo_array(GOOD)).format == "csr"


def test_a_fit_adds_little_to_the_size_of_the_data() -> None:
    """n × 100 float32: preparing, summing and evaluating stay below a tenth of the table."""
    rng = np.random.default_rng(0)
    X = rng.random((200_000, 100), dtype=np.float32)
    y = (X[:, 0] > 0.5).astype(np.float64)
    objective = Logistic(intercept=True)
    tracemalloc.start()
    records = objective.prepare((X, y))
    params, out = np.zeros(101), np.zeros(101)
    GradientQuery(params, 1.0).sum_into(objective, Batch(records, None), out)
    RecursiveMomentumQuery(params, out, 0.1, 1.0, 0.1).sum_into(objective, Batch(records, None), np.zeros(101))
    objective.risk(records, params)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.1 * X.nbytes + 3e6  # blocks of a fixed few megabytes do not grow with n


def test_the_full_batch_needs_no_compiler() -> None:
    program = (
        "import sys, numpy as np\n"
        "from quietgrad.objectives import Logistic, Multinomial\n"
        "from quietgrad.core.session.objectives import Batch\n"
        "from quietgrad.core.session.queries import RecursiveMomentumQuery\n"
        "o = Logistic(); r = o.prepare((np.eye(3), [0, 1, 1])); w = np.zeros(3)\n"
        "RecursiveMomentumQuery(w, w, .1, 1., 1.).sum_into(o, Batch(r, None), w.copy()); o.risk(r, w)\n"
        "assert not {'numba', 'scipy', 'sklearn', 'torch'} & set(sys.modules)\n"
        "o = Multinomial(3); r = o.prepare((np.eye(3), [0, 1, 2])); w = np.zeros(9)\n"
        "RecursiveMomentumQuery(w, w, .1, 1., 1.).sum_into(o, Batch(r, np.array([0, 2])), w.copy())\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


_CELL = "HIV-positive since 2019"


def _objects(*rows: Any) -> Any:
    return np.array(rows, dtype=object)


def _frame(**columns: Any) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (_objects([1.0, 2.0], [3.0, _CELL]), [0, 1]), "column 1 must be numbers and 1 row is not"),
        (lambda: ([[1.0, _CELL, _CELL], [3.0, _CELL, 2.0]], [0, 1]), r"column 1 \(and 1 more.* 2 rows are not"),
        (lambda: (_frame(age=[1, 2], diagnosis=[_CELL, "none"]), [0, 1]), "column 'diagnosis' must be .* 2 rows"),
        (lambda: (_frame(age=[1, _CELL], seen=[None, 2]), [0, 1]), "column 'age' must be numbers and 1 row"),
        (lambda: ([[1.0], [2.0, _CELL]], [0, 1]), "rows of different lengths"),
        (lambda: (GOOD, [1.0, _CELL]), "y: must be one number per record and 1 row is not"),
        (lambda: (GOOD, np.array([_CELL, _CELL])), "y: must be one number per record and 2 rows are not"),
        (lambda: (GOOD, _frame(y=[0, _CELL])["y"]), "y: must be one number per record and 1 row is not"),
        (lambda: (GOOD, _objects(0, {"cell": _CELL})), "y: must be one number per record and 1 row is not"),
        (lambda: (_objects([10**400, 1], [0, 1]), [0, 1]), "no float64"),
    ],
)
def test_errors_name_columns_and_rows_and_never_a_cell(make: Any, words: str) -> None:
    from quietgrad.estimators import PrivateHuberRegressor

    X, y = make()
    with pytest.raises(DataError, match=words) as caught:
        Logistic().prepare((X, y))
    with pytest.raises((TypeError, ValueError, OverflowError, DataError)) as of_estimator:
        PrivateHuberRegressor(epsilon=1.0).fit(X, y)
    for error in (caught.value, of_estimator.value):
        told: BaseException | None = error
        while told is not None:  # a traceback shows what an error was raised from, unless that is cut off
            assert _CELL not in str(told)
            told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)


def test_objects_that_are_all_numbers_are_numbers() -> None:
    records = Squared().prepare((_objects([1, 2.5], [np.float32(3), True]), _objects(1, 2.0)))
    assert records.X.tolist() == [[1.0, 2.5], [3.0, 1.0]]
