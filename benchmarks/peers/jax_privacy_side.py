"""JAX Privacy's answers to task.py, in an environment of its own; prints JSON.

The network is the four-layer CNN of torch_engine.py's first row, layer by layer, in plain jax. A step is compiled;
``clipped_grad`` clips and sums, ``gaussian_privatizer`` adds the noise (jax's own, not cryptographic).
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import task
from jax_privacy import accounting, batch_selection, clipping, noise_addition
from jax_privacy.accounting import accountants, analysis

BATCH = 256
SHAPES = {
    "conv1": (16, 1, 8, 8), "bias1": (16, 1, 1), "conv2": (32, 16, 4, 4), "bias2": (32, 1, 1),
    "fc1": (512, 32), "bias3": (32,), "fc2": (32, 10), "bias4": (10,),
}  # fmt: skip


def network(p: Any, x: Any) -> Any:
    """Two strided convolutions with overlapping pooling, two dense layers."""

    def layer(x: Any, kernel: Any, bias: Any) -> Any:
        x = jax.nn.relu(jax.lax.conv(x, kernel, (2, 2), "VALID") + bias)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")

    x = jnp.pad(x, ((0, 0), (0, 0), (3, 3), (3, 3)))
    x = layer(layer(x, p["conv1"], p["bias1"]), p["conv2"], p["bias2"])
    return jax.nn.relu(x.reshape(len(x), -1) @ p["fc1"] + p["bias3"]) @ p["fc2"] + p["bias4"]


def loss(p: Any, batch: Any) -> Any:
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(network(p, x), y).mean()


def network_steps() -> dict[str, Callable[[], Any]]:
    """Plain SGD and DP-SGD on one batch."""
    rng = np.random.default_rng(0)
    start = {name: jnp.asarray(0.05 * rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}
    batch = (
        jnp.asarray(rng.standard_normal((BATCH, 1, 28, 28)), jnp.float32),
        jnp.asarray(rng.integers(0, 10, BATCH)),
    )
    clipped = clipping.clipped_grad(loss, l2_clip_norm=1.0, normalize_by=BATCH)
    privatizer = noise_addition.gaussian_privatizer(stddev=1.0 / BATCH, prng_key=jax.random.key(0))

    @jax.jit
    def plain(p: Any) -> Any:
        return jax.tree.map(lambda a, g: a - 1e-3 * g, p, jax.grad(loss)(p, batch))

    @jax.jit
    def private(p: Any, state: Any) -> Any:
        noisy, state = privatizer.update(clipped(p, batch), state)
        return jax.tree.map(lambda a, g: a - 1e-3 * g, p, noisy), state

    held: dict[str, Any] = {"sgd": start, "dp-sgd": start, "noise": privatizer.init(start)}

    def sgd() -> None:
        held["sgd"] = jax.block_until_ready(plain(held["sgd"]))

    def dp_sgd() -> None:
        held["dp-sgd"], held["noise"] = jax.block_until_ready(private(held["dp-sgd"], held["noise"]))

    return {"sgd": sgd, "JAX Privacy": dp_sgd}


def accountant() -> Any:
    return analysis.DpsgdTrainingAccountant(dp_accountant_config=accountants.PldAccountantConfig())


def noise_for(n: int, batch: int, steps: int, epsilon: float, tolerance: float = 0.01) -> float:
    return float(
        accounting.calibrate_noise_multiplier(
            target_epsilon=epsilon, accountant=accountant(), batch_sizes=batch, num_updates=steps,
            num_samples=n, target_delta=task.DELTA, tol=tolerance,
        )
    )  # fmt: skip


def calibration() -> dict[str, Any]:
    parameters = analysis.DpParams(
        noise_multipliers=task.GIVEN_NOISE, batch_size=task.RUN_BATCH, num_samples=task.RUN_N, delta=task.DELTA
    )
    z, z_seconds = task.cpu(lambda: noise_for(task.RUN_N, task.RUN_BATCH, task.RUN_STEPS, task.RUN_EPSILON), 3)
    e, e_seconds = task.cpu(lambda: accountant().compute_epsilon(task.RUN_STEPS, parameters), 3)
    return {
        "pld": {
            "noise_multiplier": z, "cpu_seconds": z_seconds, "epsilon": float(e), "epsilon_cpu_seconds": e_seconds
        }
    }  # fmt: skip


def accuracy(table: task.Table) -> dict[str, Any]:
    """DP-SGD on Poisson samples, padded to one length so that the step is compiled once."""

    def example(theta: Any, row: Any) -> Any:
        x, y = row
        return optax.sigmoid_binary_cross_entropy(x @ theta[:-1] + theta[-1], y)

    noises: dict[int, float] = {}

    def fit(data: task.Table, rate: float, clip: float) -> task.Model:
        n, d = data.X.shape
        expected = n // task.PARTS
        if n not in noises:
            noises[n] = noise_for(n, expected, task.STEPS, task.EPSILON, 1e-3)
        clipped = clipping.clipped_grad(example, l2_clip_norm=clip, keep_batch_dim=False, normalize_by=expected)
        key = jax.random.key(int(np.random.default_rng().integers(2**31)))
        privatizer = noise_addition.gaussian_privatizer(stddev=noises[n] * clip / expected, prng_key=key)
        X, y = jnp.asarray(data.X, jnp.float32), jnp.asarray(data.y, jnp.float32)

        @jax.jit
        def step(theta: Any, state: Any, chosen: Any) -> Any:
            total = clipped(theta, (X[chosen], y[chosen]), is_padding_example=chosen < 0)
            noisy, state = privatizer.update(total, state)
            return theta - rate * noisy, state

        theta = jnp.zeros(d + 1)
        state = privatizer.init(theta)
        strategy = batch_selection.CyclicPoissonSampling(sampling_prob=expected / n, iterations=task.STEPS)
        length = int(expected + 10 * expected**0.5)
        for chosen in strategy.batch_iterator(n):
            theta, state = step(theta, state, batch_selection.pad_to_multiple_of(chosen, length))
        final = np.asarray(theta)
        return lambda rows: rows @ final[:-1] + final[-1] > 0

    return {"add-remove": {"JAX Privacy DP-SGD": task.searched(fit, table, task.DP_SGD_GRID)}}


def main() -> None:
    warnings.simplefilter("ignore")
    if sys.argv[1] == "memory":
        steps = network_steps()
        print(json.dumps({name: task.grown(step) for name, step in list(steps.items())}))
        return
    found = {
        "versions": {name: version(name) for name in ("jax-privacy", "jax", "dp-accounting", "numpy")},
        "steps": {"batch": BATCH, **task.ratios(network_steps())},
        "calibration": calibration(),
        "accuracy": accuracy(task.Table.read(sys.argv[1])),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
