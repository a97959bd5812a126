"""A corpus for every reader of files and bytes made by others, ways to spoil it, and what a reader may do with it.

A reader returns something valid or raises one of quietgrad's own errors: anything else is a defect. Used by
``tests/behaviour/test_hostile_files.py`` in passing and by ``benchmarks/fuzz.py`` for as long as one likes.
"""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import io
import json
import random
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import safetensors.numpy

import quietgrad as qg
from quietgrad.assurance.certificates import check, issue
from quietgrad.assurance.certificates.document import PrivacyCertificate, canonical, parse
from quietgrad.assurance.report.page import read_runs, render
from quietgrad.cli.run_spec import RunSpec
from quietgrad.core.accounting.events import gaussian
from quietgrad.core.errors import QuietgradError
from quietgrad.core.ledger import chain
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.schedule import Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session import checkpoint, statement
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.data import load, scan
from quietgrad.federation.plan_file import read_plan
from quietgrad.federation.provisioning import asker, provision, request
from quietgrad.federation.wire import Message, WireError, decode, encode
from quietgrad.methods import result
from quietgrad.objectives import Squared
from tests.federation.talk import toml_plan

ALLOWED = (QuietgradError, WireError)
LIBSVM = b"+1 1:0.5 3:1\n-1 2:2e-3 # remark\n+1\n-1 1:1 2:-1 3:4.25\n"
CSV = b'age,"sex",y\n31,F,0\n44,M,1\n,F,1\n1e1,M,0\n'
NUMBERS = b"a;b;y\n1;2;0\n3;4.5;1\n-1;.5;1\n"
SCHEMA: dict[str, Any] = {
    "label": {"column": "y", "classes": ["0", "1"]},
    "columns": {"age": {"bounds": [0, 100], "fill": 40}, "sex": {"categories": ["F", "M"]}},
}
PLAN = toml_plan(
    {"a": 60, "b": 40}, 'name = "two-clinics"\ntrust = "secure"\nsecure = "masks"', steps=3, features=2
).encode()
WORDS = (
    b"0", b"-1", b"1", b"3000000000", b"99999999999999999999", b"4294967296", b"1e999", b"nan", b"inf", b"-0", b"",
    b":", b",", b";", b"\n", b"\r\n", b"\t", b" ", b"\0", b"#", b'"', b"'", b"[", b"{", b"]", b"}", b"[" * 3000,
    b'{"a":' * 3000, b"a." * 3000, b"\xff", b"\xef\xbb\xbf", b"\x1b]0;title\x07", b"\xe2\x80\xae", b"../../x",
    b"true", b"null", b"NaN", b"x" * 5000, b"9" * 5000, b"1:1 " * 500, b"=cmd|' /C calc'!A0",
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """Takes bytes and a folder to work in; ``seeds``, packed by ``pack``, are inputs that it accepts."""

    name: str
    read: Callable[[bytes, Path], object]
    seeds: Callable[[], list[bytes]]
    pack: Callable[[bytes], bytes] = bytes

    def case(self, seeds: list[bytes], rng: random.Random) -> bytes:
        """A spoiled input: of an archive either the content or the packed bytes, or both."""
        seed = rng.choice(seeds)
        if self.pack is bytes:
            return spoiled(seed, rng)
        kind = rng.randrange(3)
        packed = self.pack(spoiled(seed, rng) if kind else seed)
        return packed if kind == 1 else spoiled(packed, rng)


def spoiled(seed: bytes, rng: random.Random) -> bytes:
    """``seed`` with a few bytes changed, cut, doubled, moved, or words put in that readers stumble over."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 4, 16, 64)))
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at:end] = rng.randbytes(end - at)
            case 2:
                data[at:at] = rng.choice(WORDS)
            case 3:
                data[at:end] = rng.choice(WORDS)
            case 4:
                del data[at:end]
            case 5:
                data[at:at] = bytes(data[at:end]) * rng.choice((1, 2, 50))
            case 6:
                del data[at:]
            case 7 if len(data) >= 8:  # a length or an offset, as binary formats keep them
                size = rng.choice((1, 2, 4, 8))
                start = rng.randrange(len(data) - size + 1)
                number = rng.choice((0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), rng.randrange(1 << 8 * size)))
                data[start : start + size] = number.to_bytes(size, "little")
    return bytes(data)


def _table(suffix: str, **settings: Any) -> Callable[[bytes, Path], object]:
    def read(content: bytes, folder: Path) -> object:
        path = folder / f"rows{suffix}"
        path.write_bytes(content)
        data = load(path, **settings)
        total = data.X @ np.ones(data.d)  # indices that point elsewhere would crash here
        assert total.shape == (data.n,)
        assert np.isfinite(data.X.data if hasattr(data.X, "indptr") else data.X).all()
        return data

    return read


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _npz_seeds() -> list[bytes]:
    packed = io.BytesIO()
    np.savez_compressed(packed, X=np.eye(3), y=np.array([0, 1, 0]), X_test=np.eye(3), y_test=np.array([1, 0, 1]))
    return [packed.getvalue(), _npz(X=np.eye(2, dtype=np.float32), y=[0, 1])]


def _parquet_seeds() -> list[bytes]:
    out = []
    for compression in ("none", "snappy", "zstd"):
        table = pyarrow.table({"a": [1.0, 2.0, 0.5], "b": [1, 2, 3], "y": [0, 1, 0]})
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer, compression=compression)
        out.append(buffer.getvalue())
    return out


def _result() -> tuple[dict[str, Any], bytes]:
    privacy = statement.Privacy(
        2.6, 1e-5, qg.Relation.ADD_REMOVE, "gaussian-exact", 5.0, gaussian(5.0, 10), {"gradient": 10}, "all",
        "anyone", "default", True,
    )  # fmt: skip
    slots = [Slot("gradient", FullBatch(), 10).to_json()]
    details = {"slots": slots, "epsilon_curve": [[5, 1.0], [10, 2.5], [11, 2.5]]}
    history = [{"step": k, "estimate_norm": 1.0 / k} for k in range(1, 4)]
    made = result.Result(np.zeros(3), privacy, "dp-gd", {"steps": 10}, 100, history, details=details)
    return made.to_json(), safetensors.numpy.save({"params": np.zeros(3)})


def _read_result(content: bytes, folder: Path) -> object:
    (folder / "model.safetensors").write_bytes(_result()[1])
    (folder / "result.json").write_bytes(content)
    return render(read_runs([folder]))


def _read_model(content: bytes, folder: Path) -> object:
    (folder / "result.json").write_text(json.dumps(_result()[0]))
    (folder / "model.safetensors").write_bytes(content)
    return result.load(folder)


def _read_checkpoint(content: bytes, folder: Path) -> object:
    (folder / "checkpoint.safetensors").write_bytes(content)
    return checkpoint.load(folder / "checkpoint.safetensors", lambda run: bytes(32))


def _checkpoint() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.safetensors"
        checkpoint.save(
            path, "a", {"state": qg.DPGD(steps=2).init(np.zeros(3)), "used": {"gradient": 1}}, bytes(32)
        )
        return path.read_bytes()


def _read_schema(content: bytes, folder: Path) -> object:
    (folder / "schema.json").write_bytes(content)
    (folder / "rows.csv").write_bytes(CSV)
    return load(folder / "rows.csv", schema=folder / "schema.json")


def _read_options(content: bytes, folder: Path) -> object:
    (folder / "run.json").write_bytes(content)
    return RunSpec.load(folder)


def _options() -> bytes:
    return json.dumps(dataclasses.asdict(RunSpec(data="a9a", epsilon=1.0))).encode()


def _read_plan(content: bytes, folder: Path) -> object:
    (folder / "plan.toml").write_bytes(content)
    return read_plan(folder / "plan.toml").digest


def _read_wire(content: bytes, folder: Path) -> object:
    return decode(bytearray(content), most=1 << 20)


_HEADER = json.dumps({"kind": "ask", "fields": {"round": 1}, "arrays": [["x", "<f8", [4]]]}).encode()


def _read_header(content: bytes, folder: Path) -> object:
    """A header whose sums are right, whatever it says."""
    text = content + b" " * (-(24 + len(content)) % 8)
    head = struct.pack("<3sBIIQ4x", b"QGM", 1, len(text), zlib.crc32(text), 0)
    return decode(bytearray(head + text + bytes(32)), most=1 << 21)


def _wire_seeds() -> list[bytes]:
    arrays = {"x": np.arange(4.0), "b": np.frombuffer(b"bytes", np.uint8)}
    return [bytes(encode(Message("ask", {"round": 1, "deep": [[1]]}, arrays))), bytes(encode(Message("open", {})))]


def _read_ledger(content: bytes, folder: Path) -> object:
    path = folder / "ledger.jsonl"
    path.write_bytes(content)
    _head(path, content.rstrip(b"\n").rpartition(b"\n")[2], content.count(b"\n"))
    ledger = Ledger(path)
    ledger.verify()
    return ledger.book()


def _head(path: Path, last: bytes, lines: int) -> None:
    """A head that fits the last line, if that has a hash."""
    try:
        head = {"hash": json.loads(last)["hash"], "seq": lines}
    except (ValueError, KeyError, TypeError, RecursionError):
        head = {"hash": "", "seq": lines}
    path.with_name("ledger.jsonl.head").write_text(json.dumps(head))


def _read_forged_ledger(content: bytes, folder: Path) -> object:
    """Bodies that somebody wrote and chained again: every hash fits, and nothing else need."""
    lines: list[bytes] = []
    before = "0" * 64
    for number, text in enumerate(content.split(b"\n"), start=1):
        try:
            kind, body = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            continue
        entry = chain.ChainEntry(len(lines) + 1, f"2026-01-01T00:00:0{number % 10}Z", kind, body, before)
        before = entry.digest()
        lines.append(chain.canonical({**vars(entry), "hash": before}))
    return _read_ledger(b"\n".join([*lines, b""]), folder)


def _bodies() -> bytes:
    pairs = ([entry["kind"], entry["body"]] for entry in map(json.loads, _ledger().splitlines()))
    return b"\n".join(json.dumps(pair).encode() for pair in pairs)


def _ledger() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        paid = ledger.reserve("a", gaussian(5.0, 2), delta=1e-5, relation="add-remove", run="r")
        ledger.close(paid.id, reason="done")
        return (Path(folder) / "ledger.jsonl").read_bytes()


def _read_request(content: bytes, folder: Path) -> object:
    path = folder / "a.request.json"
    path.write_bytes(content)
    name = asker(path)
    shutil.rmtree(folder / "keys", ignore_errors=True)
    return provision([name, "coordinator"], folder / "keys", {name: path})


def _request() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return request("a", Path(folder) / "a").read_bytes()


def _certificate() -> bytes:
    X = np.linspace(-1.0, 1.0, 50)[:, None]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        budget, ledger = qg.Budget(1.0, 1e-5), run / "ledger.jsonl"
        run.mkdir()
        data = X, (X[:, 0] > 0) * 1.0
        qg.minimize(qg.objectives.Logistic(), data, qg.DPGD(steps=2), budget=budget, ledger=ledger).save(run)
        return canonical(issue(run).body)


def _certified(body: bytes) -> bytes:
    """A certificate with a digest that fits, where the body is still JSON: otherwise the digest alone is tried."""
    try:
        return PrivacyCertificate(json.loads(body)).to_bytes()
    except (ValueError, RecursionError, TypeError):
        return body


def _read_certificate(content: bytes, folder: Path) -> object:
    return check(parse(content, "certificate"))


def _scanned(suffix: str) -> Callable[[bytes, Path], object]:
    def read(content: bytes, folder: Path) -> object:
        path = folder / f"rows{suffix}"
        path.write_bytes(content)
        records = Squared().prepare(scan(path, target="y", columns=["a", "b"], threads=1))
        out = np.zeros(records.dim)
        Squared().add(Batch(records, None), [np.zeros(records.dim)], ClippingRule.gradient(1.0), out)
        assert float(np.linalg.norm(out)) <= len(records)  # nobody exceeds the clip, whatever is in the file
        return out

    return read


READERS = (
    Reader("libsvm", _table(".libsvm"), lambda: [LIBSVM, b"1 1:1\n0 2:1\n"]),
    Reader("csv", _table(".csv"), lambda: [NUMBERS, b"a,y\n1,0\n2,1\n", NUMBERS.replace(b"\n", b"\r\n")]),
    Reader("csv with a schema", _table(".csv", schema=SCHEMA), lambda: [CSV]),
    Reader("npz", _table(".npz"), _npz_seeds),
    Reader("parquet", _table(".parquet"), _parquet_seeds),
    Reader("gz", _table(".csv.gz"), lambda: [NUMBERS, NUMBERS + NUMBERS[6:] * 20], gzip.compress),
    Reader("bz2", _table(".libsvm.bz2"), lambda: [LIBSVM, LIBSVM * 20], bz2.compress),
    Reader("safetensors", _read_model, lambda: [_result()[1]]),
    Reader("checkpoint", _read_checkpoint, lambda: [_checkpoint()]),
    Reader("result.json", _read_result, lambda: [json.dumps(_result()[0]).encode()]),
    Reader("schema.json", _read_schema, lambda: [json.dumps(SCHEMA).encode()]),
    Reader("run.json", _read_options, lambda: [_options()]),
    Reader("plan.toml", _read_plan, lambda: [PLAN]),
    Reader("wire", _read_wire, _wire_seeds),
    Reader("wire header", _read_header, lambda: [_HEADER]),
    Reader("ledger", _read_ledger, lambda: [_ledger()]),
    Reader("forged ledger", _read_forged_ledger, lambda: [_bodies()]),
    Reader("request.json", _read_request, lambda: [_request()]),
    Reader("certificate", _read_certificate, lambda: [_certificate()], _certified),
    Reader("scanned parquet", _scanned(".parquet"), _parquet_seeds),
    Reader("scanned csv", _scanned(".csv"), lambda: [b"a,b,y\n1,2,0\n0.5,-3,1\n2,1e3,0\n"]),
)
