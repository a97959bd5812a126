"""File formats without columns of their own: packed bytes, LIBSVM text, npz and idx. Pickles are never opened."""

from __future__ import annotations

import bz2
import codecs
import hashlib
import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad import files
from quietgrad.data.dataset import Dataset, Matrix, Task, check, encode_labels
from quietgrad.errors import DataError, boundary
from quietgrad.sanitize import sanitize

if TYPE_CHECKING:
    from scipy import sparse

EXPANSION = 256
"""How many times its own size a file may become when it is unpacked; six kilobytes can hold gigabytes."""
SMALL = 16 << 20
"""Bytes that every file may become: short repetitive tables shrink a thousandfold."""
_PIECE = 1 << 20
_STEP = 1 << 9  # a file may have a hundred thousand members of a few bytes each


def budget(size: int) -> int:
    """The most bytes that a file of ``size`` bytes may become in memory."""
    return max(SMALL, EXPANSION * size)


def read_content(path: Path) -> bytes:
    """The unpacked bytes of a file; a cut or damaged archive is refused, and one that unpacks to too much.

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
    content = unpacked(raw, str(path))
    if content is raw and path.suffix in (".gz", ".bz2", ".xz") and not _is_text(raw[:4096]):
        raise DataError(_DAMAGED.format(path))  # a plain file under such a name is common, bytes of neither are not
    if not content or content.isspace():
        raise DataError(f"{path}: the file is empty.")
    return content


def unpacked(raw: bytes, where: str) -> bytes:
    """The content of gzip, bzip2 or xz bytes; all others are their own content."""
    # The first bytes decide, not the suffix: a renamed file is common.
    if raw.startswith(b"\x1f\x8b"):
        kind: Any = lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)  # noqa: E731
    elif raw.startswith(b"BZh"):
        kind = bz2.BZ2Decompressor
    elif raw.startswith(b"\xfd7zXZ\x00"):
        kind = lambda: lzma.LZMADecompressor(memlimit=64 << 20)  # noqa: E731
    else:
        return raw
    with boundary(_DAMAGED.format(where)):
        return _unpack(raw, kind, budget(len(raw)), where)


_DAMAGED = "{}: the compressed file is cut short or damaged. Fetch or copy it again."


def _is_text(start: bytes) -> bool:
    """Whether bytes could begin a table: UTF-8 (a character may be cut at the end) without controls."""
    words = codecs.getincrementaldecoder("utf-8")("replace").decode(start)
    return not any(character == "\ufffd" or (character < " " and character not in "\t\r\n") for character in words)


def _unpack(raw: bytes, kind: Any, most: int, where: str) -> bytes:
    """Unpack one member after the other, never more than a piece beyond ``most`` bytes."""
    pieces: list[bytes] = []
    size = at = 0
    while at < len(raw):
        if pieces and raw[at] == 0 and not raw[at:].strip(b"\0"):
            break  # tapes and some tools fill the last block with zeros
        unpacker, step = kind(), _STEP
        while not unpacker.eof:
            data = getattr(unpacker, "unconsumed_tail", b"")
            if not data and getattr(unpacker, "needs_input", True):
                data = raw[at : at + step]
                at, step = at + len(data), min(2 * step, _PIECE)
                if not data:
                    raise EOFError
            piece = unpacker.decompress(data, _PIECE)
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise DataError(
                    f"{where}: unpacks to more than {EXPANSION} times its size and {SMALL >> 20} MiB; if that is "
                    "meant, unpack it by hand and load the plain file."
                )
        at -= len(unpacker.unused_data)
    return b"".join(pieces)


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
        raise DataError(f"{name}: a feature index exceeds n_features={n_features}.")
    if n_features is None and widest > MOST_FEATURES:
        raise DataError(f"{name}: a feature index exceeds {MOST_FEATURES}. If that is meant, declare n_features.")
    X.resize((len(y), widest if n_features is None else n_features))
    return X, y


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
    """The inverse of `parse_idx`, so that pixels from any source can meet the original's checksum."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
