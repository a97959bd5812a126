"""The plan file, and the keys and certificates made for it."""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path

import numpy as np
import pytest

from quietgrad.cli import main
from quietgrad.cli.federate_roles import cannot_listen
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.pins import pin_of, readable_digest
from quietgrad.federation.plan_file import parse_plan, read_plan
from quietgrad.federation.provisioning import Credentials, asker, provision, request
from quietgrad.federation.revocation import check_none_revoked
from quietgrad.federation.wire import Message, decode, encode
from tests.federation.talk import approval, toml_plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "five-hospitals" / "plan.toml"
TEXT = EXAMPLE.read_text()


def test_example_plan_proves_its_promise() -> None:
    file = read_plan(EXAMPLE)
    file.plan.proves()
    assert file.budget is not None
    assert file.plan.epsilon() <= file.budget.epsilon
    assert file.plan.sizes == (150, 110, 90, 60, 46)
    assert file.plan.shape.dim == 31
    assert file.members == (*(f"hospital-{i}" for i in range(1, 6)), "coordinator")


def test_same_plan_from_another_spelling_has_the_same_digest_and_another_plan_has_not() -> None:
    file = parse_plan(TEXT)
    spelled = "# remark\n" + TEXT.replace("steps = 20", "steps   =  20")
    assert parse_plan(spelled).digest == file.digest
    assert parse_plan(spelled).plan.digest == file.plan.digest
    for old, new in (("steps = 20", "steps = 21"), ("epsilon = 1.0", "epsilon = 1.1"), ("150", "151")):
        other = parse_plan(TEXT.replace(old, new))
        assert other.digest != file.digest
        assert other.plan.digest != file.plan.digest


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps = 20", "stepz = 20", "no setting 'stepz'"),
        ('name = "dp-gd"', 'name = "dp-gb"', "must be one of"),
        ("features = 30", "", "needs 'features'"),
        ("epsilon = 1.0", "epsilon = -1.0", "epsilon=-1.0"),
        ('"127.0.0.1:7443"', '"127.0.0.1"', "HOST:PORT"),
        ('name = "hospital-1"', 'name = "Hospital 1"', "small letters"),
        ('name = "hospital-1"', 'name = "coordinator"', "names are taken"),
        ("records = 150", "records = 150\nweight = 1.0", "every party a weight"),
        ('secure = "masks"', "", "leave it out otherwise"),
        ("timeout = 30", "timeout = 0", "seconds > 0"),
        ("[data]", "[date]", "section 'date'"),
        ("spare = 5", "private = false", "exactly when"),
    ],
)
def test_mistakes_are_told_in_one_sentence(old: str, new: str, words: str) -> None:
    assert old in TEXT
    with pytest.raises(DataError, match=words) as caught:
        _ = parse_plan(TEXT.replace(old, new, 1), "plan.toml").plan
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_objectives_weights_and_oracles_of_a_plan() -> None:
    text = TEXT.replace('name = "logistic"', 'name = "multinomial"\nregularizer = "l2:0.1"')
    file = parse_plan(text.replace("classes = [0, 1]", 'classes = ["a", "b", "c"]'))
    assert file.plan.shape.dim == 31 * 3
    assert file.objective.regularizer.unpenalized == 3
    assert file.model["class_names"] == ["a", "b", "c"]
    weighted = TEXT
    for records in (150, 110, 90, 60, 46):
        weighted = weighted.replace(f"records = {records}", f"records = {records}\nweight = 1")
    np.testing.assert_allclose(parse_plan(weighted).plan.factors, [456 / 5 / n for n in (150, 110, 90, 60, 46)])
    spider = TEXT.replace(
        'name = "dp-gd"\nsteps = 20\nlearning_rate = 4.0\nclip = 1.0',
        'name = "perturbed-sgd"\noracle = {name = "adaptive-spider", batch_size = 40, kappa = 3}',
    )
    assert parse_plan(spider).algorithm.oracle.kappa == 3


def test_keys_are_for_their_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    made = provision(["a", "b", "coordinator"], tmp_path / "keys", keep_authority=True)
    for home in made:
        for secret in ("key.pem", "identity.key"):
            assert (home / secret).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys" / "authority" / "ca.key").stat().st_mode & 0o777 == 0o600
    everyone = {Credentials.read(home).identity.public for home in made}
    assert everyone == set(Credentials.read(made[0]).publics.values())
    with pytest.raises(DataError, match="not empty"):
        provision(["a", "b", "coordinator"], tmp_path / "keys")
    (made[0] / "key.pem").chmod(0o644)
    with pytest.raises(DataError, match="chmod 600"):
        Credentials.read(made[0])


