"""Questions of a hostile coordinator to a party, through the real path, for every algorithm that federates.

    OMP_NUM_THREADS=1 python benchmarks/federation_questions.py [--questions 100000] [--seed 1]

A party with one absurd record is asked; see ``tests/federation/questions.py`` for what is asked and what is
checked: no sum is longer than its query's bound by more than 1e-9, and whatever is refused is refused to another
record alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.federation.questions import SLACK, Interrogation, pairs

from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "federation_questions.json"
FEATURES = (3, 63)
FRESH = 100  # questions after which the records are others


def main() -> None:
    """Ask, and write the JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    cells = [(*pair, features) for pair in pairs() for features in FEATURES]
    each = -(-options.questions // len(cells))
    found: dict[str, Counter[str]] = {}
    begun = time.perf_counter()
    for k, (algorithm, loss, features) in enumerate(cells):
        rng = np.random.default_rng([options.seed, k])
        for asked in range(each):
            if asked % FRESH == 0:
                asking = Interrogation(algorithm, loss, features, rng)
            found.setdefault(algorithm, Counter())[asking.ask()] += 1  # raises if anything is wrong
        print(f"{algorithm}, {loss}, d = {features}: {dict(found[algorithm])}", flush=True)
    total = sum(map(Counter.total, found.values()))
    answers = {name: dict(counts) for name, counts in found.items()}
    rows = {"questions": total, "findings": 0, "slack": SLACK, "seed": options.seed, "answers": answers}
    save(options.out, {**rows, "seconds": round(time.perf_counter() - begun, 1)})


if __name__ == "__main__":
    main()
