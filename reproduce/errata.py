"""What each erratum of paper 000's privacy analysis changes, as a number.

    OMP_NUM_THREADS=1 python reproduce/errata.py          # no data
    OMP_NUM_THREADS=1 python reproduce/errata.py --quick  # the first two rows; nothing is written

Takes 1 CPU minute.
Noise multipliers z are the standard deviation of the noise on a sum ÷ the bound of one record, fixed-size batches,
replace-one, δ = 1e-5. "Needed" is what the accountant proves for the stated ε.
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
CASES = {  # n, batch, steps, ε
    "MNIST, ε = 7": (60_000, 512, 2000, 7.0),
    "CNN5, ε = 10, 15 epochs": (50_000, 256, 2930, 10.0),
    "CNN5, ε = 10, 100 epochs": (50_000, 256, 19_531, 10.0),
    "a9a, ε = 0.5": (32_561, 100, 1302, 0.5),
}


def printed(n: int, batch: int, steps: int, epsilon: float, power: int) -> float:
    """z by 14Tα/(βn²ε^power), at the β that asks for least: the paper leaves it free."""

    def at(beta: float) -> float:
        alpha = math.log(1.0 / DELTA) / ((1.0 - beta) * epsilon) + 1.0
        return batch / n * math.sqrt(14.0 * steps * alpha / (beta * epsilon**power))

    return min(at(k / 200.0) for k in range(1, 200))


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
    columns = ["erratum", "z as printed", "z needed", "ε of the printed z"]
    title = "Errata of paper 000 and the numbers that they change"
    return [{"title": title, "columns": columns, "rows": record["rows"]}]


def main() -> None:
    """Compute, print, write."""
    quick = "--quick" in sys.argv
    rows: list[list[Any]] = []
    for name, (n, batch, steps, epsilon) in list(CASES.items())[: 1 if quick else None]:
        box, theorem = (printed(n, batch, steps, epsilon, power) for power in (2, 1))
        true = needed(n, batch, steps, epsilon)
        rows.append([f"{name}: the box of Algorithm 1 has ε² for ε", box, true, cost(n, batch, box, steps)])
        rows.append([f"{name}: Theorem 4.1's formula", theorem, true, cost(n, batch, theorem, steps)])
    if quick:
        print_table(**tables({"rows": rows})[0])
        return
    n, batch, steps, epsilon = CASES["MNIST, ε = 7"]
    more = steps + 1
    true = needed(n, batch, steps, epsilon)
    rows.append(
        [
            "MNIST, ε = 7: T + 1 releases, T composed",
            true,
            needed(n, batch, more, epsilon),
            cost(n, batch, true, more),
        ]
    )
    wide = needed(n, batch, more, epsilon, 4 * batch)
    first = events.FixedSizeSampled(n, 4 * batch, events.Gaussian(true))
    rest = events.repeated(events.FixedSizeSampled(n, batch, events.Gaussian(true)), steps)
    both = qg.account(events.composed([first, rest]), delta=DELTA, relation="replace-one")
    rows.append(["MNIST, ε = 7: a first batch b₀ = 4b at the rate b/n (b₀ unsquared)", true, wide, both])
    record = {"delta": DELTA, "relation": "replace-one", "rows": rows}
    save(FILE, {**record, "tables": tables(record)})
    print_table(**tables(record)[0])


if __name__ == "__main__":
    main()
