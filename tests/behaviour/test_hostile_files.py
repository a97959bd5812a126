"""Files and bytes from others: a clear error or something valid; never a crash, a hang, or memory without end."""

from __future__ import annotations

import base64
import bz2
import contextlib
import gzip
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.errors import DataError, LedgerError
from quietgrad.core.files import parse_json, read_bytes, write_atomically
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.data import load, scan
from quietgrad.data.file_formats import MOST_FEATURES, SMALL, open_npz, parse_libsvm, unpacked
from quietgrad.data.tables import coded, parse_csv
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.provisioning import _Request, request
from tests.behaviour.hostile import ALLOWED, READERS, Reader

CASES = 60


@contextlib.contextmanager
def soon(seconds: int = 20) -> Iterator[None]:
    """Fail instead of hanging."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_spoiled_input_is_refused_or_valid(reader: Reader, tmp_path: Path) -> None:
    seeds = reader.seeds()
    for seed in seeds:
        assert reader.read(reader.pack(seed), tmp_path) is not None
    for case in range(CASES):
        rng = random.Random(case)
        data = reader.case(seeds, rng)
        with soon(), contextlib.suppress(*ALLOWED):
            reader.read(data, tmp_path)


_NUMBERISH = st.one_of(
    st.integers(-5, 5).map(str),
    st.floats().map(repr),
    st.sampled_from(["3000000000", "1e999", "", "x", "+", "0x1"]),
)
_PAIR = st.tuples(st.one_of(st.integers(-1, 9), st.integers(2**31 - 2, 2**64)), _NUMBERISH).map(
    lambda pair: f"{pair[0]}:{pair[1]}"
)
_ROW = st.tuples(_NUMBERISH, st.lists(_PAIR, max_size=4)).map(lambda row: " ".join([row[0], *row[1]]))


@given(st.lists(_ROW, max_size=5), st.sampled_from([None, 4, 2**31 + 5]))
@settings(max_examples=60, deadline=None)
def test_any_libsvm_text(rows: list[str], d: int | None) -> None:
    try:
        X, y = parse_libsvm("\n".join(rows).encode(), d)
    except DataError:
        return
    X.check_format(full_check=True)
    assert X.shape[0] == len(y)
    assert X.shape[1] == d or d is None
    assert X.indices.min(initial=0) >= 0


@given(st.lists(st.lists(st.text(max_size=8), max_size=4), max_size=5), st.sampled_from([",", ";", "\t"]))
@settings(max_examples=60, deadline=None)
def test_any_csv_text(rows: list[list[str]], mark: str) -> None:
    text = "\n".join(mark.join(row) for row in rows)
    try:
        data = parse_csv(text.encode(errors="surrogatepass"))
    except DataError:
        return
    assert data.X.shape == (data.n, len(data.feature_names or ()))


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_bytes_for_json(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_json(data)


def test_indices_beyond_32_bits_do_not_wrap() -> None:
    for declared in (None, 3_000_000_000):
        with pytest.raises(DataError, match="below 2³¹"):
            parse_libsvm(b"1 3000000000:1\n-1 1:1\n", declared)
    X, _ = parse_libsvm(b"1 2000000000:1\n-1 1:1\n", 3_000_000_000)
    assert X.shape == (2, 3_000_000_000)
    assert X.indices.tolist() == [1_999_999_999, 0]
    with pytest.raises(DataError, match="declare n_features"):
        parse_libsvm(f"1 {MOST_FEATURES + 1}:1\n".encode())
    with pytest.raises(DataError):
        parse_libsvm(b"1 99999999999999999999:1\n")


def test_a_short_archive_with_gigabytes_inside(tmp_path: Path) -> None:
    packer = bz2.BZ2Compressor()
    bomb = b"".join(packer.compress(bytes(1 << 24)) for _ in range(8)) + packer.flush()  # 128 MiB in 130 bytes
    for name, content in (("a.csv.bz2", bomb), ("a.csv.gz", gzip.compress(bytes(1 << 26)))):
        (tmp_path / name).write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match="unpacks to more than"):
                load(tmp_path / name)
            assert tracemalloc.get_traced_memory()[1] < 4 * SMALL
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("module", [gzip, bz2])
def test_archives_of_several_members_unpack_whole(module: object) -> None:
    pack = module.compress  # type: ignore[attr-defined]
    text = os.urandom(5000) * 3
    assert unpacked(pack(text) + pack(b"") + pack(text), "x") == text * 2
    assert unpacked(pack(text) + bytes(512), "x") == text  # a tape's last block
    for damaged in (pack(text)[:-3], pack(text)[:30]):
        with pytest.raises(DataError, match="cut short or damaged"):
            unpacked(damaged, "x")


def test_a_damaged_archive_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = gzip.compress(b"a,y\n" + b"1,0\n2,1\n" * 3000)
    spoilt = good[: len(good) // 2] + b"\0\1\2\3" + good[len(good) // 2 + 4 :]
    wrong_sum, no_start = good[:-5] + b"\0" + good[-4:], b"\0\0" + good[2:]
    for content in (good[:-4], spoilt, good[:2], b"\x1f\x8b" + b"junk" * 9, wrong_sum, no_start):
        for name in ("rows.csv.gz", "rows.libsvm.gz"):
            (tmp_path / name).write_bytes(content)
            assert main(["train", str(tmp_path / name), "--epsilon", "1", "--out", str(tmp_path / "run")]) == 1
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert "the compressed file is cut short or damaged" in said
    assert not (tmp_path / "run").exists()


def test_a_header_of_many_columns_is_no_hang() -> None:
    columns = 40_000  # code that looks a name up in a list would make a thousand million comparisons
    names = ",".join(f"c{k}" for k in range(columns))
    with soon(60):
        assert parse_csv(f"{names},y\n{'1,' * columns}0\n{'2,' * columns}1\n".encode()).d == columns
        with pytest.raises(DataError, match="40000 in all"):
            parse_csv(names.encode() + b"\n", label="absent")


def test_one_long_label_costs_its_own_length_only() -> None:
    text = b"a,y\n" + b"1,no\n1,yes\n" * 8000 + b"1," + b"x" * 900 + b"\n"
    tracemalloc.start()
    try:
        assert parse_csv(text, classes=("no", "yes")).y[-1] == 0
        assert tracemalloc.get_traced_memory()[1] < 64 * len(text)
    finally:
        tracemalloc.stop()


def npz(header: bytes, body: bytes = b"", kind: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        archive.writestr("X.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        npz(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}\n"),
        npz(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n", b"cos\nsystem\n(S'id'\ntR."),
        npz(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1)}\n", bytes(8)),
        npz(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 26,)}\n", bytes(8), zipfile.ZIP_BZIP2),
        npz(
            b"{'descr': '|u1', 'fortran_order': False, 'shape': (67108864,)}\n",
            bytes(1 << 26),
            zipfile.ZIP_DEFLATED,
        ),
    ],
)
def test_an_npz_that_announces_more_than_it_holds(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            open_npz(content, "hostile.npz")
        assert tracemalloc.get_traced_memory()[1] < 4 * SMALL
    finally:
        tracemalloc.stop()


def test_npz_agrees_with_numpy() -> None:
    arrays = {
        "X": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "y": np.array([0, 1]),
        "s": np.array(["a", "bc"]),
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    for key, array in open_npz(buffer.getvalue(), "x").items():
        np.testing.assert_array_equal(array, arrays[key])
        assert array.flags.writeable


def test_a_parquet_table_that_expands_without_end(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    n = 3_000_000
    table = pyarrow.table({"a": np.zeros(n), "y": np.zeros(n, np.int64)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 40_000
    with pytest.raises(DataError, match="times the file's size"):
        load(tmp_path / "a.parquet")


def test_codes_beyond_the_list_of_words() -> None:
    """pyarrow decodes them without a check; a damaged page made an IndexError of them."""
    import pyarrow

    codes = pyarrow.array([0, 7], pyarrow.int32())
    words = pyarrow.DictionaryArray.from_arrays(codes, pyarrow.array(["a", "b"]), safe=False)
    with pytest.raises(pyarrow.ArrowException):  # which its caller says in one sentence
        coded(words)


def test_a_request_of_another_version_is_not_a_valid_one(tmp_path: Path) -> None:
    """cryptography has an error of its own for it, which was not one sentence."""
    body = json.loads(request("a", tmp_path / "a").read_bytes())
    begin, *lines, end = body["request"].strip().splitlines()
    der = base64.b64decode("".join(lines)).replace(b"\x02\x01\x00", b"\x02\x01\x20", 1)
    body["request"] = "\n".join([begin, base64.b64encode(der).decode(), end, ""])
    (tmp_path / "request.json").write_text(json.dumps(body))
    with pytest.raises(DataError, match="not a valid request of 'a'"):
        _Request.read(tmp_path / "request.json", "a")


def test_a_scanned_header_that_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"a,\rb,y\n1,2,0\n")
    with pytest.raises(DataError, match=r"not readable as delimited text|names a column|no column"):
        scan(tmp_path / "rows.csv", target="y")


def test_no_byte_of_a_scanned_parquet_file_ends_the_process(tmp_path: Path) -> None:
    """Damaged facts of a column did, if pyarrow was asked for them before the column was read."""
    script = (
        "import resource, sys; from pathlib import Path; from tests.behaviour.hostile import ALLOWED, READERS\n"
        "reader = next(reader for reader in READERS if reader.name == 'scanned parquet')\n"
        "good = reader.seeds()[1]; reader.read(good, Path(sys.argv[1]))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for place in range(len(good)):\n"
        "    spoiled = bytearray(good); spoiled[place] ^= 8\n"
        "    try: reader.read(bytes(spoiled), Path(sys.argv[1]))\n"
        "    except ALLOWED: pass\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB\n"
        "print('alive')"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.stdout.strip() == "alive", ran.stderr[-500:]


def test_a_plan_with_a_number_of_thousands_of_digits() -> None:
    with pytest.raises(DataError, match="too many digits"):
        parse_plan(f"rounds = 1{'0' * 5000}\n")


def test_pipes_sockets_and_devices_are_refused_before_they_are_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "rows.csv"
    os.mkfifo(pipe)
    door = tmp_path / "door.csv"
    with socket.socket(socket.AF_UNIX) as listener, soon():
        listener.bind(str(door))
        for path in (pipe, door, Path("/dev/zero")):
            with pytest.raises(DataError, match="pipe, socket or device"):
                read_bytes(path)
            with pytest.raises(DataError, match="pipe, socket or device"):
                load(path)
        os.mkfifo(tmp_path / "ledger.jsonl")
        with pytest.raises(LedgerError, match="pipe, socket or device"):
            Ledger(tmp_path / "ledger.jsonl").entries()
        assert main(["ledger", "show", str(tmp_path / "ledger.jsonl")]) == 1
        os.mkfifo(tmp_path / "plan.toml")
        assert main(["federate", "show", str(tmp_path / "plan.toml")]) == 1
        for name in ("result.json", "model.safetensors"):
            os.mkfifo(tmp_path / name)
        assert main(["report", str(tmp_path)]) == 1
        os.mkfifo(tmp_path / "run.json")
        assert main(["resume", str(tmp_path)]) == 1
    assert "pipe" in capsys.readouterr().err


def test_writing_follows_no_link_and_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, target = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    target.symlink_to(victim)
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to(victim)  # what was once the name of the part
    write_atomically(target, b"new", private=True)
    assert victim.read_text() == "precious"
    assert target.read_bytes() == b"new"
    assert not target.is_symlink()
    assert target.stat().st_mode & 0o077 == 0

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"other")
    assert sorted(tmp_path.iterdir()) == before
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (((((2,)",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}\x00\x00(",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }'''",
        b"\xff\xfe" * 20,
        b"{'descr': ('<f8', " + b"(" * 300 + b"2" + b")" * 300 + b"), 'fortran_order': False, 'shape': (2,)}",
        b"[" * 5000,
    ],
)
def test_whatever_a_foreign_parser_raises_is_one_refusal(header: bytes) -> None:
    """A spoiled header ended in tokenize.TokenError."""
    with pytest.raises(DataError, match="not a readable npz"):
        open_npz(npz(header, bytes(16)), "spoiled.npz")


@pytest.mark.parametrize("number", [5e-324, 1e-200, 1e300, -1.0, True, "1", None, [], 10**400])
def test_a_result_with_an_absurd_number_is_refused(number: Any, tmp_path: Path) -> None:
    """A tiny multiplier ended in ZeroDivisionError."""
    rows = (np.linspace(-1.0, 1.0, 50)[:, None], np.arange(50) % 2)
    budget = qg.Budget(1.0, 1e-5)
    result = qg.minimize(qg.objectives.Logistic(), rows, qg.DPGD(steps=3), budget=budget, n_public=50)
    result.save(tmp_path)
    said = json.loads((tmp_path / "result.json").read_text())
    said["privacy"]["event"]["inner"]["noise_multiplier"] = number
    (tmp_path / "result.json").write_text(json.dumps(said))
    with pytest.raises(DataError, match=r"not a result|cannot be read"):
        qg.load(tmp_path)
