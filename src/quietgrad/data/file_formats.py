"""File formats without columns of their own: packed bytes, LIBSVM text, npz and idx. Pickles are never opened."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.core import files
from quietgrad.core.errors import DataError, boundary
from quietgrad.core.sanitize import sanitize
from quietgrad.data.dataset import Dataset, Task, check, encode_labels

if TYPE_CHECKING:
    from scipy import sparse

EXPANSION = 256
"""How many times its own size a file may become when it is unpacked; six kilobytes can hold gigabytes."""
SMALL = 16 << 20
"""Bytes that every file may become: short repetitive tables shrink a thousandfold."""
_PIECE = 1 << 20


def budget(size: int) -> int:
    """The most bytes that a file of ``size`` bytes may become in memory."""
    return max(SMALL, EXPANSION * size)


def read_content(path: Path) -> bytes:
    """The unpacked bytes of a file; a cut or damaged archive is refused, and one that unpacks to too much.

    A spreadsheet's are its one sheet as delimited text.

    >>> import gzip, tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rows.gz"
    >>> _ = path.write_bytes(gzip.compress(b"1 1:1"))
    >>> read_content(path)
    b'1 1:1'
    """
    try:
        raw = files.read_bytes(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({files.os_error_text(error)}).") from None
    if path.suffix.lower() == ".xlsx":
        from quietgrad.data.spreadsheets import sheet_text  # which an extra is needed for

        return sheet_text(raw, str(path))
    content = unpacked(raw, str(path))
    if content is raw and path.suffix in (".gz", ".bz2") and b"\0" in raw[:4096]:
        raise DataError(_DAMAGED.format(path))  # a plain file under such a name is common, but text holds no zeros
    if not content or content.isspace():
        raise DataError(f"{path}: the file is empty.")
    return content


def unpacked(raw: bytes, where: str) -> bytes:
    """The content of gzip or bzip2 bytes; all others are their own content."""
    # The first bytes decide, not the suffix: a renamed file is common.
    if not raw.startswith((b"\x1f\x8b", b"BZh")):
        return raw
    most, size, pieces = budget(len(raw)), 0, []
    with (
        boundary(_DAMAGED.format(where)),
        (gzip if raw.startswith(b"\x1f\x8b") else bz2).open(io.BytesIO(raw)) as stream,
    ):
        while piece := stream.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise DataError(
                    f"{where}: unpacks to more than {EXPANSION} times its size and {SMALL >> 20} MiB; if that is "
                    "meant, unpack it by hand and load the plain file."
                )
    return b"".join(pieces)


_DAMAGED = "{}: the compressed file is cut short or damaged. Fetch or copy it again."


def sha256(content: bytes) -> str:
    """Hex SHA-256 of decompressed content, so that .gz, .bz2 and plain copies share one checksum."""
    return hashlib.sha256(content).hexdigest()


MOST_FEATURES = 1 << 24
"""The largest index that decides d when ``n_features`` is not declared: a model has one number for each."""


def parse_libsvm(
    content: bytes, n_features: int | None = None, name: str = "libsvm"
) -> tuple[sparse.csr_matrix[Any], npt.NDArray[np.float64]]:
    """Parse LIBSVM text into a CSR matrix and raw labels; indices start at 1.

    Without `n_features` the largest index seen decides d, which depends on the records: declare it for
    private data. Such an index may be at most 2²⁴, or one typing error would ask for a model of gigabytes.

    >>> X, y = parse_libsvm(b"+1 1:0.5 3:1\\n-1 2:2\\n")
    >>> X.toarray().tolist(), y.tolist()
    ([[0.5, 0.0, 1.0], [0.0, 2.0, 0.0]], [1.0, -1.0])
    """
    from sklearn.datasets import load_svmlight_file

    try:
        X, y = load_svmlight_file(io.BytesIO(content), zero_based=False)
    except (ValueError, OverflowError):  # scikit-learn's message quotes the cell
        raise DataError(
            f"{name}: not LIBSVM text. Each row is 'label index:value …': numbers, with indices that start at 1, "
            "increase within the row and are below 2³¹. Was the file cut short?"
        ) from None
    if not len(y):
        raise DataError(f"{name}: the file holds no rows.")
    widest = int(X.indices.max(initial=-1)) + 1
    if n_features is not None and widest > n_features:
        raise DataError(f"{name}: a feature index exceeds {{n_features}}.", n_features=n_features)
    if n_features is None and widest > MOST_FEATURES:
        raise DataError(f"{name}: a feature index exceeds {MOST_FEATURES}. If that is meant, declare n_features.")
    X.resize((len(y), widest if n_features is None else n_features))
    return X, y


def parse_npz(
    content: bytes, *, task: Task | None = None, classes: Sequence[object] | None = None, name: str = "npz"
) -> Dataset:
    """Read `X, y[, X_test, y_test]` from an npz file.

    >>> buffer = io.BytesIO()
    >>> np.savez(buffer, X=np.eye(2), y=np.array([0, 1]))
    >>> parse_npz(buffer.getvalue()).task
    'binary'
    """
    arrays = open_npz(content, name)
    X = _dense(_array(arrays, ("X", "x_train", "X_train"), name), name)
    raw = _array(arrays, ("y", "y_train"), name)
    labels = encode_labels(name, raw.ravel(), task, classes)
    X_test = y_test = None
    if "X_test" in arrays or "x_test" in arrays:
        X_test = _dense(_array(arrays, ("X_test", "x_test"), name), name)
        known = labels.class_names if classes is None else classes  # the pair that the training labels matched
        y_test = encode_labels(name, _array(arrays, ("y_test",), name).ravel(), labels.task, known).y
    return check(Dataset(name, X, labels.y, X_test, y_test, **labels.facts))


_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def open_npz(content: bytes, name: str) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an npz file, without unpickling anything.

    >>> open_npz(b"PK", "cut.npz")
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: cut.npz: not a readable npz file ...
    """
    refusal = f"{name}: not a readable npz file of plain arrays; it may be cut short or hold pickled objects."
    with boundary(refusal):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > budget(len(content)):
                raise DataError(f"{name}: its arrays are more than {EXPANSION} times the file's size.")
            for member in members:
                # zipfile unpacks other kinds without a limit, and numpy makes room for what a header announces.
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise DataError(refusal)
                with archive.open(member) as file:
                    shape, _, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
                    if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
                        raise DataError(refusal)
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)


