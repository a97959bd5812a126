"""UCI Adult: its public vocabularies, and the exact rule by which LIBSVM's a9a is made from it.

a9a keeps Adult's row order. Numeric columns fall into right-closed bins, categories are one-hot in the order of
UCI's attribute list, and an unknown entry ("?") sets no bit: 123 binary features, at most 14 of them 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.data.dataset import Matrix
from quietgrad.data.schema import Categorical, Numeric, Schema
from quietgrad.data.tables import parse_columns
from quietgrad.errors import DataError

VOCABULARY: dict[str, tuple[str, ...]] = {
    "workclass": (
        "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
        "Never-worked",
    ),
    "education": (
        "Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th",
        "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool",
    ),
    "marital-status": (
        "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
        "Married-AF-spouse",
    ),
    "occupation": (
        "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
        "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
        "Priv-house-serv", "Protective-serv", "Armed-Forces",
    ),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "native-country": (
        "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)",
        "India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland",
        "Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador",
        "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia",
        "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands",
    ),
}  # fmt: skip

BIN_EDGES: dict[str, tuple[float, ...]] = {
    "age": (25, 32, 40, 49),
    "fnlwgt": (106647, 158661, 196337, 259872),
    "education-num": (8, 9, 10, 12),
    "capital-gain": (0,),
    "capital-loss": (0,),
    "hours-per-week": (34, 39, 40, 47),
}

COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
    "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip

_BOUNDS = {
    "age": Numeric((0, 100)),
    "fnlwgt": Numeric((0, 1_500_000)),
    "education-num": Numeric((1, 16)),
    "capital-gain": Numeric((0, 100_000), log=True),
    "capital-loss": Numeric((0, 5_000), log=True),
    "hours-per-week": Numeric((0, 100)),
}


def _one_hot(column: str) -> Categorical:
    words = VOCABULARY[column]
    # "?" is a category of its own where UCI has unknown entries: 108 features in all.
    gaps = column in ("workclass", "occupation", "native-country")
    return Categorical((*words, "?") if gaps else words)


ADULT = Schema(
    columns={c: _BOUNDS[c] if c in _BOUNDS else _one_hot(c) for c in COLUMNS[:-1]},
    label="income",
    classes=("<=50K", ">50K"),
    names=COLUMNS,
)
"""Adult as 108 features: six scaled numbers and one-hot categories."""


def adult_rows(content: bytes) -> bytes:
    """The rows alone: the header line that some copies carry, and UCI's trailing dot on test labels, removed.

    >>> adult_rows(b"age,workclass\\n39, Private, <=50K.\\n")
    b'39, Private, <=50K\\n'
    """
    lines = content.replace(b"\r\n", b"\n").split(b"\n")
    if lines and (lines[0].startswith(b"age") or lines[0].startswith(b"|")):
        lines = lines[1:]
    return b"\n".join(line.removesuffix(b".") for line in lines)


def a9a_from_adult(content: bytes, name: str = "adult") -> tuple[Matrix, npt.NDArray[np.float64]]:
    """LIBSVM a9a (or a9a.t) rebuilt bit for bit from Adult's text: CSR of ones (n, 123) and labels ±1.

    >>> who = b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male,"
    >>> X, y = a9a_from_adult(who + b" 2174, 0, 40, United-States, <=50K")
    >>> (X.indices[:5] + 1).tolist(), y.tolist()
    ([3, 11, 14, 19, 39], [-1.0])
    """
    from scipy import sparse

    columns = parse_columns(adult_rows(content), COLUMNS, name)
    hot: list[npt.NDArray[np.int64]] = []
    offset = 0
    for column in COLUMNS[:-1]:
        values = columns[column]
        if column in BIN_EDGES:
            index = np.searchsorted(BIN_EDGES[column], np.asarray(values, dtype=np.float64), side="left")
            width = len(BIN_EDGES[column]) + 1
        else:
            position = {word: i for i, word in enumerate(VOCABULARY[column])}
            index = np.fromiter((position.get(v, -1) for v in values), np.int64, len(values))
            width = len(VOCABULARY[column])
        hot.append(np.where(index >= 0, index + offset, -1))
        offset += width
    table = np.column_stack(hot)
    set_bits = table >= 0
    indptr = np.concatenate(([0], np.cumsum(set_bits.sum(axis=1)))).astype(np.int32)
    indices = table[set_bits].astype(np.int32)
    X: Any = sparse.csr_matrix((np.ones(len(indices)), indices, indptr), shape=(len(table), offset))
    income = np.asarray(columns["income"])
    if not np.isin(income, ("<=50K", ">50K")).all():
        raise DataError(f"{name}: income must be '<=50K' or '>50K'.")
    return X, np.where(income == ">50K", 1.0, -1.0)
