"""`quietgrad resume`: continue an interrupted training from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietgrad.cli.options import Json, say
from quietgrad.cli.runs import RunSpec
from quietgrad.cli.train import finish, run, show

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad resume runs/a9a")
def resume(
    folder: Annotated[Path, typer.Argument(help="The --out folder of the interrupted run.", show_default=False)],
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    as_json: Json = False,
) -> None:
    """Continue where a run stopped: the model is that of an undisturbed run, and nothing is spent twice.

    If versions, threads or kernels changed since, fresh noise is drawn and the plan is charged again.
    """
    from quietgrad.errors import DataError
    from quietgrad.training.result import load

    spec = RunSpec.load(folder)
    if (folder / "checkpoint.safetensors").exists():
        result = run(spec, folder, quiet=quiet or as_json, resumed=True)
    elif not (folder / "result.json").exists():
        raise DataError(f"{folder}: the run released nothing before it stopped; train again with --out {folder}.")
    else:
        result = load(folder)
        if "model" not in result.details:  # stopped after training, before scores and report were written
            result = finish(spec, folder, spec.load_data(), result)
        elif not as_json:
            say(f"{folder}: the run was finished already.")
    show(result, folder, as_json=as_json)
