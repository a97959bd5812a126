"""The audits applied to two published methods whose stated guarantee does not hold as stated.

    OMP_NUM_THREADS=1 python reproduce/audit_peers.py [--opacus-dir DIR]
    OMP_NUM_THREADS=1 python reproduce/audit_peers.py --quick                # the second alone, seconds

1. Opacus 1.6.0 in ghost-clipping mode. For ``Conv2d`` with a ``padding_mode`` other than "zeros" the per-example
   norm is computed as if the padding were zeros, so a record can contribute more than ``max_grad_norm``. With zero
   padding (the default, and by far the usual case) the same probes pass. Opacus is installed into a folder of its
   own, never into the environment that runs this.
2. Weighted distributed DP-SGD (paper 002, Algorithm 1) as printed: each party adds noise for the whole federation's
   n to its own model, and the models are averaged. The noise of an average of m models has m times less variance
   than the proof takes it to have. With one party the same test passes. The paper leaves its constant c open; the
   exact one for the claimed central query is used, which is the smallest the claim allows.

Takes a minute. Nothing here needs data. Results go to ``reproduce/results/audit_peers.json``.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.assurance.audit.confidence_bounds import best_threshold, dprime_lower, epsilon_lower
from quietgrad.assurance.audit.running import discriminant
from quietgrad.core.accounting.closed_form_accountants import gaussian_epsilon, gaussian_mu

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.store import print_table

Floats = npt.NDArray[np.float64]
ALPHA = 1e-6
SIDE, CLIP, NOISE = 4, 1.0, 1.0


def install(folder: Path) -> None:
    """Put Opacus 1.6.0 into ``folder`` if it is not there, and make it importable from this process only."""
    if not (folder / "opacus").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, "opacus==1.6.0", "opt-einsum"], check=True)
    sys.path.insert(0, str(folder))


class Ghost:
    """One convolution under Opacus in ghost mode; what its optimiser would apply is read off before the step."""

    def __init__(self, padding: str, noise: float) -> None:
        import torch
        from opacus import PrivacyEngine

        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3, padding=1, padding_mode=padding), torch.nn.Flatten())
        nobody = torch.utils.data.TensorDataset(torch.zeros(1, 1, SIDE, SIDE), torch.zeros(1, dtype=torch.long))
        self.torch = torch
        self.model, self.optimizer, self.criterion, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            criterion=torch.nn.CrossEntropyLoss(),
            data_loader=torch.utils.data.DataLoader(nobody, batch_size=1),
            noise_multiplier=noise,
            max_grad_norm=CLIP,
            grad_sample_mode="ghost",
            poisson_sampling=False,
        )

    def release(self, images: Any, labels: Any) -> Floats:
        """The noisy sum of clipped gradients that one step would use."""
        self.optimizer.zero_grad()
        self.criterion(self.model(images), labels).backward()
        self.optimizer.pre_step()
        parts = [p.grad.detach().flatten() for p in self.model.parameters()]
        return np.asarray(self.torch.cat(parts).double().numpy())


def records(torch: Any, seed: int) -> tuple[Any, Any]:
    """A large image, every other one empty inside, and a label."""
    image = 100.0 * torch.randn(1, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    if seed % 2:
        image[..., 1:-1, 1:-1] = 0.0
    return image, torch.tensor([seed % (SIDE * SIDE)])


def audit_opacus(padding: str, draws: int = 200, runs: int = 400) -> dict[str, Any]:
    """L0: the longest clipped gradient of one record. L1: d′ of one noisy step with and without that record."""
    silent = Ghost(padding, 0.0)
    lengths = [float(np.linalg.norm(silent.release(*records(silent.torch, s)))) for s in range(draws)]
    worst = int(np.argmax(lengths))
    noisy = Ghost(padding, NOISE)
    canary, ordinary = records(noisy.torch, worst), records(noisy.torch, draws)
    both = noisy.torch.cat([canary[0], ordinary[0]]), noisy.torch.cat([canary[1], ordinary[1]])
    worlds = [np.stack([noisy.release(*world) for _ in range(runs)]) for world in (both, ordinary)]
    teach = runs // 4
    direction = discriminant(worlds[0][:teach], worlds[1][:teach])
    _, low = dprime_lower(worlds[0][teach:] @ direction, worlds[1][teach:] @ direction, ALPHA)
    return {
        "padding_mode": padding,
        "largest contribution ÷ max_grad_norm": round(lengths[worst] / CLIP, 4),
        "claimed μ of one step": 1.0 / NOISE,
        "μ at least": round(low, 3),
        "claimed ε at δ=1e-5": round(gaussian_epsilon(1.0 / NOISE, 1e-5), 3),
        "ε at least": round(gaussian_epsilon(low, 1e-5), 3),
        # float32 rounding alone exceeds the bound by parts in 10⁷; that is not what is counted here
        "violation": bool(lengths[worst] > CLIP * 1.001 or low > 1.0 / NOISE),
    }


def weighted_average(parties: int, label: int, runs: int, rng: np.random.Generator, noise: float) -> Floats:
    """Algorithm 1 of paper 002 with the logistic loss, ``runs`` times: the averaged model's second coordinate.

    The first party holds one informative record, of norm 1 and a large negative margin; all other records are zero,
    so other parties' models are their noise. ``label`` (±1) turns the record's second feature round.
    """
    n, steps, rate = 45_222, 100, 0.05
    x = np.array([0.1, label * math.sqrt(0.99)])
    theta = np.tile([-60.0, 0.0], (runs, 1))
    for _ in range(steps):
        pull = 1.0 / (1.0 + np.exp(theta @ x))
        theta += rate * (pull[:, None] * x * (parties / n) + noise * rng.standard_normal((runs, 2)))
    others = rate * noise * math.sqrt(steps * (parties - 1)) * rng.standard_normal(runs)
    return np.asarray((theta[:, 1] + others) / parties)


def audit_weighted_average(parties: int, epsilon: float = 0.25, runs: int = 200_000) -> dict[str, Any]:
    """L1 and L2 on the averaged model, replace-one, against the paper's claim at δ = 1e-3."""
    delta, n, steps = 1e-3, 45_222, 100
    mu = gaussian_mu(epsilon, delta)
    noise = 2.0 * math.sqrt(steps) / (n * mu)
    rng = np.random.default_rng(parties)
    a, b = (weighted_average(parties, label, runs, rng, noise) for label in (1, -1))
    teach = runs // 4
    _, low = dprime_lower(a, b, ALPHA / 2)
    cut = best_threshold((a[:teach], b[:teach]), delta, ALPHA / 4, runs - teach)
    counted = epsilon_lower((a[teach:], b[teach:]), cut, delta, ALPHA / 2)
    return {
        "parties": parties,
        "claimed ε at δ=1e-3": epsilon,
        "claimed μ": round(mu, 4),
        "μ at least (L1)": round(low, 4),
        "ε at least (L1)": round(gaussian_epsilon(low, delta), 3) if low else 0.0,
        "ε at least (L2)": round(counted, 3),
        "violation": bool(low > mu or counted > epsilon),
    }


