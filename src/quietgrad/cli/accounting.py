"""`quietgrad account` and `quietgrad calibrate`: the ε of a described run, and the noise for a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietgrad.cli.options import (
    Delta,
    Epsilon,
    Explain,
    Json,
    RelationName,
    budget,
    say_meaning,
    show_json,
    show_rows,
    usage,
    writable,
)
from quietgrad.privacy.budget import DEFAULT_RELATION

if TYPE_CHECKING:
    from quietgrad.privacy.events import Event

account_app = typer.Typer(add_completion=False)

SamplingKind = Annotated[
    str, typer.Option("--sampling", help="How records enter a step: poisson, random-allocation, fixed-size, full.")
]
Records = Annotated[int | None, typer.Option("--n", help="Number of records (public).", show_default=False)]
Batch = Annotated[int | None, typer.Option("--batch-size", help="(Expected) records per step.", show_default=False)]
Rate = Annotated[float | None, typer.Option("--rate", help="Sampling rate, instead of n and batch size.")]
Count = Annotated[int, typer.Option("--steps", help="Number of releases.", show_default=False)]


@account_app.command(
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
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """State the ε of a run of noisy sums, and which accountant proves it."""
    from quietgrad.privacy.accounting import prove

    with usage():
        event = described_run(sampling, n, batch_size, rate, steps, noise_multiplier)
        proof = prove(event, delta=delta, relation=relation, accountant=accountant)
    say_meaning(explain, proof.epsilon, delta)
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
    if sampling == "random-allocation":
        if n is None or batch_size is None or rate is not None:
            raise ValueError("sampling='random-allocation': needs --n and --batch-size, and no --rate.")
        if not 1 <= batch_size <= n:
            raise ValueError(f"batch_size={batch_size}: must be between 1 and n={n}.")
        epoch = -(-n // batch_size)
        return events.random_allocation(
            steps_per_epoch=epoch, noise_multiplier=noise_multiplier, epochs=-(-steps // epoch)
        )
    if sampling != "poisson":
        raise ValueError(f"sampling={sampling!r}: must be 'poisson', 'random-allocation', 'fixed-size' or 'full'.")
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
    if isinstance(inner, events.RandomAllocation):
        epochs = event.count if isinstance(event, events.Repeated) else 1
        return f"each record in one secret step of every epoch: {epochs} × {inner.steps_per_epoch} steps"
    if isinstance(inner, events.FixedSizeSampled):
        return f"{inner.batch_size} of {inner.n} records without replacement"
    return "every record in every release"


def milestones(steps: int, points: int = 24) -> list[int]:
    """At most ``points`` counts from 1 to ``steps``, closer together at first, where ε grows fastest.

    >>> milestones(100, 6)
    [1, 4, 16, 36, 64, 100]
    """
    return sorted({max(1, round(steps * (k / (points - 1)) ** 2)) for k in range(points)})


calibrate_app = typer.Typer(add_completion=False)

_NEEDS = {
    "noise-multiplier": ("steps",),
    "steps": ("noise_multiplier",),
    "batch-size": ("steps", "noise_multiplier", "n"),
}


@calibrate_app.command(
    epilog="Example: quietgrad calibrate --epsilon 1.2 --delta 1e-5 --n 60000 --batch-size 512 --steps 2000"
)
def calibrate(
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    find: Annotated[str, typer.Option(help="noise-multiplier, steps or batch-size.")] = "noise-multiplier",
    sampling: SamplingKind = "poisson",
    n: Records = None,
    batch_size: Batch = None,
    rate: Rate = None,
    steps: Annotated[int | None, typer.Option(help="Number of releases.", show_default=False)] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="σ of the noise on the sum ÷ C; given when another is sought.")
    ] = None,
    relation: RelationName = DEFAULT_RELATION,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Search again even if the answer is kept.")] = False,
    as_json: Json = False,
) -> None:
    """Find the least noise, the most steps or the largest batch within a budget; ε is proved."""
    promise = budget(epsilon, delta, relation)
    given: dict[str, Any] = {"steps": steps, "noise_multiplier": noise_multiplier, "n": n}
    if find not in _NEEDS:
        raise typer.BadParameter(f"{find!r}: must be one of {', '.join(_NEEDS)}.", param_hint="--find")
    for name in _NEEDS[find]:
        if given[name] is None:
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"it is needed to find the {find}.", param_hint=option)
    from quietgrad.privacy import calibration as room
    from quietgrad.privacy.accounting import prove

    shared: dict[str, Any] = {
        "epsilon": promise.epsilon,
        "delta": delta,
        "sampling": sampling,
        "n": n,
        "relation": relation,
        "cache": not no_cache,
    }
    with usage():
        if find == "noise-multiplier":
            noise_multiplier = room.calibrate(**shared, steps=steps, batch_size=batch_size, rate=rate)  # type: ignore[arg-type]
        elif find == "steps":
            steps = room.calibrate_steps(
                **shared, noise_multiplier=noise_multiplier, batch_size=batch_size, rate=rate  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            batch_size = room.calibrate_batch_size(**shared, noise_multiplier=noise_multiplier, steps=steps)  # type: ignore[arg-type]
        assert steps is not None
        assert noise_multiplier is not None
        event = described_run(sampling, n, batch_size, rate, steps, noise_multiplier)
        proof = prove(event, delta=delta, relation=relation)
    found: dict[str, float | int | None] = {
        "noise-multiplier": noise_multiplier,
        "steps": steps,
        "batch-size": batch_size,
    }
    if as_json:
        answer = {name.replace("-", "_"): value for name, value in found.items()}
        show_json({"found": find, **answer, **proof.to_json(), "target_epsilon": promise.epsilon})
        return
    value = found[find]
    show_rows(
        f"{find.replace('-', ' ')} = {value:.6g}"
        if isinstance(value, float)
        else f"{find.replace('-', ' ')} = {value}",
        [
            ("ε", f"{proof.epsilon:.4g} (target {promise.epsilon:g})"),
            ("δ", f"{delta:g}"),
            ("relation", str(proof.relation)),
            ("proved by", proof.accountant),
            ("releases", f"{steps} with noise multiplier {noise_multiplier:.6g}, {described_sampling(event)}"),
        ],
    )
