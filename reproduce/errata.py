"""What each erratum of paper 000's privacy analysis changes, as a number.

    OMP_NUM_THREADS=1 python reproduce/errata.py          # no data
    OMP_NUM_THREADS=1 python reproduce/errata.py --quick  # the first two rows; nothing is written

Takes 1 CPU minute.
Noise multipliers z are the standard deviation of the noise on a sum ÷ the bound of one record, fixed-size batches,
replace-one, δ = 1e-5. "Needed" is what the accountant proves for the stated ε. Theorem 4.1 is a formula with a
condition: σ′² = z²/4 ≥ 0.7 and α − 1 ≤ ⅔σ′²·log(1/(τα(1 + σ′²))) at the rate τ = b/n. The bare formula says
nothing where the condition fails, so it is told apart here from the least z that meets both.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import quietgrad as qg
from quietgrad.core.accounting import events

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.store import print_table

DELTA = 1e-5
FILE = Path(__file__).parent / "results" / "errata.json"
CASES = {  # n, batch, steps, ε; CNN5 has 100 epochs of the paper's three batches
    "MNIST, ε = 7": (60_000, 512, 2000, 7.0),
    "CNN5, ε = 10, b = 128": (50_000, 128, 39_062, 10.0),
    "CNN5, ε = 10, b = 64": (50_000, 64, 78_125, 10.0),
    "CNN5, ε = 10, b = 32": (50_000, 32, 156_250, 10.0),
    "a9a, ε = 0.5": (32_561, 100, 1302, 0.5),
}
BETAS = [k / 10_000.0 for k in range(1, 10_000)]


def printed(n: int, batch: int, steps: int, epsilon: float, power: int) -> float:
    """z by 14Tα/(βn²ε^power), at the β that asks for least: the paper leaves it free."""
    return min(_formula(n, batch, steps, epsilon, power, beta)[0] for beta in BETAS)


def _formula(n: int, batch: int, steps: int, epsilon: float, power: int, beta: float) -> tuple[float, float]:
    alpha = math.log(1.0 / DELTA) / ((1.0 - beta) * epsilon) + 1.0
    return batch / n * math.sqrt(14.0 * steps * alpha / (beta * epsilon**power)), alpha


def allowed(z: float, alpha: float, rate: float) -> bool:
    """Whether Theorem 4.1's own condition admits this noise and order."""
    square = z * z / 4.0
    inside = rate * alpha * (1.0 + square)
    return square >= 0.7 and inside < 1.0 and alpha - 1.0 <= 2.0 * square * math.log(1.0 / inside) / 3.0


def theorem(n: int, batch: int, steps: int, epsilon: float) -> float | None:
    """The least z that Theorem 4.1 states with its condition; ``None`` if there is none."""
    pairs = (_formula(n, batch, steps, epsilon, 1, beta) for beta in BETAS)
    return min((z for z, alpha in pairs if allowed(z, alpha, batch / n)), default=None)


def cost(n: int, batch: int, z: float, steps: int) -> float:
    """ε of so many fixed-size batches."""
    event = events.repeated(events.FixedSizeSampled(n, batch, events.Gaussian(z)), steps)
    return qg.account(event, delta=DELTA, relation="replace-one")


def needed(n: int, batch: int, steps: int, epsilon: float, first: int | None = None) -> float:
    """z that is proved for ε, with a first batch of its own if given."""
    method = qg.DPSRM(steps=steps, batch_size=batch, first_batch_size=first, sampling="fixed-size")
    return qg.plan(method, n=n, budget=qg.Budget(epsilon, DELTA, qg.Relation.REPLACE_ONE)).noise_multiplier


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of all errata."""
    columns = ["erratum", "z as printed", "z needed", "ε of the printed z", "Theorem 4.1's condition"]
    title = "Errata of paper 000 and the numbers that they change"
    return [{"title": title, "columns": columns, "rows": record["rows"]}]


def of_noise(name: str) -> list[list[Any]]:
    """The box, the formula and the theorem of one experiment."""
    n, batch, steps, epsilon = CASES[name]
    true, rows = needed(n, batch, steps, epsilon), []
    stated = theorem(n, batch, steps, epsilon)
    bare = printed(n, batch, steps, epsilon, 1)
    said = "holds" if stated == bare else "excludes it"
    for what, z, condition in (
        ("the box of Algorithm 1 has ε² for ε", printed(n, batch, steps, epsilon, 2), None),
        ("the formula of Theorem 4.1 alone", bare, said),
        ("Theorem 4.1 with its condition", stated, "holds" if stated else "met by no noise"),
    ):
        rows.append([f"{name}: {what}", z, true, None if z is None else cost(n, batch, z, steps), condition])
    return rows


def of_first_batch(name: str) -> list[list[Any]]:
    """What b₀ and the first release change."""
    n, batch, steps, epsilon = CASES[name]
    true, more, rows = needed(n, batch, steps, epsilon), steps + 1, []
    for what, power in (("σ′² ≥ 0.7 with b₀ = b unsquared", 1), ("σ′² ≥ 0.7 with b₀²", 0)):
        z = math.sqrt(2.8 * batch**power)  # b₀^(2−power)·σ₀²/(4G²), and σ₀ = zG/b₀
        rows.append([f"{name}: {what}", z, true, cost(n, batch, z, steps), None])
    longer = needed(n, batch, more, epsilon)
    rows.append([f"{name}: T + 1 releases, T composed", true, longer, cost(n, batch, true, more), None])
    wide = needed(n, batch, more, epsilon, 4 * batch)
    first = events.FixedSizeSampled(n, 4 * batch, events.Gaussian(true))
    rest = events.repeated(events.FixedSizeSampled(n, batch, events.Gaussian(true)), steps)
    both = qg.account(events.composed([first, rest]), delta=DELTA, relation="replace-one")
    rows.append([f"{name}: a first batch b₀ = 4b at the rate b/n", true, wide, both, None])
    return rows


def main() -> None:
    """Compute, print, write."""
    first, *others = CASES
    if "--quick" in sys.argv:
        print_table(**tables({"rows": of_noise(first)})[0])
        return
    rows = [row for name in (first, *others) for row in of_noise(name)] + of_first_batch(first)
    record = {"delta": DELTA, "relation": "replace-one", "rows": rows}
    save(FILE, {**record, "tables": tables(record)})
    print_table(**tables(record)[0])


if __name__ == "__main__":
    main()
