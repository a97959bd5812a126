"""`quietgrad predict` and `quietgrad evaluate`: what a model says of records, and private scores of it."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import typer
from scipy import sparse
from scipy.sparse import linalg
from typer import Argument, Option

from quietgrad import data as datasets
from quietgrad.cli.network_predictions import format_of, is_network, network_predictions, refuse_network
from quietgrad.cli.options import Explain, Json, RunFolder, say, say_meaning, show_json, show_rows, usage, writable
from quietgrad.cli.run_spec import RUN_FILE, RunSpec, with_options
from quietgrad.cli.scanned_data import open_scan
from quietgrad.cli.scoring import (
    TRAINING_PEOPLE,
    Details,
    save_score,
    say_undeclared,
    score_rows,
)
from quietgrad.core.errors import DataError
from quietgrad.core.files import is_multi_file, write_atomically
from quietgrad.core.ledger.ledger import project_path
from quietgrad.core.sanitize import sanitize
from quietgrad.core.session.opening import Terms
from quietgrad.data.address import public
from quietgrad.data.columns import NotNumericError, is_number
from quietgrad.data.dataset import Dataset
from quietgrad.estimators.holdout import were_trained_on
from quietgrad.federation.record_format import PartyRecords
from quietgrad.methods.result import ledger_of, load, payer_of
from quietgrad.tables.labels import ClassLabels

Columns: TypeAlias = dict[str, list[object]]
_SCHEMAS = ".toml", ".json"
AllowHTTP = Annotated[bool, Option("--allow-http", help="Read an address of plain http.")]
app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad predict runs/a9a new.csv -o predictions.csv")
def predict(
    folder: RunFolder,
    data: Annotated[
        str,
        Argument(
            help="Records, in a file like the one trained on (labels, if it has them, are only used for scores), "
            "or a registered name, whose test part is taken.",
            show_default=False,
            parser=public,
        ),
    ],
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="Write here (.csv or .json; .csv or .parquet of a scan); else print."),
    ] = None,
    keep: Annotated[str | None, Option(help="Column of ids, kept beside predictions.")] = None,
    module: Annotated[
        Path | None,
        Option(help="Python file that defines the network. It is executed: read it before you pass it."),
    ] = None,
    allow_http: AllowHTTP = False,
    as_json: Json = False,
) -> None:
    """Print one prediction per record: the class (and its probability, if the loss has one) or the number."""
    from quietgrad import estimators  # loads scikit-learn

    facts = _facts(folder)
    if is_network(facts):
        _predict_by_network(folder, data, facts, module, output, as_json)
        return
    model = estimators.from_run(folder)
    names = None if facts["task"] == "regression" else [str(name) for name in np.asarray(model.classes_).tolist()]
    if is_multi_file(data):
        if facts["objective"] == "additive" or facts.get("rows") == "normalize":
            raise DataError(f"{data}: an additive model, or one of normalized rows, predicts for one file alone.")
        if output is None:
            raise typer.BadParameter("a scan's predictions go to a file: -o FILE.csv or FILE.parquet.")
        spec = _spec_of(folder)
        options = {key: value for key, value in spec.scanning.items() if key != "cluster"}
        options["allow_http"] = allow_http
        columns = facts["feature_names"] if spec.schema is None else None
        table = datasets.scan(data, columns=columns, schema=spec.schema, labelled=False, **options)
        if names is not None:
            model.classes_ = np.array([str(cell(name)) for name in names])
        with usage():
            count = model.predict_to(table, writable(output))
        say(f"{count} predictions written to {output}.", err=as_json)
        if as_json:
            show_json({"records": count, "scores": {}})
        return
    records, labels, ids = records_for(folder, data, facts, keep=keep)
    model.__dict__.pop("feature_names_in_", None)  # names were compared when the file was read
    answers = model.predict(records.X)
    if names is not None:
        answers = answers.astype(str)
    predictions: Columns = {} if records.ids is None else {ids: list(records.ids)}
    predictions["prediction"] = answers.tolist()
    if names and "predict_proba" in dir(model):
        chances = model.predict_proba(records.X)
        two = chances.shape[1] == 2
        column = f"probability_of_{names[1]}" if two else "probability"
        predictions[column] = np.round(chances[:, 1] if two else chances.max(axis=1), 6).tolist()
    scores: dict[str, float] = {}
    if labels is not None and names is None:
        scores["rmse"] = float(np.sqrt(np.mean((answers - labels) ** 2)))
    elif labels is not None:
        scores["accuracy"] = float(np.mean(ClassLabels.of(model.classes_).agree(answers, labels)))
    _show(predictions, scores, len(answers), output, as_json)


def _show(predictions: Columns, scores: dict[str, float], count: int, output: Path | None, as_json: bool) -> None:
    """Write or print predictions, and the scores on these records."""
    if output is not None:
        _write(writable(output), predictions)
        say(f"{count} predictions written to {output}.", err=as_json)
    if as_json:
        show_json({"records": count, "scores": scores, **({} if output else predictions)})
        return
    if output is None:
        say(_csv(predictions), nl=False)
    for name, value in scores.items():
        say(f"{name} = {value:.4f} on these records, without noise: it is data, not private", err=True)


def _predict_by_network(
    folder: Path, data: str, facts: Details, module: Path | None, output: Path | None, as_json: bool
) -> None:
    """Predict with a network that parties trained."""
    if facts["form"] == "table":
        table, labels, _ = records_for(folder, data, facts)
        X = table.X if isinstance(table.X, np.ndarray) else table.X.toarray()
        kind = np.float32 if facts["classes"] is None else np.int64
        records, labelled = PartyRecords(X.astype(np.float32), np.asarray(table.y, kind)), labels is not None
    else:
        records = format_of(facts).load(data, labelled=False)
        labelled = records.labelled
    columns, scores = network_predictions(folder, facts, records, module)
    predictions: Columns = {name: column.tolist() for name, column in columns.items()}
    _show(predictions, scores if labelled else {}, len(records), output, as_json)


def _facts(folder: Path) -> Details:
    """The public facts of a run's model."""
    facts: Details | None = load(folder).details.get("model")
    if facts is None:
        raise DataError(f"{folder}: the result does not say which model it is of; it was not made by `train`.")
    return facts


