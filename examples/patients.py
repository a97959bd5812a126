"""A sequence model over patients: everybody has any number of stays, and is protected with all of them.

    python examples/patients.py                    # half a minute on a laptop

A stay is a sequence of twelve codes; the model, a small transformer, tells whether the patient comes back within a
month. Records are stays, and the ids say whose they are: the ε that is printed is per patient, however many stays
they have. The data are made up. Patients of the test set are in no batch.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn

import quietgrad as qg
import quietgrad.torch as qt

CODES, LENGTH = 40, 12


class Stays(nn.Module):
    """Codes in, two scores out."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.codes = nn.Embedding(CODES, width)
        self.attention = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of not coming back, and of coming back."""
        scores: Tensor = self.head(self.attention(self.codes(x)).mean(1))
        return scores


def made_up(patients: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, np.ndarray]:
    """Stays, whether each was followed by another, and the patient of each.

    Few patients have most of the stays, and a patient's stays are alike: the first eight codes are risky, and some
    patients have them often.
    """
    person = np.repeat(np.arange(patients), np.minimum(rng.geometric(0.2, patients), 40))
    risk = rng.beta(0.6, 2.0, patients)[person]
    risky = rng.random((len(person), LENGTH)) < risk[:, None]
    codes = np.where(risky, rng.integers(0, 8, risky.shape), rng.integers(8, CODES, risky.shape))
    back = rng.random(len(person)) < 1 / (1 + np.exp(-1.5 * (risky.sum(1) - 2.5)))
    order = rng.permutation(len(person))  # a table of stays is sorted by nobody
    return torch.from_numpy(codes[order]), torch.from_numpy(back[order] * 1), person[order]


def main() -> None:
    """Train, and say how well the model does on new patients and what it cost the old ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--patients", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--epsilon", type=float, default=3.0)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    stays, back, person = made_up(options.patients, rng)
    new_stays, new_back, _ = made_up(1000, rng)
    model = Stays()
    result = qt.fit(
        model,
        nn.CrossEntropyLoss(reduction="none"),
        (stays, back),
        qg.DPAdam(steps=options.steps, batch_size=options.patients // 12, learning_rate=0.01),
        budget=qg.Budget(options.epsilon, 1e-5),
        person=person,  # whose each stay is
        records_per_person=8,  # at most so many of a patient's stays in one step
    )
    model.eval()
    with torch.no_grad():
        right = float((model(new_stays).argmax(1) == new_back).float().mean())
    usual = float(new_back.float().mean())
    print(f"{options.patients} patients, {len(person)} stays, up to {np.bincount(person).max()} of one patient")
    print(f"right on stays of new patients: {right:.1%}, always the same answer: {max(usual, 1 - usual):.1%}")
    print(result.privacy)


if __name__ == "__main__":
    main()
