"""docs/peers.md from the JSON: every number on the page is one of the file's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = """# Peers side by side

Opacus, JAX Privacy, diffprivlib and Flower, each in an environment of its own, asked the same things as quietgrad.
`python benchmarks/peers/run.py` makes the environments, measures, and writes
`benchmarks/results/peers.json` and this page. One thread, CPU time (the machine is shared). These are small
measures: read them as an order, not as exact factors. Longer ones are under [Benchmarks](benchmarks.md).

Measured {date} on {machine}; {versions}.
The ratios below are of quietgrad {quietgrad}. [Benchmarks](benchmarks.md) and the README state later measurements,
made otherwise: a step there draws its sample too, and Opacus runs in the same process. So the two do not agree
to the digit.
"""


def write(record: dict[str, Any], path: Path) -> None:
    """Write the page."""
    peers = record["peers"]
    parts = [
        HEAD.format(
            date=record["date"][:10],
            machine=record["machine"],
            versions=versions(record),
            quietgrad=record["versions"]["quietgrad"],
        ),
        f"{record['note']}\n" if "note" in record else "",
        absent(peers),
        steps(peers),
        accuracy(record),
        calibration(record),
        layers(peers),
        many_parties(record),
        checks(peers),
    ]
    path.write_text("\n".join(part for part in parts if part), encoding="utf-8")


def versions(record: dict[str, Any]) -> str:
    """The versions of all, once."""
    said = {"quietgrad": record["versions"]["quietgrad"], "torch": record["versions"]["torch"]}
    for name in ("opacus", "jax-privacy", "diffprivlib", "flower"):
        said |= {k: v for k, v in record["peers"].get(name, {}).get("versions", {}).items() if k in WANTED}
    return ", ".join(f"{name} {number}" for name, number in said.items())


WANTED = ("opacus", "jax-privacy", "jax", "diffprivlib", "scikit-learn", "flwr")


def absent(peers: dict[str, Any]) -> str:
    """Those that could not be had."""
    lines = [f"- {name}: {found['absent']}" for name, found in peers.items() if "absent" in found]
    return "\n".join(["Not measured:", "", *lines, ""]) if lines else ""


def grid(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """A table; ``head`` has the columns between bars."""
    columns = head.split("|")
    body = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    lines = ["| " + " | ".join(c.strip() for c in columns) + " |", "|---" * len(columns) + "|", *body, ""]
    return "\n".join(lines) if body else ""


def steps(peers: dict[str, Any]) -> str:
    """Private step over plain step, and memory."""
    rows = []
    for name, model in peers.get("opacus", {}).get("steps", {}).items():
        for method, cell in model["methods"].items():
            if "dp-sgd" in method and "vmap" not in method:
                rows.append([name, method, model["batch"], f"{cell['ratio_to_sgd']:.2f}", f"{cell['peak_mb']:.0f}"])
        rows.append([name, "plain SGD (torch)", model["batch"], "1", f"{model['methods']['sgd']['peak_mb']:.0f}"])
    jax = peers.get("jax-privacy", {})
    if "steps" in jax:
        batch = jax["steps"]["batch"]
        ratio, memory = jax["steps"]["JAX Privacy"]["ratio_to_sgd"], jax["peak_mb"]
        rows.append(
            [
                "the same in jax",
                "JAX Privacy dp-sgd, compiled",
                batch,
                f"{ratio:.2f}",
                f"{memory['JAX Privacy']:.0f}",
            ]
        )
        rows.append(["the same in jax", "plain SGD (jax, compiled)", batch, "1", f"{memory['sgd']:.0f}"])
    text = """## Step time and memory

A DP-SGD step over a plain SGD step of the same framework in the same process, contenders in turn, median of the
ratios; megabytes by which the process grows over two steps, compiling included. Peers draw ordinary noise,
quietgrad both kinds.

"""
    return text + grid("network | step | batch | ÷ plain SGD | memory, MB", rows) if rows else ""


PROMISES = {
    "add-remove": "(1, 1e-5), add-remove",
    "replace-one": "(1, 1e-5), replace-one",
    "replace-one, pure": "(1, 0), replace-one",
}


def accuracy(record: dict[str, Any]) -> str:
    """Test accuracy, by promise."""
    rows = []
    for promise, words in PROMISES.items():
        for found in record["peers"].values():
            for method, cell in found.get("accuracy", {}).get(promise, {}).items():
                setting = ", ".join(f"{k} {v:g}" for k, v in cell["setting"].items()) or "none: defaults"
                score = f"{cell['accuracy']:.4f} ± {cell['spread']:.4f}"
                rows.append([words, method, score, setting, f"{cell['cpu_seconds_a_fit']:.2f}"])
    text = f"""## Accuracy at equal guarantees

