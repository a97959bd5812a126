"""`quietgrad account`: the ε of a described run, in figures, as JSON, or as a plot over its steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietgrad.cli.options import Delta, Json, RelationName, show_json, show_rows, usage, writable
from quietgrad.privacy.budget import DEFAULT_RELATION

if TYPE_CHECKING:
    from quietgrad.privacy.events import Event

app = typer.Typer(add_completion=False)

SamplingKind = Annotated[
    str, typer.Option("--sampling", help="How records enter a step: poisson, fixed-size, full.")
]
Records = Annotated[int | None, typer.Option("--n", help="Number of records (public).", show_default=False)]
Batch = Annotated[int | None, typer.Option("--batch-size", help="(Expected) records per step.", show_default=False)]
Rate = Annotated[float | None, typer.Option("--rate", help="Sampling rate, instead of n and batch size.")]
Count = Annotated[int, typer.Option("--steps", help="Number of releases.", show_default=False)]


@app.command(
    epilog="Example: quietgrad account --n 60000 --batch-size 512 --steps 2000 --noise-multiplier 1.42 --delta 1e-5"
)
def account(
    steps: Count,
    noise_multiplier: Annotated[
        float, typer.Option(help="σ of the noise on the sum ÷ one record's bound C.", show_default=False)
    ],
    sampling: SamplingKind = "poisson",
    n: Records = None,
    batch_size: Batch = None,
    rate: Rate = None,
    delta: Delta = 1e-5,
    relation: RelationName = DEFAULT_RELATION,
    accountant: Annotated[str, typer.Option(help="best, or one of gaussian-exact, pure, pld, zcdp, rdp.")] = "best",
    plot: Annotated[
        Path | None, typer.Option(help="Draw ε over the steps to this .png, .svg or .pdf.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """State the ε of a run of noisy sums, and which accountant proves it."""
    from quietgrad.privacy.accounting import prove

    with usage():
        event = described_run(sampling, n, batch_size, rate, steps, noise_multiplier)
        proof = prove(event, delta=delta, relation=relation, accountant=accountant)
    answer: dict[str, Any] = {**proof.to_json(), "event": event.to_json()}
    if plot is not None:
        curve = [
            (t, prove(described_run(sampling, n, batch_size, rate, t, noise_multiplier), delta=delta,
                      relation=relation, accountant=accountant).epsilon)
            for t in milestones(steps)
        ]  # fmt: skip
        from quietgrad.charts import Lines, Series
        from quietgrad.report.figures import save_chart

        title = f"ε = {proof.epsilon:.4g} after {steps} releases"
        label = f"ε at δ = {delta:g} ({proof.relation})"
        save_chart(writable(plot), Lines(title, (Series("ε", curve),), "releases", label, zero=True))
        answer |= {"plot": str(plot), "curve": curve}
    if as_json:
        show_json(answer)
        return
    show_rows(
        f"ε = {proof.epsilon:.4g}",
        [
            ("δ", f"{delta:g}"),
            ("relation", str(proof.relation)),
            ("proved by", proof.accountant),
            ("releases", f"{steps} with noise multiplier {noise_multiplier:g}, {described_sampling(event)}"),
            *([("plot", str(plot))] if plot else []),
        ],
    )


def described_run(
    sampling: str, n: int | None, batch_size: int | None, rate: float | None, steps: int, noise_multiplier: float
) -> Event:
    """The event of ``steps`` Gaussian releases, sampled as described.

    >>> described_run("poisson", 1000, 10, None, 5, 1.1)
    Repeated(inner=PoissonSampled(rate=0.01, inner=Gaussian(noise_multiplier=1.1)), count=5)
    """
    from quietgrad.privacy import events

    if sampling == "full":
        return events.gaussian(noise_multiplier, steps)
    if sampling == "fixed-size":
        if n is None or batch_size is None:
            raise ValueError("sampling='fixed-size': needs --n and --batch-size.")
        return events.fixed_size_gaussian(n, batch_size, noise_multiplier, steps)
    if sampling != "poisson":
        raise ValueError(f"sampling={sampling!r}: must be 'poisson', 'fixed-size' or 'full'.")
    if rate is None:
        if n is None or batch_size is None:
            raise ValueError("sampling='poisson': needs --rate, or --n and --batch-size.")
        if not 1 <= batch_size <= n:
            raise ValueError(f"batch_size={batch_size}: must be between 1 and n={n}.")
        rate = batch_size / n
    return events.poisson_gaussian(rate, noise_multiplier, steps)


def described_sampling(event: Event) -> str:
    """How an event's records are sampled, in words."""
    from quietgrad.privacy import events

    inner = event.inner if isinstance(event, events.Repeated) else event
    if isinstance(inner, events.PoissonSampled):
        return f"Poisson sampling at rate {inner.rate:g}"
    if isinstance(inner, events.FixedSizeSampled):
        return f"{inner.batch_size} of {inner.n} records without replacement"
    return "every record in every release"


def milestones(steps: int, points: int = 24) -> list[int]:
    """At most ``points`` counts from 1 to ``steps``, closer together at first, where ε grows fastest.

    >>> milestones(100, 6)
    [1, 4, 16, 36, 64, 100]
    """
    return sorted({max(1, round(steps * (k / (points - 1)) ** 2)) for k in range(points)})
