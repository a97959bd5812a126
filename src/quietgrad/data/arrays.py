"""Array files: npz (dense or CSR parts) and the idx format of MNIST. Pickles are never opened."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.data.containers import EXPANSION, budget
from quietgrad.data.dataset import Dataset, Matrix, Task, check, encode_labels
from quietgrad.data.libsvm import MOST_FEATURES
from quietgrad.errors import DataError, boundary
from quietgrad.sanitize import sanitize


def parse_npz(
    content: bytes, *, task: Task | None = None, classes: Sequence[object] | None = None, name: str = "npz"
) -> Dataset:
    """Read `X, y[, X_test, y_test]` from an npz file.

    `X` may instead be stored as CSR parts `data, indices, indptr, shape` (what scipy's save_npz writes, plus `y`).

    >>> buffer = io.BytesIO()
    >>> np.savez(buffer, X=np.eye(2), y=np.array([0, 1]))
    >>> parse_npz(buffer.getvalue()).task
    'binary'
    """
    arrays = open_npz(content, name)
    X = _matrix(arrays, name)
    raw = _array(arrays, ("y", "y_train"), name)
    y, kind, codes, class_names = encode_labels(name, raw.ravel(), task, classes)
    X_test = y_test = None
    if "X_test" in arrays or "x_test" in arrays:
        X_test = _dense(_array(arrays, ("X_test", "x_test"), name), name)
        if classes is None and class_names is not None:
            classes = tuple(int(label) for label in class_names)  # the pair that the training labels matched
        y_test = encode_labels(name, _array(arrays, ("y_test",), name).ravel(), kind, classes)[0]
    return check(Dataset(name, X, y, X_test, y_test, task=kind, classes=codes, class_names=class_names))


def open_npz(content: bytes, name: str) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an npz file, without unpickling anything.

    >>> open_npz(b"PK", "cut.npz")
    Traceback (most recent call last):
    quietgrad.errors.DataError: cut.npz: not a readable npz file ...
    """
    most, arrays = budget(len(content)), {}
    refusal = f"{name}: not a readable npz file of plain arrays; it may be cut short or hold pickled objects."
    with boundary(refusal), zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > most:
            raise DataError(f"{name}: its arrays are more than {EXPANSION} times the file's size.")
        for member in members:
            arrays[member.filename.removesuffix(".npy")] = _read_npy(archive, member)
    return arrays


def _read_npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """One array, if its header announces exactly the bytes that the archive holds for it."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("zipfile unpacks other kinds without a limit")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError("unknown version")
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(file)
        left = member.file_size - file.tell()
        if dtype.hasobject or dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != left:
            raise ValueError("the header does not fit the content")
        body = bytearray(file.read(left))  # may be written to, as any array
    array = np.frombuffer(body, dtype)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _matrix(arrays: dict[str, npt.NDArray[Any]], name: str) -> Matrix:
    if {"data", "indices", "indptr", "shape"} <= arrays.keys():
        from scipy import sparse

        parts: Any = (_dense(arrays["data"], name), arrays["indices"], arrays["indptr"])
        with boundary(f"{name}: data, indices, indptr and shape are not a valid CSR matrix."):
            rows, columns = (int(s) for s in arrays["shape"].ravel())
            if columns > MOST_FEATURES or any(
                arrays[part].dtype.kind not in "iu" for part in ("indices", "indptr")
            ):
                raise ValueError
            matrix: Any = sparse.csr_matrix(parts, shape=(rows, columns))
            matrix.check_format(full_check=True)
        checked: Matrix = matrix
        return checked
    return _dense(_array(arrays, ("X", "x_train", "X_train"), name), name)


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
    """The inverse of `parse_idx`, so that pixels from any source can meet the original's checksum.

    >>> parse_idx(build_idx(np.array([[1, 2]], np.uint8)))
    array([[1, 2]], dtype=uint8)
    """
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
