"""Plan files, schemas and approvals with values of wrong types: each is refused in one sentence, or is sound."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quietgrad.core.errors import DataError, QuietgradError
from quietgrad.data.schema import read_schema
from quietgrad.federation.approved import Approved
from quietgrad.federation.plan_file import PlanFile, parse_plan
from quietgrad.federation.provisioning import provision
from tests.federation.talk import approval, toml_plan
from tests.federation.test_plan_schema import RUNS, plan_of

WRONG: dict[str, Any] = {
    "text": "nonsense",
    "empty text": "",
    "NUL": "\0\n../..",
    "zero": 0,
    "negative": -7,
    "huge": 10**400,
    "fraction": 2.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "boolean": True,
    "list": [1, "two", [3]],
    "empty list": [],
    "table": {"a": {"b": 1}},
    "empty table": {},
    "date": date(2020, 2, 30 - 1),
    "moment": datetime(2020, 1, 1, 12),
    "time": time(12),
}


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a plan's content."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*at, key)
        yield from paths(each, (*at, key))


def replaced(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return content


def planned(content: dict[str, Any]) -> PlanFile:
    """The plan of a file with this content, of which TOML could have every value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tomllib, "loads", lambda text: content)
        file = parse_plan("any")
    _ = file.plan
    return file


def refusal(action: Callable[[], object]) -> str | None:
    """What an action is refused with; any error but our own ends the test."""
    try:
        action()
    except QuietgradError as refused:
        return str(refused)
    return None


def used(path: Path) -> None:
    """Read an approval and make its member."""
    read = Approved.read(path)
    read.check()
    read.member().close()


PLANS = {name: plan_of(name) for name in ("schema of everything", "masks", "people", "multinomial", "servers")}
PLACES = [(name, place) for name, plan in PLANS.items() for place in paths(plan)]


@pytest.mark.parametrize(("name", "place"), PLACES, ids=lambda each: ".".join(map(str, each)))
def test_a_plan_with_a_wrong_value_is_refused_in_one_sentence(name: str, place: tuple[Any, ...]) -> None:
    for what, value in WRONG.items():
        said = refusal(partial(planned, replaced(PLANS[name], place, value))) or ""
        for raw in ("\n", "object has no attribute", "unsupported operand", "not supported between"):
            assert raw not in said, (what, said)


SCHEMA = RUNS["schema of everything"]["data"]["schema"] | {"names": ["a", "b"]}


@pytest.mark.parametrize("place", list(paths(SCHEMA)), ids=lambda each: ".".join(map(str, each)))
def test_a_schema_with_a_wrong_value_is_refused_or_read(place: tuple[Any, ...]) -> None:
    for what, value in {**WRONG, "null": None}.items():
        said = refusal(partial(read_schema, replaced(SCHEMA, place, value)))
        assert said is None or "\n" not in said, (what, said)


def test_a_schema_of_dates_of_toml_is_read() -> None:
    column = {"kind": "date", "bounds": [date(2020, 1, 1), date(2021, 1, 1)], "since": date(2019, 1, 1)}
    schema = read_schema({"label": {"column": "y", "classes": ["a", "b"]}, "columns": {"day": column}})
    assert schema.columns["day"].bounds == (date(2020, 1, 1), date(2021, 1, 1))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text", ["x = 1", "[label]", "label = 3\ncolumns = 4", '[columns]\nage = "x"', "[[columns]]"]
)
def test_schema_files_of_another_layout_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(DataError, match="is not laid out as a schema"):
        read_schema(tmp_path / "schema.toml")


@pytest.mark.parametrize("key", [*Approved.__dataclass_fields__, "format"])
def test_an_approval_with_a_wrong_value_is_refused_in_one_sentence(key: str, tmp_path: Path) -> None:
    text = toml_plan({"a": 4, "b": 4}, steps=2, features=2)
    home = provision(["a", "b", "coordinator"], tmp_path / "keys")[0]
    good = approval(text, home, tmp_path / "run", data=str(tmp_path / "rows.csv"))
    (tmp_path / "rows.csv").write_text("u,v,ill\n" + "0.1,0.2,0\n" * 4)
    path = tmp_path / "approval.json"
    good.write(path)
    Approved.read(path).member().close()
    content = json.loads(path.read_text())
    values = {what: value for what, value in WRONG.items() if not isinstance(value, date | time)}
    for what, value in {**values, "null": None}.items():
        path.write_text(json.dumps({**content, key: value}))
        said = refusal(lambda: used(path))
        of_networks = what == "null" and key in ("module_text", "start")
        assert said or of_networks or key in ("data", "ledger", "account", "cap_epsilon", "address", "out"), what
        assert said is None or "\n" not in said, (what, said)
    path.write_text(json.dumps({name: each for name, each in content.items() if name != key}))
    if key in ("module_text", "start"):  # approvals of tables need not have them
        return
    with pytest.raises(DataError, match="not an approval of this version"):
        Approved.read(path)


def test_the_plans_are_sound_without_a_wrong_value() -> None:
    for plan in PLANS.values():
        planned(copy.deepcopy(plan)).plan.proves()