def _array(arrays: dict[str, npt.NDArray[Any]], keys: tuple[str, ...], name: str) -> npt.NDArray[Any]:
    for key in keys:
        if key in arrays:
            return arrays[key]
    raise DataError(
        f"{name}: no array {keys[0]!r}; the file has {sanitize(', '.join(arrays), most=400) or 'none'}."
    )


def _dense(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32] | npt.NDArray[np.float64]:
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name}: features have dtype {array.dtype}; they must be numbers.")
    return array if array.dtype in (np.float32, np.float64) and array.dtype.isnative else array.astype(np.float64)


def parse_idx(content: bytes, name: str = "idx") -> npt.NDArray[np.uint8]:
    """Read an idx file of unsigned bytes: two zero bytes, type 8, the number of axes, big-endian sizes, data.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
    array([7, 9], dtype=uint8)
    """
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{name}: not an idx file of unsigned bytes.")
    axes = content[3]
    start = 4 + 4 * axes
    shape = tuple(int(s) for s in np.frombuffer(content[4:start], ">u4"))
    if len(shape) != axes or len(content) - start != int(np.prod(shape)):
        raise DataError(f"{name}: the idx file is cut short or too long for its header.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def build_idx(array: npt.NDArray[np.uint8]) -> bytes:
    """The inverse of `parse_idx`, so that pixels from any source can meet the original's checksum."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
