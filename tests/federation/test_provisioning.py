"""Keys under a passphrase, authorities of institutions, certificates of a stated life."""

from __future__ import annotations

import datetime
import io
import json
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quietgrad.core.errors import DataError, QuietgradError
from quietgrad.federation.exchange import Responder
from quietgrad.federation.key_files import FILE_VARIABLE, VARIABLE, is_encrypted, passphrase
from quietgrad.federation.provisioning import Credentials, certify, provision, request
from quietgrad.federation.transport.tls import TlsParty, TlsServer
from quietgrad.federation.transport.tls_connection import context_for
from tests.federation.talk import Talk

PHRASE = "correct horse battery staple"


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)


def test_keys_under_a_passphrase_open_with_it_and_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = provision(["a", "coordinator"], tmp_path / "keys", secret=PHRASE.encode(), keep_authority=True)[0]
    secrets = (home / "key.pem", home / "identity.key", tmp_path / "keys/authority/ca.key")
    assert all(is_encrypted(path) for path in secrets)
    with pytest.raises(DataError, match="there is no terminal to ask for it"):
        Credentials.read(home)
    monkeypatch.setenv(VARIABLE, "another passphrase")
    with pytest.raises(DataError, match="the passphrase is wrong"):
        Credentials.read(home)
    monkeypatch.setenv(VARIABLE, PHRASE)
    assert PHRASE not in repr(Credentials.read(home))
    context_for(Credentials.read(home))
    file = tmp_path / "phrase"
    file.write_text(PHRASE + "\n")
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    with pytest.raises(DataError, match="chmod 600"):
        Credentials.read(home)
    file.chmod(0o600)
    monkeypatch.delenv(VARIABLE)
    assert Credentials.read(home).name == "a"


def test_a_short_new_passphrase_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "short")
    assert passphrase("a") == b"short"  # of keys that another program made
    with pytest.raises(DataError, match="give at least 12"):
        passphrase("a", new=True)


def test_the_authoritys_key_is_not_kept_and_certificates_end_when_they_are_said_to(tmp_path: Path) -> None:
    homes = provision(["a", "coordinator"], tmp_path / "keys", days=30)
    assert [path.name for path in (tmp_path / "keys/authority").iterdir()] == ["ca.pem"]
    for home in homes:
        assert b"BEGIN PRIVATE KEY" in (home / "identity.key").read_bytes()
        life = Credentials.read(home).certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        assert datetime.timedelta(days=29) < life <= datetime.timedelta(days=30)
    with pytest.raises(DataError, match="from 1 to 3650"):
        provision(["a"], tmp_path / "more", days=0)


def test_a_folder_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    home = provision(["a", "coordinator"], tmp_path / "keys")[0]
    before = Credentials.read(home)
    entry = json.loads((home / "member.json").read_text())
    del entry["authorities"]
    (home / "member.json").write_text(json.dumps(entry))
    (home / "identity.key").write_text(before.identity.secret_bytes().hex())
    again = Credentials.read(home)
    assert again.identity.public == before.identity.public
    again.check_dates()
    context_for(again)


class Authority:
    """An institution's own certificate authority."""

    def __init__(self, name: str) -> None:
        self.key, self.name = ec.generate_private_key(ec.SECP256R1()), name
        self.certificate = self._sign(name, self.key.public_key(), x509.BasicConstraints(ca=True, path_length=0))

    def issue(self, csr: bytes, name: str, purpose: x509.ObjectIdentifier) -> x509.Certificate:
        key = x509.load_pem_x509_csr(csr).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        san, usage = x509.SubjectAlternativeName([x509.DNSName(name)]), x509.ExtendedKeyUsage([purpose])
        return self._sign(name, key, x509.BasicConstraints(ca=False, path_length=None), san, usage)

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, *extensions: x509.ExtensionType) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        subjects = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, self.name)]
        begin, end = now - datetime.timedelta(hours=1), now + datetime.timedelta(days=90)
        builder = x509.CertificateBuilder(
            subjects[1], subjects[0], key, x509.random_serial_number(), begin, end
        )  # fmt: skip
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self.key, hashes.SHA256())


def pem(certificate: x509.Certificate, path: Path) -> Path:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH


def of_two_hospitals(home: Path) -> tuple[dict[str, Path], dict[str, Authority]]:
    """Two hospitals with an authority each; the coordinator is signed for by the federation's own."""
    authorities = {name: Authority(f"authority of {name}") for name in ("north", "south")}
    requests, folders = {}, {}
    for name, authority in authorities.items():
        folders[name] = home / f"of {name}"
        request(name, folders[name])
        csr = (folders[name] / f"{name}.csr.pem").read_bytes()
        issued = pem(authority.issue(csr, name, CLIENT), home / f"{name}.pem")
        requests[name] = certify(name, folders[name], issued, pem(authority.certificate, home / f"{name}-ca.pem"))
    for made in provision([*authorities, "coordinator"], home / "keys", requests):
        for file in ("ca.pem", "cert.pem", "member.json"):
            folders.setdefault(made.name, made)
            (folders[made.name] / file).write_bytes((made / file).read_bytes())
    return folders, authorities


