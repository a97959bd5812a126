"""`quietgrad calibrate`: from a budget to the noise multiplier, the number of steps or the batch size."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quietgrad.cli.account import Batch, Rate, Records, SamplingKind, described_run, described_sampling
from quietgrad.cli.options import Delta, Epsilon, Json, RelationName, budget, show_json, show_rows, usage
from quietgrad.privacy.budget import DEFAULT_RELATION

app = typer.Typer(add_completion=False)

_NEEDS = {
    "noise-multiplier": ("steps",),
    "steps": ("noise_multiplier",),
    "batch-size": ("steps", "noise_multiplier", "n"),
}


@app.command(
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
    """Find the least noise, the most steps or the largest batch that keep a budget; ε lands on the safe side."""
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
