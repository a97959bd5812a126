"""`quietgrad account` and `quietgrad calibrate`: the ε of a described run, and the noise for a budget."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer import Option

from quietgrad.cli.ledger import in_words
from quietgrad.cli.options import Delta, Explain, Json, RelationName, answer, budget, say_meaning, usage
from quietgrad.core.accounting import accounting
from quietgrad.core.accounting.accounting import ProvedGuarantee, prove
from quietgrad.core.accounting.budget import DEFAULT_RELATION
from quietgrad.core.accounting.events import Event

account_app = typer.Typer(add_completion=False)

SAMPLED_HELP = f"How records enter a step: {', '.join(accounting.SAMPLED_NAMES)}."
SamplingKind = Annotated[str, Option("--sampling", help=SAMPLED_HELP)]
Records = Annotated[int | None, Option("--n", help="Number of records (public).", show_default=False)]
Batch = Annotated[int | None, Option("--batch-size", help="(Expected) records per step.", show_default=False)]
Rate = Annotated[float | None, Option("--rate", help="Sampling rate, instead of n and batch size.")]
Count = Annotated[int, Option("--steps", help="Number of releases.", show_default=False)]


@account_app.command(
    epilog="Example: quietgrad account --n 60000 --batch-size 512 --steps 2000 --noise-multiplier 1.42 --delta 1e-5"
)
def account(
    steps: Count,
    noise_multiplier: Annotated[
        float, Option(help="σ of the noise on the sum ÷ one record's bound C.", show_default=False)
    ],
    sampling: SamplingKind = "poisson",
    n: Records = None,
    batch_size: Batch = None,
    rate: Rate = None,
    delta: Delta = 1e-5,
    relation: RelationName = DEFAULT_RELATION,
    accountant: Annotated[str, Option(help="best, or one of gaussian-exact, pure, pld, zcdp, rdp.")] = "best",
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """State the ε of a run of noisy sums, and which accountant proves it."""
    with usage():
        event = accounting.sampled_gaussian(
            noise_multiplier, steps, sampling=sampling, n=n, batch_size=batch_size, rate=rate
        )
        proof = prove(event, delta=delta, relation=relation, accountant=accountant)
    say_meaning(explain, proof.epsilon, delta)
    document = {**proof.to_json(), "event": event.to_json()}
    answer(as_json, document, table=(f"ε = {proof.epsilon:.4g}", _proved(proof, event)))


def _proved(proof: ProvedGuarantee, event: Event) -> list[tuple[str, str]]:
    return [
        ("δ", f"{proof.delta:g}"),
        ("relation", str(proof.relation)),
        ("proved by", proof.accountant),
        ("releases", in_words(event)),
    ]


calibrate_app = typer.Typer(add_completion=False)


@calibrate_app.command(
    epilog="Example: quietgrad calibrate --epsilon 1.2 --delta 1e-5 --n 60000 --batch-size 512 --steps 2000"
)
def calibrate(
    epsilon: Annotated[float | None, Option(help="Privacy budget ε; smaller is more private.")] = None,
    delta: Delta = 1e-5,
    find: Annotated[str, Option(help="noise-multiplier or steps.")] = "noise-multiplier",
    sampling: SamplingKind = "poisson",
    n: Records = None,
    batch_size: Batch = None,
    rate: Rate = None,
    steps: Annotated[int | None, Option(help="Number of releases.", show_default=False)] = None,
    noise_multiplier: Annotated[
        float | None, Option(help="σ of the noise on the sum ÷ C; needed for --find steps.")
    ] = None,
    relation: RelationName = DEFAULT_RELATION,
    as_json: Json = False,
) -> None:
    """Find the least noise or the most steps within a budget; ε is proved."""
    guarantee = budget(epsilon, delta, relation)
    sample: dict[str, Any] = {"sampling": sampling, "n": n, "batch_size": batch_size, "rate": rate}
    with usage():
        if find == "noise-multiplier":
            if steps is None:
                raise typer.BadParameter(f"it is needed to find the {find}.", param_hint="--steps")
            noise_multiplier = accounting.calibrate(**guarantee.to_json(), **sample, steps=steps)
        elif find == "steps":
            if noise_multiplier is None:
                raise typer.BadParameter(f"it is needed to find the {find}.", param_hint="--noise-multiplier")
            steps = accounting.calibrate_steps(**guarantee.to_json(), **sample, noise_multiplier=noise_multiplier)
        else:
            raise typer.BadParameter(f"{find!r}: must be one of noise-multiplier, steps.", param_hint="--find")
        event = accounting.sampled_gaussian(noise_multiplier, steps, **sample)
        proof = prove(event, delta=delta, relation=relation)
    numbers = {"noise_multiplier": noise_multiplier, "steps": steps, "batch_size": batch_size}
    document = {"found": find, **numbers, **proof.to_json(), "target_epsilon": guarantee.epsilon}
    title = f"{find.replace('-', ' ')} = {numbers[find.replace('-', '_')]:.6g}"
    epsilon_row = ("ε", f"{proof.epsilon:.4g} (target {guarantee.epsilon:g})")
    answer(as_json, document, table=(title, [epsilon_row, *_proved(proof, event)]))
