"""`quietgrad demo`: a first private model from nothing, in well under two minutes, online or not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from quietgrad.cli.options import Json, say, show_json
from quietgrad.cli.report import report_if_possible
from quietgrad.cli.run_spec import RunSpec
from quietgrad.cli.train import run
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.schedule import plan
from quietgrad.core.session.kept import forget
from quietgrad.data.loading import demo_dataset

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad demo --out runs/demo")
def demo(
    out: Annotated[Path, Option(help="Folder for models, ledger and report.")] = Path("runs/demo"),
    epsilon: Annotated[float, Option(help="ε of each of the two runs.")] = 1.0,
    delta: Annotated[float, Option(help="δ of each of the two runs.")] = 1e-5,
    as_json: Json = False,
) -> None:
    """Plan, explain and train two private models on a real data set, and leave a report that compares them."""

    def tell(text: str) -> None:
        if not as_json:
            say(text)

    data = demo_dataset()
    tell(f"Data: {data.name}, {data.n} records of {data.d} features. {'; '.join(data.notes)}.")
    ledger = out / "ledger.jsonl"
    shared = RunSpec(
        data=data.name, epsilon=epsilon, delta=delta, ledger=str(ledger.resolve()), account="demo", n_public=data.n
    )
    small = max(1, min(256, data.n // 8))
    specs = {"dp-srm": replace(shared, algorithm="dp-srm", batch_size=small), "default": shared}
    method = specs["dp-srm"].make_algorithm(data, data.n)
    budget = specs["dp-srm"].budget()
    tell("\nBefore anything is released, the plan:\n")
    tell(plan(method, n=data.n, budget=budget).explain())
    tell("")
    results = {}
    for name, spec in specs.items():
        folder = out / name
        if not forget(folder):  # an interrupted demo: its reservation stays charged, its key goes
            say(f"{folder}: what an interrupted run left there cannot be read; it is replaced.", err=True)
        tell(f"Training {name} …")
        results[name] = run(spec, folder, quiet=as_json)
    page = report_if_possible([out / name for name in specs], out / "report.html")
    book = Ledger(ledger)
    total = book.spent("demo", delta=delta, relation="add-remove")
    if as_json:
        runs = {
            name: {"epsilon": r.privacy.epsilon, "metrics": dict(r.metrics), "seconds": math.ceil(r.seconds)}
            for name, r in results.items()
        }
        show_json({"data": data.name, "runs": runs, "account": total.to_json(), "report": page and str(page)})
        return
    tell(f"\n{'run':<10}{'ε':>8}{'test accuracy':>16}{'majority':>10}{'test loss':>12}{'seconds':>10}")
    for name, result in results.items():
        scores = result.metrics
        accuracies = f"{scores['test_accuracy']:>16.4f}{scores['majority_accuracy']:>10.4f}"
        figures = f"{accuracies}{scores['test_loss']:>12.4f}{math.ceil(result.seconds):>10d}"
        tell(f"{name:<10}{result.privacy.epsilon:>8.4f}{figures}")
    count = len(book.book().counted("demo"))
    tell(f"\nThe {count} runs so far are about the same people: together ε = {total.epsilon:.4g} at δ = {delta:g}.")
    if page is not None:
        tell(f"Report: {page.resolve()}")
    tell(f"Next: quietgrad ledger show {ledger}  ·  quietgrad train --help")