def test_folders_that_are_not_keys_are_refused(tmp_path: Path) -> None:
    home = provision(["a", "coordinator"], tmp_path / "keys")[0]
    with pytest.raises(DataError, match=r"member\.json is missing"):
        Credentials.read(tmp_path)
    other = Credentials.read(provision(["a", "coordinator"], tmp_path / "other")[0])
    (home / "identity.key").write_text(other.identity.secret_bytes().hex())
    with pytest.raises(DataError, match="not the one of 'a'"):
        Credentials.read(home)
    (home / "member.json").write_text("[]")
    with pytest.raises(DataError, match="not a folder"):
        Credentials.read(home)
    with pytest.raises(DataError, match="no identity of 'c'"):
        other.roster(["a", "c"])


def test_a_member_can_keep_its_keys_to_itself(tmp_path: Path) -> None:
    asked = request("a", tmp_path / "mine").rename(tmp_path / "a (1).json")  # mail programs rename files
    assert asker(asked) == "a"
    assert "PRIVATE" not in asked.read_text()
    home = provision(["a", "b", "coordinator"], tmp_path / "keys", {"a": asked})[0]
    assert not (home / "key.pem").exists()
    for name in ("cert.pem", "ca.pem", "member.json"):
        (tmp_path / "mine" / name).write_bytes((home / name).read_bytes())
    assert Credentials.read(tmp_path / "mine").name == "a"
    with pytest.raises(DataError, match="has keys already"):
        request("a", tmp_path / "mine")


@pytest.mark.parametrize("change", ["name", "identity", "request", "signature"])
def test_altered_requests_are_refused(tmp_path: Path, change: str) -> None:
    asked, other = request("a", tmp_path / "a"), request("b", tmp_path / "b")
    body = json.loads(asked.read_text())
    body[change] = json.loads(other.read_text())[change]
    asked.write_text(json.dumps(body))
    with pytest.raises(DataError, match="not a valid request of 'a'"):
        provision(["a", "b", "coordinator"], tmp_path / "keys", {"a": asked})


PLAN = toml_plan({"a": 4, "b": 4}, steps=3, features=2, data='label = "ill"')
ROWS = "age,pulse,ill\n0.1,0.2,0\n0.3,0.1,1\n0.2,0.2,1\n0.4,0.3,0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "rows.csv").write_text(ROWS)
    provision(["a", "b", "coordinator"], tmp_path / "keys")
    return tmp_path


def refusal(capfd: pytest.CaptureFixture[str], words: str, code: int = 1) -> str:
    """The one sentence that a command ends with."""
    capfd.readouterr()
    assert main(["federate", *words.split()]) == code
    err = capfd.readouterr().err.strip().splitlines()
    assert err[-1].startswith("quietgrad federate: ")
    assert not any("Traceback" in line for line in err)
    return err[-1]


@pytest.mark.parametrize(
    ("old", "new", "say"),
    [
        ("0.3,0.1,1", "nan,0.1,1", "NaN"),
        ("0.3,0.1,1", ",0.1,1", "NaN"),
        ("ill", "sick", "no column 'ill'"),
        ("age,pulse,ill\n0.1,0.2,0", "age,ill\n0.1,0", ""),
    ],
)
def test_bad_files_are_refused_before_anybody_is_called(
    folder: Path, capfd: pytest.CaptureFixture[str], old: str, new: str, say: str
) -> None:
    (folder / "rows.csv").write_text(ROWS.replace(old, new))
    assert say in refusal(capfd, "party plan.toml --keys keys/a --data rows.csv --out run")
    assert not (folder / "run").exists()


