"""Claims of runs of other libraries: what they released, priced again, with the conditions spelled out.

Each function takes an object of a library, or what its run was given, and returns a
:class:`~quietgrad_verify.document.Claim`. Nothing of the library is imported; only public attributes are read. The
claim's ε is proved here from the releases. What the library printed is kept beside it (``source.stated``), and
:func:`~quietgrad_verify.verdict.check` refutes a claim whose printed ε is less. The condition says what ε rests on
and cannot be seen from the objects: the claim is *conditional*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quietgrad_verify.document import Claim, Json, statement
from quietgrad_verify.losses import OURS
from quietgrad_verify.proof import prove

_ADVERSARY = "anyone who sees every released number; the machine of the run is trusted"
_POISSON = {"UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler"}
_LONGEST_CONDITION = 300  # characters: a ledger's lines hold no more
_FLOATS = "rounding of floating-point noise tells nothing"
_APART = "losses and layers treat records apart"


def gaussian(z: float) -> Json:
    """The event of one Gaussian release of noise multiplier z = σ/C."""
    return {"event": "gaussian", "noise_multiplier": float(z)}


def repeated(inner: Json, count: int) -> Json:
    """The event of ``count`` releases."""
    return inner if count == 1 else {"event": "repeated", "inner": inner, "count": int(count)}


def composed(parts: Sequence[Json]) -> Json:
    """The event of all of ``parts`` on the same records."""
    return parts[0] if len(parts) == 1 else {"event": "composed", "parts": list(parts)}


def make_claim(
    event: Json,
    *,
    delta: float,
    relation: str,
    program: str,
    read_from: str,
    conditions: Sequence[str],
    notes: Sequence[str] = (),
    unit: str = "record",
    sampling: str = "as in the event",
    stated: float | None = None,
    data: str = "not named",
    n: int | None = None,
    program_version: str | None = None,
) -> Claim:
    """A claim about releases that another program made; its ε is proved here (:class:`NoRule` if it cannot be).

    Args:
        event: the releases, as in ``docs/certificate-format.md``.
        conditions: clauses that ε rests on; they stand in the claim's condition, joined by "and".
        notes: what was found wrong with the program's own statement, or is to be known.
        stated: the ε that the program printed at ``delta``.
    """
    proof = prove(event, delta=delta, relation=relation)
    condition = (
        f"if {', '.join(conditions[:-1])}{' and ' if len(conditions) > 1 else ''}{conditions[-1]} (not checked)"
    )
    if len(condition) > _LONGEST_CONDITION or not condition.isprintable():
        raise ValueError(f"conditions: must be one line of at most {_LONGEST_CONDITION} characters together.")
    if program_version is None:
        try:
            program_version = version(program)
        except PackageNotFoundError:
            program_version = "unknown"
    body: Json = {
        "issued": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "claim": {
            "epsilon": proof.epsilon, "delta": float(delta), "relation": relation, "unit": unit, "accountant": OURS,
            "adversary": _ADVERSARY, "sampling": sampling, "noise_multiplier": 0.0, "releases": {},
            "is_private": True, "notes": list(notes), "account": None, "condition": condition,
        },
        "event": event, "plan": None, "federation": None, "ledger": None, "model": None,
        "data": {"name": data, "n_public": n}, "versions": {program: program_version},
        "source": {
            "program": program, "version": program_version, "object": read_from,
            "stated": None if stated is None else {"epsilon": float(stated), "delta": float(delta)},
        },
    }  # fmt: skip
    body["statement"] = statement(body)
    return Claim(body)


def from_opacus(
    engine: Any, *, delta: float, data_loader: Any, optimizer: Any = None, stated: float | None = None, **about: Any
) -> Claim:
    """A run of Opacus, from its ``PrivacyEngine``, the loader that gave the batches and the optimizer.

    A loader that does not draw Poisson samples is priced without amplification: each record is in one release of an
    epoch, under replace-one. An optimizer that adapts its clipping norm releases the number of unclipped records as
    well: a count of sensitivity 1 with the noise ``unclipped_num_std``.
    """
    printed = float(engine.get_epsilon(delta)) if stated is None else stated
    history = [(float(z), float(q), int(steps)) for z, q, steps in engine.accountant.history]
    sampler = type(getattr(data_loader, "batch_sampler", None)).__name__
    poisson, notes = sampler in _POISSON, []
    relation = "add-remove" if poisson else "replace-one"

    def one(z: float) -> Json:
        spread = getattr(optimizer, "unclipped_num_std", None)
        if spread is None:
            return gaussian(z)
        louder = (z**-2 - (2.0 * spread) ** -2) ** -0.5
        # Under replace-one a count moves by 1 = 2C with C = ½.
        return composed([gaussian(louder), gaussian(spread if poisson else 2.0 * spread)])

    conditions = [_APART, _FLOATS]
    if poisson:
        event = composed([repeated({"event": "poisson", "rate": q, "inner": one(z)}, s) for z, q, s in history])
        sampling = "Poisson samples"
        conditions.insert(0, "the batches were this loader's and stayed secret")
    else:
        epochs = [(z, math.ceil(q * steps - 1e-9)) for z, q, steps in history]
        event = composed([repeated(one(z), count) for z, count in epochs])
        sampling = "every record once an epoch, in batches of a shuffled or sequential loader"
        notes.append(
            f"batches came from {sampler}, a shuffled or sequential loader, and were priced as Poisson samples"
        )
        conditions.insert(0, "every record was in at most one batch of an epoch")
    if getattr(optimizer, "unclipped_num_std", None) is not None:
        notes.append("the number of unclipped records is released too, and was priced at half its sensitivity")
        conditions.append("the sizes of batches, by which it is divided, tell nothing")
    if getattr(engine, "secure_mode", False) is not True:
        conditions.append("torch's generator cannot be predicted")
    return make_claim(event, delta=delta, relation=relation, program="opacus", read_from="PrivacyEngine",
                      conditions=conditions, notes=notes, sampling=sampling, stated=printed, **about)  # fmt: skip


def from_dp_accounting(
    accountant: Any, *, delta: float, stated: float | None = None, conditions: Sequence[str] = (), **about: Any
) -> Claim:
    """What an accountant of dp-accounting was told (its ``ledger``), under its neighbouring relation.

    Its events have σ/C. Its Rényi accountant takes them as σ/Δ, which under replace-one is half the loss.
    """
    relation = _relation(accountant.neighboring_relation)
    printed = float(accountant.get_epsilon(delta)) if stated is None else stated
    event, notes = event_of_dp_accounting(accountant.ledger, relation), []
    kind = type(accountant).__name__
    if relation == "replace-one" and kind == "RdpAccountant":
        notes.append("RdpAccountant takes the noise as σ/Δ: under replace-one it prices half of the sensitivity")
    return make_claim(
        event, delta=delta, relation=relation, program="dp-accounting", read_from=kind, stated=printed, notes=notes,
        conditions=list(conditions) or ["the run made the releases that the accountant was told", _FLOATS], **about,
    )  # fmt: skip


def from_jax_privacy(
    plan: Any, *, delta: float, relation: str = "add-remove", stated: float | None = None, **about: Any
) -> Claim:
    """A ``DPExecutionPlan`` of JAX Privacy: its ``dp_event``, under the relation that it was calibrated for."""
    batches = type(plan.batch_selection_strategy).__name__
    event = event_of_dp_accounting(plan.dp_event, relation)
    conditions = [f"batches were those of the plan's {batches}", "gradients and noise were those of the plan"]
    return make_claim(event, delta=delta, relation=relation, program="jax-privacy", read_from="DPExecutionPlan",
                      conditions=[*conditions, _FLOATS], sampling=batches, stated=stated, **about)  # fmt: skip


def from_tf_privacy(
    optimizer: Any, *, n: int, batch_size: int, epochs: int, delta: float, poisson: bool = False,
    stated: float | None = None, **about: Any,
) -> Claim:  # fmt: skip
    """A run of TensorFlow Privacy, from its Keras optimizer and the numbers that ``fit`` was given.

    A microbatch of several records is clipped as one: a record added to it may turn it around, so it moves the sum
    by 2C. Keras shuffles; say ``poisson=True`` only of a pipeline that draws Poisson samples.
    """
    config, notes = optimizer.get_config(), []
    z, pieces = float(config["noise_multiplier"]), config.get("num_microbatches")
    if pieces is not None and pieces != batch_size and poisson:
        z /= 2.0
        notes.append("microbatches hold several records: the sensitivity is 2C, and C was priced")
    if poisson:
        steps = math.ceil(epochs * n / batch_size)
        event = repeated({"event": "poisson", "rate": batch_size / n, "inner": gaussian(z)}, steps)
    else:
        event = repeated(gaussian(z), epochs)
        notes.append("batches were shuffled, and TensorFlow Privacy prices Poisson samples")
    conditions = [_APART, _FLOATS, "TensorFlow's generator cannot be predicted"]
    conditions.insert(
        0, "samples stayed secret" if poisson else "every record was in at most one batch of an epoch"
    )
    return make_claim(event, delta=delta, relation="add-remove" if poisson else "replace-one", n=n, stated=stated,
                      program="tensorflow-privacy", read_from=type(optimizer).__name__, conditions=conditions,
                      notes=notes, **about)  # fmt: skip


def from_flower(
    strategy: Any, *, clients: int, rounds: int, delta: float, stated: float | None = None, **about: Any
) -> Claim:
    """A run of Flower with one of its wrappers for central noise; a client is the privacy unit.

    A round asks ``num_sampled_clients`` of all clients, drawn without replacement. A wrapper that adapts its
    clipping norm counts the clients below it, with the noise ``clipped_count_stddev``.
    """
    sampled, z = int(strategy.num_sampled_clients), float(strategy.noise_multiplier)
    one = gaussian(z)
    spread = getattr(strategy, "clipped_count_stddev", None)
    if spread is not None:
        one = composed([one, gaussian(2.0 * float(spread))])  # replacing a client moves the count by 1 = 2·½
    if sampled < clients:
        one = {"event": "fixed-size", "n": clients, "batch_size": sampled, "inner": one}
    event, notes = repeated(one, rounds), []
    if stated is not None and rounds > 1:
        for relation, release in (("replace-one", one), ("add-remove", gaussian(z))):
            if abs(stated / prove(release, delta=delta, relation=relation).epsilon - 1.0) < 0.02:
                notes.append(f"the ε that was stated is that of one round under {relation}; there were {rounds}")
                break
    kind = type(strategy).__name__
    conditions = ["clients weigh the same in the average", "who is asked in a round stayed secret", _FLOATS,
                  "numpy's generator cannot be predicted"]  # fmt: skip
    if "ClientSide" in kind:
        conditions.append("clients clip as they are told")
    return make_claim(event, delta=delta, relation="replace-one", program="flwr", read_from=kind, n=clients,
                      conditions=conditions, notes=[*notes, "a person is a client"], unit="person", stated=stated,
                      sampling=f"{sampled} of {clients} clients a round", **about)  # fmt: skip


def from_diffprivlib(accountant: Any, *, delta: float, relation: str = "replace-one", **about: Any) -> Claim:
    """What a ``BudgetAccountant`` of diffprivlib has spent, entry by entry; n is public and fixed there.

    An (ε, δ) entry is an ε-DP release that fails with probability δ. ``delta`` is that of the claim, above their
    sum.
    """
    parts: list[Json] = []
    for epsilon, failure in accountant.spent_budget:
        parts.append({"event": "pure", "epsilon": float(epsilon), "relation": relation})
        if failure > 0.0:
            parts.append({"event": "failure", "probability": float(failure)})
    if not parts:
        raise ValueError("the accountant has spent nothing, so there is nothing to claim.")
    total = accountant.total()
    conditions = ["bounds and norms that diffprivlib was given are public", "models clip to them", _FLOATS]
    return make_claim(event=composed(parts), delta=delta, relation=relation, program="diffprivlib",
                      read_from=type(accountant).__name__, conditions=conditions, stated=float(total[0]),
                      sampling="every record in every release", **about)  # fmt: skip


def from_opendp(measurement: Any, d_in: float, *, delta: float, stated: float | None = None, **about: Any) -> Claim:
    """A measurement of OpenDP, by its map at the distance ``d_in`` between neighbours.

    SymmetricDistance or InsertDeleteDistance 1 is add-remove, ChangeOneDistance or HammingDistance 1, and
    SymmetricDistance 2, are replace-one.
    """
    metric, measure = str(measurement.input_metric), str(measurement.output_measure)
    changed = metric.startswith(("ChangeOne", "Hamming")) and d_in == 1
    replaced = changed or (metric.startswith(("Symmetric", "InsertDelete")) and d_in == 2)
    if not replaced and not (metric.startswith(("Symmetric", "InsertDelete")) and d_in == 1):
        raise ValueError(
            f"input metric {metric} at {d_in}: is no distance of neighbouring data sets that is known here."
        )
    relation, loss = "replace-one" if replaced else "add-remove", measurement.map(d_in)
    if measure.startswith("MaxDivergence"):
        event: Json = {"event": "pure", "epsilon": float(loss), "relation": relation}
    elif measure.startswith("ZeroConcentratedDivergence"):
        event = {"event": "zcdp", "rho": float(loss), "relation": relation}
    else:
        raise ValueError(f"output measure {measure}: only MaxDivergence and ZeroConcentratedDivergence are read.")
    conditions = ["the measurement was invoked once", "its stability map holds"]
    return make_claim(event, delta=delta, relation=relation, program="opendp", read_from=f"Measurement, {measure}",
                      conditions=conditions, stated=stated, **about)  # fmt: skip


def _relation(value: Any) -> str:
    """REPLACE_SPECIAL (a record is zeroed out) has the losses of add-remove."""
    return "replace-one" if str(getattr(value, "name", value)) == "REPLACE_ONE" else "add-remove"


def event_of_dp_accounting(event: Any, relation: str) -> Json:
    """An event of dp-accounting as one of the format; ``ValueError`` names what has no counterpart."""
    match type(event).__name__:
        case "GaussianDpEvent":
            return gaussian(event.noise_multiplier)
        case "LaplaceDpEvent":
            moved = 2.0 if relation == "replace-one" else 1.0
            return {"event": "pure", "epsilon": moved / float(event.noise_multiplier), "relation": relation}
        case "ZCDpEvent" if event.xi == 0.0:
            return {"event": "zcdp", "rho": float(event.rho), "relation": relation}
        case "SelfComposedDpEvent":
            return repeated(event_of_dp_accounting(event.event, relation), event.count)
        case "ComposedDpEvent":
            return composed([event_of_dp_accounting(each, relation) for each in event.events])
        case "PoissonSampledDpEvent":
            inner = event_of_dp_accounting(event.event, relation)
            return {"event": "poisson", "rate": float(event.sampling_probability), "inner": inner}
        case "SampledWithoutReplacementDpEvent":
            inner = event_of_dp_accounting(event.event, relation)
            sizes = {"n": int(event.source_dataset_size), "batch_size": int(event.sample_size)}
            return {"event": "fixed-size", **sizes, "inner": inner}
        case "RepeatAndSelectDpEvent":
            inner = event_of_dp_accounting(event.event, relation)
            return {"event": "repeat-and-select", "inner": inner, "mean": event.mean, "shape": event.shape}
    raise ValueError(f"{type(event).__name__}: has no counterpart among the format's events.")