def main() -> None:
    """Audit both and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path.home() / ".cache" / "quietgrad" / "opacus-1.6.0"
    parser.add_argument("--opacus-dir", type=Path, default=cache, help="where Opacus is put (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the printed average, fewer runs; nothing is written")
    arguments = parser.parse_args()
    if arguments.quick:
        rows = [audit_weighted_average(m, runs=20_000) for m in (1, 32)]
        title = "Weighted averaging as printed, 20 000 runs of each world"
        print_table(title, list(rows[0]), [list(row.values()) for row in rows])
        return
    folder = arguments.opacus_dir
    weighted = [audit_weighted_average(m) for m in (1, 8, 32)]
    print_table("Weighted averaging as printed", list(weighted[0]), [list(row.values()) for row in weighted])
    install(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch and Opacus
        ghost = [audit_opacus(padding) for padding in ("zeros", "circular", "reflect", "replicate")]
    print_table("Opacus 1.6.0, ghost mode", list(ghost[0]), [list(row.values()) for row in ghost])
    numbers = {
        "confidence": f"1 − {ALPHA:g}",
        "weighted averaging as printed": weighted,
        "Opacus 1.6.0, ghost": ghost,
    }
    save(Path(__file__).parent / "results" / "audit_peers.json", numbers)


if __name__ == "__main__":
    main()
