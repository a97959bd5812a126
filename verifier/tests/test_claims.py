"""Claims of other libraries' runs: priced again, refuted where the printed ε is too small, and hard to edit."""

from __future__ import annotations

import copy
import html
import json
from pathlib import Path
from typing import Any

import dp_accounting
import jsonschema
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from quietgrad_verify import Claim, Unreadable, adapters, check, read, schema, standing
from quietgrad_verify.cli import main, text
from quietgrad_verify.document import STANDINGS, canonical, fields, parse, statement
from quietgrad_verify.page import page

REAL = sorted((Path(__file__).parents[2] / "benchmarks/results/foreign_claims").glob("*.json"))
MISSTATED = {
    "opacus-a_shuffled_loader": "priced as Poisson samples",
    "opacus-adaptive_clipping": "unclipped records is released too",
    "dp-accounting-replace-one_by_RDP": "half of the sensitivity",
    "flower-the_cost_of_one_round": "that of one round",
}


@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_claims_of_real_runs(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made by ``benchmarks/foreign_claims.py`` from objects of the installed libraries."""
    claim = read(file)
    jsonschema.validate(json.loads(file.read_text()), schema())
    verdict = check(claim)
    assert verdict.ok == (file.stem not in MISSTATED)
    if file.stem in MISSTATED:
        assert [finding.what for finding in verdict.findings if finding.ok is False] == ["printed"]
        assert any(MISSTATED[file.stem] in note for note in claim.body["claim"]["notes"])
    assert str(claim.body["claim"]["condition"]).startswith("if ")
    assert any("That the condition is met" in words for words in verdict.not_shown)
    assert main([str(file), "--html", str(tmp_path / "v.html")]) == (0 if verdict.ok else 1)
    output = capsys.readouterr().out
    assert "OPEN" in output
    assert "claim.unit" in verdict.open
    shown = html.unescape((tmp_path / "v.html").read_text())
    assert verdict.digest in shown
    assert all(word in shown for word in ("Not shown", "Standing of every field", "claim.condition"))
    assert "<script" not in shown


def test_every_misstatement_is_there() -> None:
    assert set(MISSTATED) <= {file.stem for file in REAL}
    assert len(REAL) >= 12


# ---- adapters on objects that are here -------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["ADD_OR_REMOVE_ONE", "REPLACE_ONE", "REPLACE_SPECIAL"])
def test_an_accountant_of_dp_accounting(relation: str) -> None:
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation[relation])
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, 20))
    claim = adapters.from_dp_accounting(accountant, delta=1e-5)
    assert check(claim).ok
    assert claim.body["claim"]["relation"] == ("replace-one" if relation == "REPLACE_ONE" else "add-remove")
    assert claim.body["claim"]["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_other_events_of_dp_accounting() -> None:
    theirs = dp_accounting.dp_event
    event = theirs.ComposedDpEvent([
        theirs.LaplaceDpEvent(4.0), theirs.ZCDpEvent(0.01), theirs.GaussianDpEvent(5.0),
        theirs.RepeatAndSelectDpEvent(theirs.GaussianDpEvent(20.0), 5.0, 1.0),
    ])  # fmt: skip
    kinds = [part["event"] for part in adapters.event_of_dp_accounting(event, "add-remove")["parts"]]
    assert kinds == ["pure", "zcdp", "gaussian", "repeat-and-select"]
    assert adapters.event_of_dp_accounting(theirs.LaplaceDpEvent(4.0), "replace-one")["epsilon"] == 0.5
    fixed = theirs.SampledWithoutReplacementDpEvent(100, 10, theirs.GaussianDpEvent(5.0))
    assert adapters.event_of_dp_accounting(fixed, "replace-one")["batch_size"] == 10
    with pytest.raises(ValueError, match="no counterpart"):
        adapters.event_of_dp_accounting(theirs.NonPrivateDpEvent(), "add-remove")


def test_a_measurement_of_opendp() -> None:
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(bounds=(0.0, 1.0)), size=100), dp.symmetric_distance()
    laplace = space >> dp.t.then_sum() >> dp.m.then_laplace(4.0)
    gaussian = space >> dp.t.then_sum() >> dp.m.then_gaussian(4.0)
    for query, kind in ((laplace, "pure"), (gaussian, "zcdp")):
        claim = adapters.from_opendp(query, 2, delta=1e-6)
        assert claim.body["event"]["event"] == kind
        assert claim.body["claim"]["relation"] == "replace-one"
        assert check(claim).ok
    with pytest.raises(ValueError, match="no distance"):
        adapters.from_opendp(laplace, 3, delta=1e-6)


class KerasOptimizer:
    """The shape of TensorFlow Privacy's Keras optimizers: only their settings are read."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def get_config(self) -> dict[str, Any]:
        return self.settings


def test_the_settings_of_tensorflow_privacy() -> None:
    about: dict[str, Any] = {"n": 1000, "batch_size": 50, "epochs": 4, "delta": 1e-5}
    one = KerasOptimizer(noise_multiplier=1.5, num_microbatches=50)
    several = KerasOptimizer(noise_multiplier=1.5, num_microbatches=10)
    sampled, merged = (adapters.from_tf_privacy(each, poisson=True, **about) for each in (one, several))
    shuffled = adapters.from_tf_privacy(one, stated=sampled.body["claim"]["epsilon"], **about)
    assert merged.body["claim"]["epsilon"] > 1.5 * sampled.body["claim"]["epsilon"]
    assert "2C" in merged.body["claim"]["notes"][0]
    assert not check(shuffled).ok
    assert check(sampled).ok
    assert check(merged).ok


def test_conditions_fit_a_line_of_a_ledger() -> None:
    for file in REAL:
        assert len(read(file).body["claim"]["condition"]) <= 300
    with pytest.raises(ValueError, match="300 characters"):
        adapters.make_claim(adapters.gaussian(2.0), delta=1e-5, relation="add-remove", program="p", read_from="o",
                            conditions=["x" * 400])  # fmt: skip


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def claim() -> Claim:
    return read(next(file for file in REAL if file.stem == "opacus-Poisson_samples"))


def test_exit_codes(claim: Claim, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = claim.write(tmp_path / "c.json"), tmp_path / "bad.json"
    assert main([str(good), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    body = copy.deepcopy(claim.body)
    body["claim"]["epsilon"] /= 2.0
    body["statement"] = statement(body)
    Claim(body).write(bad)
    assert main([str(bad)]) == 1
    for content in (
        b"{",
        b"[]",
        b'{"format":"quietgrad-certificate"}',
        good.read_bytes()[:-1],
        b"\xff",
        b"[" * 10**5,
    ):
        bad.write_bytes(content)
        assert main([str(bad)]) == 2
    assert main([str(tmp_path / "none.json")]) == 2
    assert main([str(good), "--public-key", "ab"]) == 2
    assert main([str(good), "--public-key", "ab" * 32]) == 1  # it is not signed
    assert main([str(good), "--head", "5-" + "0" * 40]) == 1  # it has no ledger


@pytest.mark.parametrize("field", ["unit", "relation", "condition", "notes", "adversary", "account", "releases"])
def test_a_field_that_is_edited_alone_is_refuted(claim: Claim, field: str) -> None:
    other = {"unit": "person", "relation": "replace-one", "condition": "if it rains", "notes": ["all is well"],
             "adversary": "nobody", "account": "us", "releases": {"more": 1}}[field]  # fmt: skip
    body = copy.deepcopy(claim.body)
    body["claim"][field] = other
    assert not check(parse(Claim(body).to_bytes(), "c")).ok
    # A careful editor mends the statement as well: relation changes ε, and all else stands open in the verdict.
    body["statement"] = statement(body)
    verdict = check(parse(Claim(body).to_bytes(), "c"))
    assert not verdict.ok if field == "relation" else f"claim.{field}" in verdict.open
    shown = " ".join((verdict.headline, *verdict.shown))
    assert "per person" not in shown
    assert "if it rains" not in shown


def test_a_signature_holds_every_field(claim: Claim) -> None:
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw().hex()
    signature = {"algorithm": "ed25519", "public_key": public, "value": key.sign(claim.payload).hex()}
    signed = parse(Claim(claim.body, signature).to_bytes(), "c")
    verdict = check(signed, public_key=public)
    assert verdict.ok
    assert verdict.open == ()
    assert "per record" in verdict.headline
    assert not check(signed, public_key="00" * 32).ok
    body = copy.deepcopy(claim.body)
    body["versions"]["opacus"] = "1.7.0"
    assert not check(parse(Claim(body, signature).to_bytes(), "c")).ok


def test_standings_come_from_the_schema_and_are_on_the_written_page(claim: Claim) -> None:
    by = fields(claim)
    assert set(by) == set(STANDINGS)
    assert {"claim.unit", "claim.condition", "claim.notes", "claim.adversary", "claim.account"} <= set(by["bound"])
    assert {"claim.epsilon", "claim.delta", "claim.relation", "event", "statement"} <= set(by["proved"])
    assert standing(("body", "plan", "slots", 0, "count")) == "said"
    written = (Path(__file__).parents[2] / "docs/certificate-format.md").read_text(encoding="utf-8")
    part_schemas = schema()["properties"]["body"]["properties"]
    for part, node in part_schemas.items():
        assert f"| `{part}` | {node['x-standing']} |" in written, part
        inner = [node, *node.get("anyOf", ())]
        for name, field in ((n, f) for option in inner for n, f in option.get("properties", {}).items()):
            field_standing = field.get("x-standing", node["x-standing"])
            if field_standing != node["x-standing"]:
                assert f"| `{part}.{name}` | {field_standing} |" in written, (part, name)


def test_what_a_terminal_or_a_browser_obeys_is_spelt_out(claim: Claim, tmp_path: Path, capsys: Any) -> None:
    body = copy.deepcopy(claim.body)
    body["claim"]["notes"] = ["\x1b]0;pwned\x07<script>alert(1)</script>"]
    body["statement"] = statement(body)
    forged = Claim(body)
    main([str(forged.write(tmp_path / "c.json"))])
    assert "\x1b" not in capsys.readouterr().out
    assert "<script>alert" not in page(forged, check(forged), "<script>")
    assert "proved" in text(check(claim))


def test_another_spelling_is_unreadable(claim: Claim) -> None:
    content = claim.to_bytes()
    for changed in (content.replace(b'":', b'": ', 1), content.replace(b'"delta":1e-05', b'"delta":0.00001', 1),
                    content.replace(b'"version":2', b'"version":3'),
                    canonical({**json.loads(content), "x": 1})):  # fmt: skip
        with pytest.raises(Unreadable):
            parse(changed, "c")
