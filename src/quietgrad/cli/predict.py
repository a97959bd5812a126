"""`quietgrad predict` and `quietgrad evaluate`: what a model says of records, and private scores of it."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quietgrad.cli.options import (
    Explain,
    Json,
    Keep,
    RelationName,
    say,
    say_meaning,
    show_json,
    show_rows,
    usage,
    writable,
)
from quietgrad.cli.run_spec import RUN_FILE, RunSpec, objective_from
from quietgrad.cli.scoring import TRAINING_PEOPLE, save_score, were_trained_on
from quietgrad.files import is_multi_file, write_atomically
from quietgrad.privacy.budget import DEFAULT_RELATION
from quietgrad.sanitize import sanitize

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad predict runs/a9a new.csv -o predictions.csv")
def predict(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    data: Annotated[
        str,
        typer.Argument(
            help="Records, in a file like the one trained on (labels, if it has them, are only used for scores), "
            "or a registered name, whose test part is taken.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write here (.csv or .json; .csv or .parquet of a scan); else print."),
    ] = None,
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Print one prediction per record: the class (and its probability, if the loss has one) or the number."""
    import numpy as np

    from quietgrad.cli.scanned_data import predict_to
    from quietgrad.errors import DataError
    from quietgrad.estimators.runs import from_run
    from quietgrad.objectives.tables.range_queries import Frame
    from quietgrad.training.result import load

    result = load(folder)
    facts = result.details.get("model")
    if facts is None:
        raise DataError(f"{folder}: the result does not say which model it is of; it was not made by `train`.")
    additive = from_run(folder) if result.details.get("additive") else None
    objective: Any = None if additive is not None else objective_from(facts)
    frame = None if additive is not None else Frame.told(result.details)
    if is_multi_file(data):
        if additive is not None:
            raise DataError(f"{data}: an additive model predicts for one file, which is read whole.")
        if output is None:
            raise typer.BadParameter("a scan's predictions go to a file: -o FILE.csv or FILE.parquet.")
        table = scan_for(folder, data, facts)
        with usage():
            count = predict_to(objective, result.params, table, frame, facts["class_names"], writable(output))
        say(f"{count} predictions written to {output}.", err=as_json)
        if as_json:
            show_json({"records": count, "scores": {}})
        return
    found = records_for(folder, data, facts, keep=keep)
    X, y = found.X, found.y
    names = facts["class_names"]
    chances = None
    if additive is not None:
        additive.__dict__.pop("feature_names_in_", None)
        said = additive.predict(X)
        answers = np.searchsorted(np.asarray(additive.classes_), said) if names else np.asarray(said)
        names = [str(c) for c in additive.classes_] if names else names
        if hasattr(additive, "predict_proba"):
            odds = additive.predict_proba(X)
            chances = odds[:, 1] if odds.shape[1] == 2 else odds
    else:
        X = X if frame is None else frame.clipped(X)
        answers = objective.predict(X, result.params)
        if frame is not None and frame.target is not None:
            answers = np.clip(answers, *frame.target)
        if hasattr(objective, "probabilities"):
            chances = objective.probabilities(X, result.params)
    columns: dict[str, list[Any]] = {}
    if found.ids is not None:
        columns[found.id_column] = list(found.ids)
    columns["prediction"] = [names[int(a)] for a in answers] if names else [float(a) for a in answers]
    if chances is not None:
        chosen = chances if chances.ndim == 1 else chances.max(axis=1)
        columns["probability_of_" + str(names[1]) if chances.ndim == 1 and names else "probability"] = [
            round(float(p), 6) for p in chosen
        ]
    scores = {} if y is None else _scores(answers, y, facts["task"])
    if output is not None:
        _write(writable(output), columns)
        say(f"{len(answers)} predictions written to {output}.", err=as_json)
    if as_json:
        show_json({"records": len(answers), "scores": scores, **({} if output else columns)})
    elif output is None:
        say(_csv(columns), nl=False)
    for name, value in scores.items() if not as_json else ():
        say(f"{name} = {value:.4f} on these records, without noise: it is data, not private", err=True)


@dataclass(frozen=True)
class _ModelInput:
    """Records as a run's model takes them; ``y`` is ``None`` without labels, ``ids`` stand beside predictions."""

    X: Any
    y: Any
    person: Any
    ids: tuple[str, ...] | None = None
    id_column: str = "id"