def _spec_of(folder: Path) -> RunSpec:
    """How the run read its data; of a published model without ``run.json``, what its schema says."""
    if (folder / RUN_FILE).exists():
        return RunSpec.load(folder)
    schema = next((each for suffix in _SCHEMAS if (each := folder / f"schema{suffix}").exists()), None)
    return RunSpec() if schema is None else RunSpec(schema=str(schema))


def records_for(
    folder: Path, data: str, facts: Details, person: str | None = None, keep: str | None = None
) -> tuple[Dataset, npt.NDArray[Any] | None, str]:
    """Records as a run's model takes them, their labels if they have any, and the name of their column of ids."""
    if not Path(data).is_file():
        if person is not None or keep is not None:
            raise DataError(f"{data}: is no file with a column of people's ids.")
        table, labelled = datasets.load(data), True
        if table.X_test is not None and table.y_test is not None:
            table = replace(table, X=table.X_test, y=table.y_test)
    else:
        reading = _reading(folder, data, facts, person, keep)
        labelled, keep = reading["labelled"], reading["keep"]
        try:
            table = datasets.load(data, **reading)
        except NotNumericError as error:
            if "schema" in reading or (folder / RUN_FILE).exists():
                raise
            raise DataError(
                f"{data}: columns that are no numbers, and {folder} has no schema.toml, which says what they mean. "
                "Copy the one of the training into it."
            ) from error
        known, given = facts.get("feature_names"), table.feature_names
        if known and given and list(known) != list(given):
            same = "in another order" if sorted(known) == sorted(given) else "with other names"
            raise DataError(f"{data}: has its columns {same} than the file the model was trained on.")
    if table.d != facts["features"]:
        raise DataError(f"{data}: has {table.d} features, the model was trained on {facts['features']}.")
    if facts.get("rows") == "normalize":
        lengths = linalg.norm(sparse.csr_matrix(table.X), axis=1)
        factors = facts["row_bound"] / np.where(lengths > 0.0, lengths, 1.0)
        scaled: Any = sparse.diags(factors) @ table.X
        table = replace(table, X=scaled)
    return table, table.targets if labelled else None, str(keep)


def _reading(folder: Path, data: str, facts: Details, person: str | None, keep: str | None) -> dict[str, Any]:
    """How a file is loaded that is like the one trained on, with or without a label column."""
    reading = {**_spec_of(folder).reading, "task": facts["task"]}
    schema = None
    if "schema" in reading:
        own = folder / f"schema{Path(reading['schema']).suffix}"
        schema = reading["schema"] = datasets.read_schema(own if own.exists() else reading["schema"])
        keep = keep or reading.get("keep") or next(iter(schema.ids), None)
        if schema.skip_end and Path(data).suffix not in (".parquet", ".pq", ".xlsx", ".npz"):
            say(
                f"The run's schema leaves out the last {schema.skip_end} lines of a file (skip_end). If "
                f"{Path(data).name} has records there, set skip_end = 0 in a copy of the folder's schema.toml.",
                err=True,
            )
    header: tuple[str, ...] = ()
    if {".csv", ".tsv", ".xlsx", ".parquet", ".pq"} & set(Path(data).suffixes):
        from quietgrad.data.tables import read_header  # loads pyarrow

        header = read_header(Path(data), schema, reading.get("delimiter"), reading.get("encoding"))
    if person is not None:
        reading["person"] = person
    elif reading.get("person") not in header:  # a prediction needs no ids
        reading.pop("person", None)
    beside = keep or reading.get("keep")
    reading["keep"] = beside if beside in header or keep is not None else None
    reading["drop"] = tuple(column for column in reading.get("drop", ()) if column in header)
    if schema is None and facts["task"] != "regression":
        reading.setdefault("classes", facts["class_names"])
    if Path(data).suffix not in (".csv", ".tsv", ".xlsx", ".parquet", ".pq", ".npz"):
        reading["n_features"] = facts["features"]
    if schema is not None:
        unlabelled = schema.names is None and set(schema.columns) <= set(header) and schema.label not in header
    else:
        features = {*header} - {reading.get("person"), reading["keep"], *reading["drop"]}
        unlabelled = reading.get("label") not in header and features == set(facts.get("feature_names") or [None])
    return {**reading, "labelled": not unlabelled}