Logistic regression, {record["task"]["data"]}, rows of norm ≤ 1; settings searched on held-out rows, on one grid for
all ({record["task"]["steps"]} steps of DP-SGD on Poisson samples; penalties for pure ε), each with its own
noise calibration; {record["task"]["fits"]} fits on all training rows, mean ± standard deviation. Rows with the same
guarantee compare; rows of different guarantees do not. Flower's differential privacy protects whole clients, which
none of these does.

"""
    return text + grid("guarantee | method | test accuracy | setting | CPU s a fit", rows) if rows else ""


def calibration(record: dict[str, Any]) -> str:
    """The noise each would add, and what it takes."""
    rows = []
    for name, found in record["peers"].items():
        for accountant, cell in found.get("calibration", {}).items():
            rows.append([
                f"{name}, {accountant}", f"{cell['noise_multiplier']:.4f}",
                f"{cell['epsilon_of_noise_proved_by_quietgrad']:.4f}", f"{cell['cpu_seconds']:.3f}",
                f"{cell['epsilon']:.4f}", f"{cell['epsilon_cpu_seconds']:.3f}",
            ])  # fmt: skip
    asked = record["task"]["calibration"]
    text = f"""## Calibration

Noise for ε = {asked["epsilon"]}, δ = {asked["delta"]:g}, n = {asked["n"]}, batches of {asked["batch_size"]} by
Poisson sampling, {asked["steps"]} steps, each with its own tolerance: less noise is tighter, if its ε holds. The ε
of that noise is what quietgrad's PLD proves (an upper bound). Beside it, each one's ε for a noise multiplier of
{asked["given_noise_multiplier"]}.

"""
    head = "accountant | σ/C for the ε | its proved ε | CPU s | ε of the given noise | CPU s"
    return text + grid(head, rows) if rows else ""


def layers(peers: dict[str, Any]) -> str:
    """Which layers give the right clipped sum."""
    found = peers.get("opacus", {}).get("layers", {})
    rows = [
        [f"`{name}`" if name.isalnum() else name, cell["Opacus"], cell["quietgrad"]] for name, cell in found.items()
    ]
    text = """## Layers

A network of each layer alone: is the sum of clipped gradients that of the examples taken one at a time? JAX Privacy
has no layers: it takes any function that `jax.vmap` takes. Opacus offers its own recurrent and attention layers
(`DPLSTM`, `DPMultiheadAttention`), which replace torch's in the model.

"""
    return text + grid("layer | Opacus | quietgrad", rows) if rows else ""


def many_parties(record: dict[str, Any]) -> str:
    """Secure sums and rounds."""
    found = record["peers"].get("flower", {})
    sums = []
    for row in found.get("secure", []):  # SecAgg+ agrees on keys in every round, so ours is shown with its set-up
        whole = {key: value + row.get("set_up", {}).get(key, 0) for key, value in row["round"].items()}
        party, server = f"{1e3 * whole['cpu_seconds_party']:.1f}", f"{whole['cpu_seconds_server']:.2f}"
        sums.append([row["mode"], party, server, f"{whole['bytes_party'] / 1e3:.0f}"])
    rounds = [
        [who, row["d"], f"{seconds:.3f}"]
        for row in found.get("rounds", [])
        for who, seconds in row["seconds_per_round"].items()
    ]
    task = record["task"]
    text = f"""## Many parties

One secure sum of {task["dimension"]} numbers of {task["parties"]} parties, a tenth of which drop, as many
neighbours and the same threshold for both. Flower's SecAgg+ sums without noise and signatures, ours makes the noise
inside. Keys are agreed on in every round by SecAgg+ and once a run by ours; here ours are counted too.

{grid("protocol | CPU ms of a party | CPU s of the server | kB sent by a party", sums)}
A round of five real processes on loopback, wall time: Flower's clients return what they were sent, without TLS;
ours clip, sum, add noise, and charge a ledger, over our TLS transport and over NVIDIA FLARE.

{grid("transport | numbers | s a round", rounds)}"""
    if not rounds:
        text += "Not measured in this run; `benchmarks/results/federation_flower.json` has one.\n"
    return text if sums or rounds else ""


def checks(peers: dict[str, Any]) -> str:
    """scikit-learn's checks."""
    rows = []
    for name in ("diffprivlib", "quietgrad"):
        for estimator, cell in peers.get(name, {}).get("checks", {}).items():
            failed = ", ".join(f"`{check}`" for check in cell["failed"]) or "none"
            rows.append([name, f"`{estimator}`", f"{cell['passed']} of {cell['of']}", failed])
    said = peers.get("diffprivlib", {}).get("newer_scikit_learn", [])
    told = "; ".join(said).replace("_", r"\_")  # __init__ is no emphasis
    older = f"diffprivlib does not work with newer ones ({told}).\n" if said else ""
    text = f"""## scikit-learn's estimator checks

`check_estimator` at ε = 10⁴ (the checks fit a few dozen rows), each under the newest scikit-learn that it works
with.
{older}
"""
    return text + grid("library | estimator | passed | not passed", rows) if rows else ""
