"""`quietgrad evaluate`: how good a model is on held-out people, privately and charged to their account."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quietgrad.cli.options import Json, RelationName, show_json, show_rows
from quietgrad.privacy.budget import DEFAULT_RELATION

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad evaluate runs/a9a held_out.csv --epsilon 0.3 --account held-out")
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
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger file; else the one that the run was paid from.")
    ] = None,
    account: Annotated[str, typer.Option(help="Whose privacy is spent: the held-out people.")] = "held-out",
    person: Annotated[
        str | None,
        typer.Option(help="Column of the ids of the people rows are about; by default the one trained by."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Release accuracy, AUC, log loss, calibration and confusion of a model, with noise and error bars."""
    import numpy as np

    from quietgrad.cli.options import usage
    from quietgrad.cli.predict import people_for
    from quietgrad.cli.runs import RunSpec
    from quietgrad.cli.scans import open_scan
    from quietgrad.errors import DataError
    from quietgrad.estimators.runs import from_run
    from quietgrad.estimators.scoring import private_score
    from quietgrad.files import is_multi_file
    from quietgrad.privacy.project import project_path
    from quietgrad.training.result import ledger_of

    model = from_run(folder)
    facts = model.result_.details.get("model")
    if facts is None:
        raise DataError(
            f"{folder}: an additive model is scored from Python: private_score(from_run(folder), X, y)."
        )
    ids = None
    if is_multi_file(data):
        spec = RunSpec.load(folder)
        whose = spec.reading.get("person") if person is None else person
        reading = {**spec.reading, "pair": facts["class_names"], "person": whose}
        X: Any = open_scan(data, reading, spec.scanning).table
        labels = None
        if X.classes is not None:
            model.classes_ = np.asarray(X.classes)
    else:
        X, y, ids = people_for(folder, data, facts, person)
        if ids is None and model.privacy_.unit == "person":
            raise DataError(
                f"{data}: has no column of people's ids, and the model was trained by person: name --person."
            )
        if y is None:
            raise DataError(f"{data}: has no labels to score against.")
        labels = y if facts["task"] == "regression" else model.classes_[y.astype(int)]
    # Where people who were trained on are known; of a project's ledger it is asked for by naming none.
    found = ledger_of(folder) if ledger is None else ledger
    book = found if found.exists() and found.resolve() != project_path().resolve() else None
    model.__dict__.pop("feature_names_in_", None)  # names were compared when the file was read
    with usage():
        score = private_score(
            model, X, labels, epsilon=epsilon, delta=delta, relation=relation, ledger=book, account=account,
            person=ids,
        )  # fmt: skip
    score.save(folder)
    if as_json:
        show_json(score.to_json())
        return
    names = ("accuracy", "auc", "log_loss", "r2", "rmse", "mae")
    rows = [
        (n.replace("_", " "), f"{v[0]:.4f} ± {v[1]:.4f}") for n in names if (v := getattr(score, n)) is not None
    ]
    rows += [("privacy", str(score.privacy)), ("account", account), ("ledger", str(book or project_path()))]
    rows += [("note", note) for note in score.notes]
    show_rows(f"{folder} on held-out people ({data})", rows)