def test_keys_and_options_of_somebody_else(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    say = refusal(capfd, "server plan.toml --keys keys/a --out run --wait 0")
    assert "are the keys of 'a', not the coordinator's" in say
    say = refusal(capfd, "party plan.toml --keys keys/coordinator --data rows.csv --out run")
    assert "'coordinator' is no party" in say
    assert "has 3 digits" in refusal(capfd, "party plan.toml --keys keys/a --data rows.csv --pin abc", 2)
    (folder / "keys/a/cert.pem").write_bytes((folder / "keys/b/cert.pem").read_bytes())
    assert "member.json is of 'a' and cert.pem of another" in refusal(capfd, "show plan.toml --keys keys/a")
    assert not (folder / "run").exists()


def test_port_in_use_and_foreign_address(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        taken = socket.create_server(("127.0.0.1", 0))
    except OSError:
        pytest.skip("loopback sockets are not permitted here")
    with taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        say = refusal(capfd, f"server plan.toml --keys keys/coordinator --out run --address {address}")
    assert f"{address}: the port is in use" in say
    assert not (folder / "run").exists()
    assert "--address 0.0.0.0:7443" in cannot_listen("h", 7443, OSError(errno.EADDRNOTAVAIL, "no"))
    assert "below 1024" in cannot_listen("h", 80, OSError(errno.EACCES, "no"))


def test_cap_is_checked_before_anybody_pays(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = parse_plan(PLAN)
    event = file.plan.party_event(0, None)
    assert event is not None
    Ledger("ledger.jsonl").reserve("default", event, delta=1e-5, relation="add-remove", run="earlier")
    words = "party plan.toml --keys keys/a --data rows.csv --out run --ledger ledger.jsonl --cap-epsilon 1.2"
    assert "Cap: ε=1.2" in refusal(capfd, words)
    assert [entry.kind for entry in Ledger("ledger.jsonl").entries()] == ["open", "reserve"]
    # The same party in the middle of a run has paid already and may come back.
    data = (np.ones((4, 2)), np.array([0, 1, 0, 1]))

    def ready(most: float = 1.2) -> PartyCurator:
        text = Path("plan.toml").read_text()
        return approval(text, Path("keys/a"), folder / "run", ledger="ledger.jsonl", cap_epsilon=most).party(data)

    with pytest.raises(BudgetError, match="exceed the cap"):
        ready()
    assert not list((folder / "run").iterdir())
    party = ready(3.0)
    assert decode(party.handle(encode(Message("open", {"run": "r", "plan": file.plan.digest})))).kind == "ready"
    party.close()
    ready().close()


def test_revoke_command(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    members, words = parse_plan(PLAN).members, ["federate", "revoke", "--keys", "keys/a"]
    assert main([*words, "b", "--reason", "its laptop was stolen", "--json"]) == 0
    (said,) = json.loads(capfd.readouterr().out).items()
    assert (said[0], said[1].partition(": ")[2]) == ("b", "its laptop was stolen")
    with pytest.raises(DataError, match="'b' is revoked here"):
        check_none_revoked(folder / "keys/a", members)
    check_none_revoked(folder / "keys/coordinator", members)  # each revokes for itself
    for name in ("a", "nobody", "../b"):  # itself, and who is no member
        assert main([*words, name]) == 2
    assert list(json.loads((folder / "keys/a/revoked.json").read_text())) == ["b"]


def test_digests_can_be_read_out_and_typed_in(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    digest = parse_plan(PLAN).digest
    groups = readable_digest(digest)
    assert groups.replace(" ", "") == digest[:32]
    pin = pin_of(parse_plan(PLAN))
    assert pin == f"ε=1.0 δ=1e-05 n=8 {groups}"
    assert main(["federate", "show", "plan.toml", "--keys", "keys/a"]) == 0
    out = capfd.readouterr().out
    assert pin in out
    fingerprint = Credentials.read("keys/a").fingerprint
    assert f"identities=3 {readable_digest(fingerprint)}" in out
    words = ["federate", "approve", "plan.toml", "--keys", "keys/a", "--data", "rows.csv", "--out", "run", "--pin"]
    for good in (pin, f"eps=1, delta=0.00001, n=8: {groups.upper()}", digest, f"{pin} {digest[32:]}"):
        assert main([*words, good]) == 0, good
    other = ("1" if digest[0] == "0" else "0") + digest[1:]
    for bad in (other, pin.replace("ε=1.0", "ε=2.0"), pin.replace("n=8", "n=9"), pin.replace("1e-05", "1e-04")):
        capfd.readouterr()
        assert main([*words, bad]) == 1, bad
        assert "nothing was given" in capfd.readouterr().err


@pytest.mark.parametrize("digits", [0, 1, 16, 20, 31, 32, 63])
def test_short_pins_are_refused_with_what_to_give(
    digits: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """64 bits were forged in 420 s: two plans with the same 16 digits, ε = 1 and ε = 50."""
    pin = parse_plan(PLAN).digest[:digits]
    words = ["approve", "plan.toml", "--keys", "keys/a", "--data", "rows.csv", "--out", "run", "--pin"]
    assert main(["federate", *words, pin]) == 2
    told = capfd.readouterr().err
    assert "`quietgrad federate show PLAN` prints" in " ".join(told.split())
    assert not (folder / "run").exists()
    if digits < 32:
        assert main(["federate", *words, f"ε=1.0 δ=1e-05 n=8 {pin}"]) == 2
