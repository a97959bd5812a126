"""Predictions of a network that parties trained: its code is run only if the user names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.cli.scoring import Details
from quietgrad.core.errors import DataError
from quietgrad.core.files import is_path_name, os_error_text, read_bytes
from quietgrad.federation.network import MOST_TEXT, NETWORK, NetworkSource
from quietgrad.federation.record_format import PartyRecords, RecordFormat
from quietgrad.methods.result import load

_AT_ONCE = 256  # records


def is_network(facts: Details) -> bool:
    return facts.get("objective") == NETWORK


def refuse_network(folder: Path) -> None:
    """Raise: private scores are for models of tables."""
    raise DataError(
        f"{folder}: holds a network, and private scores are for models of tables. `quietgrad predict` gives its "
        "predictions. No privacy budget was spent."
    )


def source_of(folder: Path, facts: Details, module: Path | None) -> NetworkSource:
    """The network of a run, with the code in the file that the user names; its digest must be the run's."""
    file, _, maker = str(facts["module"]).partition(":")
    if module is None:
        raise DataError(
            f"{folder}: holds a network. Its code is run to predict: read it, then name it, "
            f"--module {folder / file}."
        )
    start_file = facts.get("start")
    if start_file is not None and not is_path_name(start_file):
        raise DataError(f"{folder}: result.json names start weights that are no file of this folder.")
    try:
        text = read_bytes(module, most=MOST_TEXT).decode()
        start = None if start_file is None else read_bytes(folder / start_file)
    except (OSError, UnicodeDecodeError) as error:
        reason = os_error_text(error) if isinstance(error, OSError) else "not a text file"
        raise DataError(f"{module}: code or start weights cannot be read ({reason}).") from None
    try:
        source = NetworkSource(
            file, maker, text, int(facts["parameters"]), str(facts["loss"]), dict(facts["arguments"]), start,
            start_file, int(facts["seed"]), facts["pad"],
        )  # fmt: skip
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder}: result.json does not describe a network: {error}") from None
    if source.digests != facts["sha256"]:
        raise DataError(f"{module}: is not the code, or the start weights are not those, that was trained.")
    return source


def network_predictions(
    folder: Path, facts: Details, records: PartyRecords, module: Path | None
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, float]]:
    """Columns of predictions, and scores on these records: exact numbers, not private."""
    import torch

    objective = source_of(folder, facts, module).build()
    objective.write_back(torch.as_tensor(load(folder).params))
    prepared = objective.prepare(PartyRecords(records.X, records.y).held)
    if facts["form"] == "tokens" and facts["classes"] is None:  # a language model predicts the next token
        losses = _losses(objective, prepared)
        return {"loss": losses}, {"loss": float(losses.mean())}
    outputs = _outputs(objective, records)
    if facts["classes"] is None:
        numbers = outputs.reshape(len(records), -1)[:, 0]
        return {"prediction": numbers}, {"rmse": float(np.sqrt(np.mean((numbers - records.y) ** 2)))}
    names = np.array(facts["class_names"])
    if outputs.shape[1:] != (len(names),):
        codes = (outputs.reshape(len(records), -1)[:, 0] > 0.0).astype(int)
        return {"prediction": names[codes]}, {"accuracy": float(np.mean(codes == records.y))}
    odds = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    codes = outputs.argmax(axis=1)
    columns = {"prediction": names[codes], "probability": np.round(odds.max(axis=1) / odds.sum(axis=1), 6)}
    return columns, {"accuracy": float(np.mean(codes == records.y))}


def format_of(facts: Details) -> RecordFormat:
    """How files like the parties' are read."""
    names = facts["class_names"]
    return RecordFormat(
        facts["form"], tuple(facts["shape"]), None if names is None else tuple(names), facts["vocabulary"],
        facts["label"],
    )  # fmt: skip


def _losses(objective: Any, prepared: Any) -> npt.NDArray[np.float64]:
    from quietgrad.core.session.objectives import Batch

    with objective.evaluating():
        losses: npt.NDArray[np.float64] = objective.row_losses(
            Batch(prepared, None, bytes(32)), objective.initial(prepared)
        )
    return losses


def _outputs(objective: Any, records: PartyRecords) -> npt.NDArray[np.float64]:
    """Return the module's outputs for all records, in evaluation mode."""
    import torch

    outputs = []
    with objective.evaluating(), torch.no_grad():
        for first in range(0, len(records), _AT_ONCE):
            some = records.X[first : first + _AT_ONCE]
            parts = (
                [torch.as_tensor(some)]
                if isinstance(some, np.ndarray)
                else [torch.as_tensor(x)[None] for x in some]
            )
            outputs += [objective.module(part).double().numpy() for part in parts]
    return np.concatenate(outputs)