def _csv(columns: Columns) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([cell(name) for name in columns])
    rows.writerows([cell(value) for value in row] for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def cell(value: object) -> object:
    """Mark text that a spreadsheet would run as a formula; class names come from a file.

    >>> [cell(value) for value in ("=HYPERLINK(1)", "-1", -1.5, "yes", "@x")]
    ["'=HYPERLINK(1)", '-1', -1.5, 'yes', "'@x"]
    """
    if not isinstance(value, str):
        return value
    text = sanitize(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and not is_number(text) else text


def _write(path: Path, columns: Columns) -> None:
    """Predictions are about people: only their owner may read the file."""
    text = json.dumps(columns) if path.suffix == ".json" else _csv(columns)
    write_atomically(path, text.encode(), private=True)


evaluate_app = typer.Typer(add_completion=False)


@evaluate_app.command(epilog="Example: quietgrad evaluate runs/a9a held_out.csv --epsilon 0.3 --account held-out")
@with_options("relation", "ledger", "person", epsilon=0.3, delta=1e-6, account="held-out")
def evaluate(
    spec: RunSpec,
    folder: RunFolder,
    data: Annotated[
        str,
        Argument(
            help="Held-out people with labels, in a file like the one trained on, or a registered name, whose test "
            "part is taken.",
            show_default=False,
            parser=public,
        ),
    ],
    training_people: Annotated[
        bool, Option("--training-people", help="Score people that were trained on; the score says so.")
    ] = False,
    allow_http: AllowHTTP = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Release accuracy, AUC, log loss, calibration and confusion of a model, with noise and error bars."""
    from quietgrad import estimators  # loads scikit-learn

    if training_people and (spec.ledger is not None or spec.account != "held-out"):
        raise typer.BadParameter("--training-people charges the run's own account; leave --ledger, --account out.")
    facts = _facts(folder)
    if is_network(facts):
        refuse_network(folder)
    model = estimators.from_run(folder)
    ids, labels = None, None
    if is_multi_file(data):
        trained = RunSpec.load(folder)
        reading = {**trained.reading, "pair": facts["class_names"], "person": spec.person or trained.person}
        X: Any = open_scan(data, reading, {**trained.scanning, "allow_http": allow_http}).X
    else:
        records, truth, _ = records_for(folder, data, facts, spec.person)
        X, ids = records.X, records.person
        if ids is None and model.privacy_.unit == "person":
            raise DataError(
                f"{data}: has no column of people's ids, and the model was trained by person: name --person."
            )
        if truth is None:
            raise DataError(f"{data}: has no labels to score against.")
        labels = truth
        say_undeclared(records)
        if were_trained_on(folder, X, records.y, ids) and not training_people:
            raise DataError(
                f"{data}: holds people that the model was trained on, so its score would be no held-out score. "
                "Give held-out records; or pass --training-people, which charges the run's account and says so. "
                "No privacy budget was spent."
            )
    if training_people:
        payer = payer_of(folder)
    else:
        # Where people who were trained on are known; of a project's ledger it is asked for by naming none.
        named = ledger_of(folder) if spec.ledger is None else Path(spec.ledger)
        there = spec.ledger is not None or named.exists()
        book = named if there and named.resolve() != project_path().resolve() else None
        payer = Terms.of(None, account=spec.account or "held-out", ledger=book).account
    model.__dict__.pop("feature_names_in_", None)  # names were compared when the file was read
    assert spec.epsilon is not None
    with usage():
        score = estimators.private_score(
            model, X, labels, epsilon=spec.epsilon, delta=spec.delta, relation=spec.relation, account=payer,
            person=ids,
        )  # fmt: skip
    if training_people:
        score = replace(score, notes=(TRAINING_PEOPLE, *score.notes))
    people = "training" if training_people else "held-out"
    save_score(score, folder, people)
    say_meaning(explain, score.privacy.epsilon, spec.delta, score.privacy.unit)
    if as_json:
        show_json({**score.to_json(), "people": people})
        return
    paid_from = payer.open()
    rows = [*score_rows(score), ("privacy", str(score.privacy)), ("account", str(payer))]
    rows += [("ledger", "none" if paid_from is None else str(paid_from.path))]
    rows += [("note", note) for note in score.notes]
    show_rows(f"{folder} on {'TRAINING' if training_people else 'held-out'} people ({data})", rows)
