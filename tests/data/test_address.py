"""Addresses of tables: a login or a query in one opens it, and stands in no file, name, message or traceback."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import re
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.cli.run_spec import RunSpec
from quietgrad.core.errors import DataError, QuietgradError
from quietgrad.data import load, scan
from quietgrad.data.address import Address, guarded, is_address, open_addresses

PASSWORD, KEY = "hunter2-PW", "signature-8d1c"
SECRETS = (PASSWORD, KEY, base64.b64encode(f"bob:{PASSWORD}".encode()).decode())


def table(n: int = 400) -> bytes:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 3))
    rows = ("{:f},{:f},{:f},{:d}".format(*row, int(row[0] > 0)) for row in X)
    return "\n".join(("a,b,c,y", *rows, "")).encode()


class Files(BaseHTTPRequestHandler):
    """A file behind a login, one behind a signed query, and two addresses that lead elsewhere."""

    content: ClassVar[bytes] = table()
    elsewhere: ClassVar[str] = ""

    def log_message(self, format: str, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path in ("/away.csv", "/around.csv"):
            self.send_response(302)
            self.send_header("Location", self.elsewhere if path == "/away.csv" else "/open.csv")
            self.end_headers()
            return
        if path.startswith("/none"):
            self.send_error(404)
            return
        login = self.headers.get("Authorization") == f"Basic {SECRETS[2]}"
        if not (login if path == "/people.csv" else query == f"key={KEY}&v=1" if path == "/signed.csv" else True):
            self.send_error(401)
            return
        body, asked = self.content, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        self.send_response(200 if asked is None else 206)
        if asked is not None:
            first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
            body = body[first : last + 1]
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """HOST:PORT of a server on this machine; another port of it is the other host."""
    pytest.importorskip("aiohttp")
    pytest.importorskip("fsspec")
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Files) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    here, there = (f"127.0.0.1:{server.server_port}" for server in servers)
    Files.elsewhere = f"http://{there}/open.csv?key={KEY}"
    yield here
    for server in servers:
        server.shutdown()
        server.server_close()


def secret_files(*folders: Path) -> list[Path]:
    """The files that hold a password, a key or a login in the form of its header."""
    inside = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert inside
    return [path for path in inside if any(secret.encode() in path.read_bytes() for secret in SECRETS)]


def refusal(error: BaseException) -> str:
    """All that a log could print of an error: its text, its traceback, and the errors that it leads to."""
    seen, one = [], [error]
    while one:
        error = one.pop()
        seen += [repr(error), str(error), *traceback.format_exception(error), repr(vars(error))]
        one += [other for other in (error.__cause__, error.__context__) if other is not None]
    return "\n".join(seen)


@pytest.mark.parametrize("where", [f"bob:{PASSWORD}@HOST/people.csv", f"HOST/signed.csv?key={KEY}&v=1#{KEY}"])
def test_a_run_on_an_address_shows_no_secret(
    host: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """train, report, card, certificate, verify, predict, evaluate and resume write and print none of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    address, out, ledger = f"http://{where.replace('HOST', host)}", tmp_path / "run", tmp_path / "l.jsonl"
    commands = [
        ["train", address, "--epsilon", "2", "--delta", "1e-4", "--algorithm", "dp-gd", "--steps", "3", "--out",
         str(out), "--ledger", str(ledger), "--allow-http"],
        ["ledger", "show", str(ledger)],
        ["report", str(out)],
        ["card", str(out)],
        ["certificate", str(out)],
        ["verify", str(out / "certificate.json")],
        ["predict", str(out), address, "-o", str(tmp_path / "predictions.csv"), "--allow-http"],
        ["evaluate", str(out), address, "--epsilon", "1", "--delta", "1e-4", "--allow-http",
         "--account", " ".join(str(Address(address)).split("/")[-2:])],
        ["resume", str(out), "--data", address],
        ["train", "--from", str(out / "run.json"), address, "--out", str(tmp_path / "again")],
    ]  # fmt: skip
    for command in commands:
        assert main([*command, "--debug"]) == 0, command
    text = str(Address(address))
    assert json.loads((out / "run.json").read_text())["data"] == text
    assert host in text
    assert text in json.loads((out / "result.json").read_text())["details"]["repeat"]
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 401
    assert secret_files(tmp_path) == []
    printed = "".join(capfd.readouterr())
    assert not [secret for secret in SECRETS if secret in printed]