def records_for(
    folder: Path, data: str, facts: dict[str, Any], person: str | None = None, keep: str | None = None
) -> _ModelInput:
    """A file or a registered set, with ids from the columns named or those the run was told, if they are there."""
    from quietgrad.data import load
    from quietgrad.errors import DataError

    words = facts.get("pictures")
    pictures = None
    if words is not None:  # the file holds pixels; the model sees their features
        from quietgrad.features.scattering import Pictures

        pictures = Pictures.from_json(words)
        facts = {**facts, "features": pictures.pixels, "feature_names": words.get("columns")}
    if not Path(data).is_file():
        if person is not None or keep is not None:
            raise DataError(f"{data}: is no file with a column of people's ids.")
        loaded = load(data)
        X, y = (loaded.X, loaded.y) if loaded.X_test is None else (loaded.X_test, loaded.y_test)
        found = _ModelInput(X, y, loaded.person)
    else:
        found, given = _from_file(folder, data, facts, person, keep)
        known = facts.get("feature_names")
        if known and given and list(known) != list(given):
            same = "in another order" if sorted(known) == sorted(given) else "with other names"
            raise DataError(f"{data}: has its columns {same} than the file the model was trained on.")
    if found.X.shape[1] != facts["features"]:
        raise DataError(f"{data}: has {found.X.shape[1]} features, the model was trained on {facts['features']}.")
    return found if pictures is None else replace(found, X=pictures.rows(found.X))


def scan_for(folder: Path, data: str, facts: dict[str, Any]) -> Any:
    """A scan of the files as the run's model takes them; labels, if they are there, are not looked at."""
    from quietgrad.cli.scanned_data import open_columns
    from quietgrad.errors import DataError

    if facts.get("pictures") is not None:
        raise DataError(f"{data}: features of pictures are not made of scans; give one file, which is read whole.")
    spec = RunSpec.load(folder) if (folder / RUN_FILE).exists() else RunSpec()
    table = open_columns(data, spec, facts)
    if table.features != facts["features"]:
        raise DataError(f"{data}: has {table.features} features, the model was trained on {facts['features']}.")
    return table


def _from_file(
    folder: Path, data: str, facts: dict[str, Any], person: str | None, keep: str | None
) -> tuple[_ModelInput, Any]:
    """The records of a file, with their labels if it has a label column; and the names of the features."""
    from quietgrad.data import load
    from quietgrad.data.schema import read_schema

    spec = RunSpec.load(folder) if (folder / RUN_FILE).exists() else RunSpec()
    reading = {**spec.reading, "task": facts["task"]}
    if "schema" in reading:
        own = folder / f"schema{Path(reading['schema']).suffix}"
        reading["schema"] = read_schema(own if own.exists() else reading["schema"])
        keep = keep or reading.get("keep") or next(iter(reading["schema"].ids), None)
    header = _header(data, reading)
    if person is not None:
        reading["person"] = person
    elif reading.get("person") not in header:  # a prediction needs no ids
        reading.pop("person", None)
    named, keep = keep, keep or reading.pop("keep", None)
    reading |= {"keep": keep if keep in header or named is not None else None}
    reading["drop"] = tuple(column for column in reading.get("drop", ()) if column in header)
    if "schema" not in reading and facts["task"] != "regression":
        names = facts["class_names"]
        reading.setdefault("classes", [float(c) if _is_number(c) else c for c in names])
    if Path(data).suffix not in (".csv", ".tsv", ".parquet", ".pq", ".npz"):
        reading["n_features"] = facts["features"]
    label = _missing_label(header, facts, reading)
    if label is not None:
        reading |= {"labelled": False} | ({} if "schema" in reading else {"label": label})
    loaded = load(data, **reading)
    y = None if label is not None else loaded.y
    return _ModelInput(loaded.X, y, loaded.person, loaded.ids, str(keep)), loaded.feature_names


def _header(data: str, reading: dict[str, Any]) -> list[str]:
    """The column names of a delimited or parquet file; none of another."""
    from quietgrad.data.tables import read_header

    if Path(data).suffix in (".parquet", ".pq"):
        import pyarrow.parquet

        return [str(name) for name in pyarrow.parquet.read_schema(data).names]
    if not {".csv", ".tsv"} & set(Path(data).suffixes):
        return []
    return read_header(Path(data), reading.get("schema"), reading.get("delimiter"), reading.get("encoding"))


def _missing_label(header: list[str], facts: dict[str, Any], reading: dict[str, Any]) -> str | None:
    """A name for the label column that a file lacks; ``None`` if it has one or cannot be told."""
    aside = (reading.get("person"), reading.get("keep"), *reading["drop"])
    header = [name for name in header if name not in aside]
    if "schema" in reading:
        schema = reading["schema"]
        there = schema.names is None and set(schema.columns) <= set(header)
        return schema.label if there and schema.label not in header else None
    known, label = facts.get("feature_names"), reading.get("label")
    if not known:
        return None
    if label is not None and label in header:
        return None
    return (label or "__label__") if sorted(header) == sorted(known) else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _scores(answers: Any, y: Any, task: str) -> dict[str, float]:
    import numpy as np

    if task == "regression":
        return {"rmse": float(np.sqrt(np.mean((answers - y) ** 2)))}
    return {"accuracy": float(np.mean(answers == y))}