def called(folders: dict[str, Path], caller: Path, tmp_path: Path) -> tuple[list[str], list[str], list[object]]:
    """What a coordinator says when a member calls with the keys of ``caller``; who was missing; how it ended."""
    said: list[str] = []
    keys = Credentials.read(folders["coordinator"])
    server = TlsServer(keys, ("127.0.0.1", 0), ["north", "south"], agreement="plan", most=1000, tell=said.append)
    ends: list[object] = []

    def run() -> None:
        try:
            ends.append(
                TlsParty(Credentials.read(caller), ("127.0.0.1", server.port), Responder(bytes, "plan"),
                         agreement="plan", most=1000, patience=30.0).run()
            )  # fmt: skip
        except QuietgradError as error:
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    talk = Talk(server)
    name = Credentials.read(caller).name
    _, missing = talk.exchange({name: b"1"}, timeout=20.0 if caller == folders[name] else 3.0)
    talk.finish("over")
    thread.join(timeout=60.0)
    return said, missing, ends


def test_members_of_two_institutions_with_authorities_of_their_own_meet(tmp_path: Path) -> None:
    folders, _ = of_two_hospitals(tmp_path)
    assert len({Credentials.read(folder).fingerprint for folder in folders.values()}) == 1
    said, missing, _ = called(folders, folders["north"], tmp_path)
    assert not missing
    assert "north is connected" in said


def test_an_authority_speaks_for_its_own_institution_only(tmp_path: Path) -> None:
    """South's authority issues a certificate of north's name: good in TLS, refused by the pinned authority."""
    folders, authorities = of_two_hospitals(tmp_path)
    forged = tmp_path / "forged"
    request("north", forged)
    csr = (forged / "north.csr.pem").read_bytes()
    pem(authorities["south"].issue(csr, "north", CLIENT), forged / "cert.pem")
    (forged / "ca.pem").write_bytes((folders["south"] / "ca.pem").read_bytes())
    entry = json.loads((folders["south"] / "member.json").read_text())
    identity = x509.load_pem_x509_csr(csr)  # the forger changes its own copy as it likes
    assert identity.is_signature_valid
    key = serialization.load_pem_private_key((forged / "identity.key").read_bytes(), None).public_key()
    entry["identities"]["north"] = key.public_bytes_raw().hex()  # type: ignore[union-attr]
    entry["authorities"]["north"] = entry["authorities"]["south"]
    (forged / "member.json").write_text(json.dumps({**entry, "name": "north"}))
    said, missing, ends = called(folders, forged, tmp_path)
    assert missing == ["north"]
    assert any("not of the authority that signs for north" in line for line in said)
    assert "not of the authority that signs for north" in str(ends[0])


@pytest.mark.parametrize(
    ("name", "purpose", "words"),
    [
        ("south", CLIENT, "needs 'north' as its one DNS name"),
        ("north", ExtendedKeyUsageOID.SERVER_AUTH, "usage TLS client"),
        (None, CLIENT, "of another key"),
    ],
)
def test_a_certificate_that_others_would_refuse_is_refused_at_once(
    name: str | None, purpose: x509.ObjectIdentifier, words: str, tmp_path: Path
) -> None:
    authority = Authority("authority")
    request("north", tmp_path / "mine")
    request("north", tmp_path / "other")
    csr = (tmp_path / ("other" if name is None else "mine") / "north.csr.pem").read_bytes()
    issued = pem(authority.issue(csr, name or "north", purpose), tmp_path / "cert.pem")
    with pytest.raises(DataError, match=words):
        certify("north", tmp_path / "mine", issued, pem(authority.certificate, tmp_path / "ca.pem"))
    foreign = pem(Authority("authority").certificate, tmp_path / "foreign.pem")
    with pytest.raises(DataError, match="not issued directly by the authority"):
        certify("north", tmp_path / "mine", issued, foreign)


def test_a_certificate_swapped_in_a_request_is_noticed(tmp_path: Path) -> None:
    _, authorities = of_two_hospitals(tmp_path)
    path = tmp_path / "of north" / "north.request.json"
    body = json.loads(path.read_text())
    csr = (tmp_path / "of north" / "north.csr.pem").read_bytes()
    again = authorities["south"].issue(csr, "north", CLIENT).public_bytes(serialization.Encoding.PEM).decode()
    authority = authorities["south"].certificate.public_bytes(serialization.Encoding.PEM).decode()
    path.write_text(json.dumps({**body, "certificate": again, "authority": authority}))
    with pytest.raises(DataError, match="not a valid request"):
        provision(["north", "coordinator"], tmp_path / "again", {"north": path})