def test_an_error_about_an_address_shows_no_secret(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Refused logins, missing files, unknown kinds, extra words, options and files of the wrong kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    http, s3 = f"http://eve:{PASSWORD}@{host}/people.csv", f"s3://{KEY}:{PASSWORD}@bucket/people.csv"
    asked = ["--epsilon", "2", "--allow-http", "--debug"]
    (tmp_path / "run.toml").write_text(f'data = "{http}"\nepsilon = 1.0\nallow_http = true\n')
    (tmp_path / "schema.toml").write_text(f'schema = "{http}"\ndata = "people.csv"\nepsilon = 1.0\n')
    lines = [
        ["train", http, *asked],
        ["train", f"http://bob:{PASSWORD}@{host}/none/", *asked],
        ["train", f"http://bob:{PASSWORD}@127.0.0.1:1/people.csv", *asked],
        ["train", f"http://bob:{PASSWORD}@{host}/people.csv", "--epsilon", "2", "--debug"],
        ["train", http, "--test", http, *asked],
        ["train", "a9a", f"--test={http}", *asked],
        ["train", "a9a", http, *asked],
        ["train", f"nowhere://bob:{PASSWORD}@host/people.csv", *asked],
        ["train", f"nowhere::{http}", *asked],
        ["train", s3, "--no-such-option", "--debug"],
        ["train", f"s3://{KEY}:{PASSWORD}@bucket/p.csv?scheme=http&endpoint_override=127.0.0.1:1", "--debug"],
        ["train", f"http://bob:{PASSWORD[:4]}/{PASSWORD}@{host}/people.csv", *asked],
        ["train", "--from", "run.toml", "--debug"],
        ["train", "--from", "schema.toml", "--debug"],
        ["train", "a9a", "--schema", http, *asked],
        ["resume", "nothing", "--data", http, "--debug"],
        ["describe", http, "--schema", s3, "--debug"],
        ["data", "schema", http, "--debug"],
        ["data", "schema", "people.csv", "-o", s3, http, "--debug"],
        [http, "--debug"],
        ["federate", "simulate", http, *asked],
        ["frontier", http, "--debug"],
        ["audit", http, "--debug"],
    ]  # fmt: skip
    for line in lines:
        assert main(line) in (1, 2), line
        printed = "".join(capfd.readouterr())
        assert printed, line
        assert not [secret for secret in (*SECRETS, PASSWORD[:4]) if secret in printed], (line, printed)


@pytest.mark.parametrize(
    "source",
    ["http://eve:{pw}@{host}/people.csv", "http://bob:{pw}@{host}/none.csv", "http://{host}/signed.csv?key={pw}",
     "http://bob:{pw}@127.0.0.1:1/x.csv", "nowhere://bob:{pw}@host/x.csv", "s3://KEY:{pw}@bucket/x y z.parquet",
     "simplecache::http://bob:{pw}@{host}/people.csv", "http://bob:a/{pw}@{host}/x.csv", "http://b:{pw}:1/x.csv"],
)  # fmt: skip
def test_no_error_of_python_leads_to_the_secret(host: str, source: str) -> None:
    """Neither the text of an error nor its causes, contexts and attributes; also of a library that quotes."""
    address = source.format(pw=PASSWORD, host=host)
    for opened in (
        lambda: len(scan(address, allow_http=True)),
        lambda: load(address),
        lambda: load("a9a", test=address),
    ):
        with pytest.raises(QuietgradError) as raised:
            opened()
        assert PASSWORD not in refusal(raised.value)

    def quote() -> None:
        raise OSError(f"cannot open {address}")

    with pytest.raises(DataError) as raised:
        guarded(quote, "people: cannot be read.")
    assert PASSWORD not in refusal(raised.value)


def test_plain_http_is_read_only_when_allowed(host: str) -> None:
    address = f"http://bob:{PASSWORD}@{host}/people.csv"
    with pytest.raises(DataError, match="allow_http=True"):
        scan(address)
    with pytest.raises(DataError, match="allow_http=True"):
        scan(f"s3://KEY:{PASSWORD}@bucket/a.parquet?scheme=http&endpoint_override=127.0.0.1:1")
    assert len(scan(address, allow_http=True)) == 400


def test_a_redirect_to_another_host_is_refused(host: str) -> None:
    assert len(scan(f"http://{host}/around.csv", allow_http=True)) == 400
    with pytest.raises(DataError, match="sends the reader on") as raised:
        scan(f"http://{host}/away.csv", allow_http=True)
    assert KEY not in refusal(raised.value)


def test_a_signed_address_and_one_with_a_login_are_read_together(host: str) -> None:
    sources = [f"http://{host}/signed.csv?key={KEY}&v=1", f"http://bob:{PASSWORD}@{host}/people.csv"]
    with pytest.raises(DataError, match="two files hold the same rows"):  # both were read
        qg.objectives.Logistic().prepare(scan(sources, allow_http=True))


@pytest.mark.parametrize(
    ("whole", "text"),
    [
        (f"https://bob:{PASSWORD}@host.org:8443/a/b.csv?x=1#y", "https://host.org:8443/a/b.csv"),
        (f"s3://{KEY}:{PASSWORD}@bucket/p/*.parquet", "s3://bucket/p/*.parquet"),
        ("s3://bucket/people/202?/a.parquet", "s3://bucket/people/202?/a.parquet"),
        (f"s3://bucket/a.parquet?region=eu&secret={KEY}", "s3://bucket/a.parquet"),
        ("s3://bucket/a@b.parquet", "s3://bucket/a@b.parquet"),
        (f"https://{KEY}@host/a.csv", "https://host/a.csv"),
        ("http://[::1]:8000/a.csv", "http://[::1]:8000/a.csv"),
        (f"simplecache::s3://{KEY}:{PASSWORD}@bucket/a.csv", "simplecache::s3://bucket/a.csv"),
        (f"zip://a.csv::https://bob:{PASSWORD}@host/f.zip?k={KEY}", "zip://a.csv::https://host/f.zip"),
        ("memory://people", "memory://people"),
        (f"https://host/a.csv;token={KEY}", "https://host/a.csv"),
        (f"https://host/a.csv&token={KEY}", "https://host/a.csv"),
        (f"https://host/a.csv%3Fsig={KEY}", "https://host/a.csv"),
        (f"https://host/a%3bsig={KEY}/b.csv", "https://host/a"),
        ("s3://bucket/year=2020/R&D/a.parquet", "s3://bucket/year=2020/R&D/a.parquet"),
    ],
)
def test_the_text_of_an_address_has_no_login_query_or_fragment(whole: str, text: str) -> None:
    address = Address(whole)
    shown = (str(address), f"{address}", " ".join([address]), repr(address)[1:-1], json.loads(json.dumps(address)))
    assert {*shown, address + "", address[:], copy.copy(address), copy.deepcopy(address)} == {text}
    assert pickle.loads(pickle.dumps(address)) == text
    assert not any(secret.encode() in pickle.dumps([address]) for secret in SECRETS)
    assert not hasattr(address, "__dict__")
    spec = RunSpec.from_options(data=whole, epsilon=1.0, test=whole)
    assert not [secret for secret in SECRETS if secret in spec.command() + repr(spec)]
    assert Address(address) is address


@pytest.mark.parametrize(
    "whole",
    [f"http://bob:12/{PASSWORD}@host/a.csv", f"http://bob:12?{PASSWORD}@host/a.csv", f"s3://K:1/{PASSWORD}@b/a.csv",
     f"http://bob:12#{PASSWORD}@host/a.csv", f"http://bob:{PASSWORD}/x", f"http://tok/{PASSWORD}@host/a.csv",
     f"s3://K:a@b/{PASSWORD}@bucket/a.csv", f"x{PASSWORD}@::s3://bucket/a.csv",
     f" https://bob:{PASSWORD}@host/a.csv", f"\thttps://bob:{PASSWORD}@host/a.csv", f"https:/bob:{PASSWORD}@host/a",
     f"https:\\\\bob:{PASSWORD}@host/a", f"simplecache:: s3://K:{PASSWORD}@bucket/a.csv",
     f"https://host;token={PASSWORD}/a.csv", f"s3://bucket/a;token={PASSWORD}", f"s3://bucket/a%3Fsig={PASSWORD}",
     f"s3://bucket&k={PASSWORD}/a", f"\x00s3://K:{PASSWORD}@bucket/a.csv"],
)  # fmt: skip
def test_an_address_whose_login_has_no_clear_end_is_refused_without_being_quoted(whole: str) -> None:
    assert is_address(whole)
    with pytest.raises(DataError, match="not clear where its login ends") as raised:
        Address(whole)
    assert PASSWORD not in str(raised.value)


def test_an_s3_address_opens_with_its_login_and_names_files_without() -> None:
    from pyarrow import fs

    if not hasattr(fs, "S3FileSystem"):
        pytest.skip("pyarrow was built without S3")
    address = Address(f"s3://{KEY}:{PASSWORD}@bucket/people/*.parquet?region=eu-west-1")
    system, (path,) = open_addresses([address])
    assert path == "bucket/people/*.parquet"
    assert isinstance(system, fs.S3FileSystem)
    assert system == fs.S3FileSystem(access_key=KEY, secret_key=PASSWORD, region="eu-west-1")
    with pytest.raises(DataError, match="one login"):
        open_addresses([address, Address("s3://bucket/people.parquet")])


def test_a_file_system_that_names_files_with_their_login_is_refused() -> None:
    fsspec = pytest.importorskip("fsspec")

    class Quoting(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol = "quoting"

        @classmethod
        def _strip_protocol(cls, path: str) -> Any:
            return path

    fsspec.register_implementation("quoting", Quoting, clobber=True)
    with pytest.raises(DataError, match="puts logins into the names of files") as raised:
        scan(f"quoting://bob:{PASSWORD}@host/people.csv")
    assert PASSWORD not in refusal(raised.value)


def test_an_old_run_file_with_a_password_is_read_without_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"data": f"s3://{KEY}:{PASSWORD}@bucket/a.csv", "epsilon": 1.0}))
    spec = RunSpec.load(tmp_path)
    assert str(spec.data) == "s3://bucket/a.csv"
    assert PASSWORD not in str(spec.payer(tmp_path)) + spec.command()
    with pytest.raises(DataError, match="the run's data is s3://bucket/a"):
        spec.with_login(data=f"s3://{KEY}:{PASSWORD}@other/a.csv")