def _csv(columns: dict[str, list[Any]]) -> str:
    import io

    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([cell(name) for name in columns])
    rows.writerows([cell(value) for value in row] for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def cell(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula is told to be text; class names come from a file.

    >>> [cell(value) for value in ("=HYPERLINK(1)", "-1", -1.5, "yes", "@x")]
    ["'=HYPERLINK(1)", '-1', -1.5, 'yes', "'@x"]
    """
    if not isinstance(value, str):
        return value
    text = sanitize(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and not _is_number(text) else text


def _write(path: Path, columns: dict[str, list[Any]]) -> None:
    """Predictions are about people: only their owner may read the file."""
    text = json.dumps(columns) if path.suffix == ".json" else _csv(columns)
    write_atomically(path, text.encode(), private=True)


evaluate_app = typer.Typer(add_completion=False)


@evaluate_app.command(epilog="Example: quietgrad evaluate runs/a9a held_out.csv --epsilon 0.3 --account held-out")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    data: Annotated[
        str,
        typer.Argument(
            help="Held-out people with labels, in a file like the one trained on, or a registered name, whose test "
            "part is taken.",
            show_default=False,
        ),
    ],
    epsilon: Annotated[float, typer.Option(help="ε of the evaluation.")] = 0.3,
    delta: Annotated[float, typer.Option(help="δ of the evaluation.")] = 1e-6,
    relation: RelationName = DEFAULT_RELATION,
    ledger: Annotated[Path | None, typer.Option(help="Ledger file; else the one charged for the run.")] = None,
    account: Annotated[
        str, typer.Option(help="Ledger account to charge: a name for the held-out people.")
    ] = "held-out",
    person: Annotated[
        str | None,
        typer.Option(help="Column of person ids; by default the one used in training."),
    ] = None,
    training_people: Annotated[
        bool, typer.Option("--training-people", help="Score people that were trained on; the score says so.")
    ] = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Release accuracy, AUC, log loss, calibration and confusion of a model, with noise and error bars."""
    import numpy as np

    from quietgrad.cli.options import usage
    from quietgrad.cli.run_spec import RunSpec
    from quietgrad.cli.scanned_data import open_scan
    from quietgrad.errors import DataError
    from quietgrad.estimators.runs import from_run
    from quietgrad.estimators.scoring import private_score
    from quietgrad.files import is_multi_file
    from quietgrad.privacy.ledger import project_path
    from quietgrad.training.result import ledger_of

    model = from_run(folder)
    facts = model.result_.details.get("model")
    if facts is None:
        raise DataError(f"{folder}: the result does not say which model it is of; it was not made by `train`.")
    ids, trained = None, training_people
    if is_multi_file(data):
        spec = RunSpec.load(folder)
        whose = spec.reading.get("person") if person is None else person
        reading = {**spec.reading, "pair": facts["class_names"], "person": whose}
        X: Any = open_scan(data, reading, spec.scanning).table
        labels = None
        if X.classes is not None:
            model.classes_ = np.asarray(X.classes)
    else:
        records = records_for(folder, data, facts, person)
        X, y, ids = records.X, records.y, records.person
        if ids is None and model.privacy_.unit == "person":
            raise DataError(
                f"{data}: has no column of people's ids, and the model was trained by person: name --person."
            )
        if y is None:
            raise DataError(f"{data}: has no labels to score against.")
        labels = y if facts["task"] == "regression" else model.classes_[y.astype(int)]
        trained = were_trained_on(folder, X, y, ids)
        if trained and not training_people:
            raise DataError(
                f"{data}: holds people that the model was trained on, so its score would be no held-out score. "
                "Give held-out records; or pass --training-people, which charges the run's account and says so. "
                "No privacy budget was spent."
            )
    if training_people:
        account = str(model.account)
    # Where people who were trained on are known; of a project's ledger it is asked for by naming none.
    found = ledger_of(folder) if ledger is None else ledger
    book = found if found.exists() and found.resolve() != project_path().resolve() else None
    model.__dict__.pop("feature_names_in_", None)  # names were compared when the file was read
    with usage():
        score = private_score(
            model, X, labels, epsilon=epsilon, delta=delta, relation=relation, ledger=book, account=account,
            person=ids,
        )  # fmt: skip
    trained = trained or training_people
    if trained:
        score = replace(score, notes=(TRAINING_PEOPLE, *score.notes))
    save_score(score, folder, "training" if trained else "held-out")
    say_meaning(explain, score.privacy.epsilon, delta, score.privacy.unit)
    if as_json:
        show_json({**score.to_json(), "people": "training" if trained else "held-out"})
        return
    names = ("accuracy", "auc", "log_loss", "r2", "rmse", "mae")
    rows = [
        (n.replace("_", " "), f"{v[0]:.4f} ± {v[1]:.4f}") for n in names if (v := getattr(score, n)) is not None
    ]
    rows += [("privacy", str(score.privacy)), ("account", account), ("ledger", str(book or project_path()))]
    rows += [("note", note) for note in score.notes]
    show_rows(f"{folder} on {'TRAINING' if trained else 'held-out'} people ({data})", rows)
