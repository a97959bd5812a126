"""The plan file, and the keys and certificates made for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quietgrad.errors import DataError
from quietgrad.federation.plan_file import parse_plan, read_plan
from quietgrad.federation.provisioning import Credentials, provision, request

EXAMPLE = Path(__file__).parent.parent / "examples" / "five-hospitals" / "plan.toml"
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


def test_noise_is_rounded_up_so_that_machines_agree() -> None:
    z = parse_plan(TEXT).plan.noise_multiplier
    assert float(f"{z:.4g}") == z


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps = 20", "stepz = 20", "no setting 'stepz'"),
        ("steps = 20", 'steps = "many"', "steps"),
        ('name = "dp-gd"', 'name = "dp-gb"', "must be one of"),
        ('name = "logistic"', 'name = "logit"', "must be logistic"),
        ("features = 30", "", "needs 'features'"),
        ("epsilon = 1.0", "epsilon = -1.0", "epsilon=-1.0"),
        ("epsilon = 1.0", "epsilon = true", "type float"),
        ('"127.0.0.1:7443"', '"127.0.0.1"', "HOST:PORT"),
        ('name = "hospital-1"', 'name = "Hospital 1"', "small letters"),
        ('name = "hospital-1"', 'name = "coordinator"', "names are taken"),
        ('name = "hospital-1"', 'name = "hospital-2"', "different names"),
        ("records = 150", "", "needs 'records'"),
        ("records = 150", "records = 150\nweight = 1.0", "every party a weight"),
        ('secure = "masks"', "", "exactly when trust"),
        ("timeout = 30", "timeout = 0", "seconds > 0"),
        ("[data]", "[date]", "section 'date'"),
        ("[data]", "data]", "not a TOML file"),
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
        'name = "perturbed-sgd"\noracle = {name = "spider", batch_size = 40, period = 3}',
    )
    assert parse_plan(spider).algorithm.oracle.period == 3


def test_keys_are_for_their_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    made = provision(["a", "b", "coordinator"], tmp_path / "keys")
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
    asked = request("a", tmp_path / "mine")
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
