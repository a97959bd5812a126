# ruff: noqa: E501  (the texts of pages are as wide as other pages)
"""What networks cost on docs/benchmarks.md: models that users train, memory, and where a goal is missed.

Models are shown at batches of 64 once ``zoo_64.json`` has all of them, and at those of 32 (``zoo.json``) until then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Read = Callable[[str], Any]
Grid = Callable[[str, list[list[str]]], str]
LORA = ", LoRA"

# Whole steps ÷ plain SGD steps at B = 64; a DP-SRM step may be twice that less 0.3.
GOALS = {"transformers and ViTs": 1.35, "convolutional networks": 1.55, "recurrent networks": 1.9}
CONVOLUTIONAL, RECURRENT = ("ResNet", "MobileNet", "ConvNeXt"), ("LSTM", "GRU")
# The networks of torch_steps.json: DP-SGD, DP-SRM.
SMALL = {"mnist-cnn4": ("MNIST CNN", 1.1, 2.1), "cnn5": ("CNN5", 1.2, 2.1), "resnet20": ("ResNet-20", 1.3, 2.5)}
MEMORY = 3.0  # peak memory over a plain step's


class Measured(NamedTuple):
    """Models of one file: its name, the batch, and what was found."""

    name: str
    batch: int
    models: dict[str, Any]


def models(read: Read, lora: bool) -> Measured:
    """Whole models, or those with LoRA: of zoo_64.json if it has all that zoo.json has."""

    def of(name: str) -> Measured:
        found = {k: v for k, v in read(name)["models"].items() if k.endswith(LORA) == lora}
        return Measured(name, int(read(name)["batch"]), dict(sorted(found.items())))

    first, large = of("zoo"), of("zoo_64")
    return large if set(first.models) <= set(large.models) else first


def goal(model: str) -> float:
    """The goal of a model's DP-SGD step."""
    if any(part in model for part in CONVOLUTIONAL):
        return GOALS["convolutional networks"]
    return GOALS["recurrent networks" if any(part in model for part in RECURRENT) else "transformers and ViTs"]


def srm_goal(model: str) -> float:
    """The goal of its DP-SRM step."""
    return 2.0 * goal(model) - 0.3


def _peer(found: dict[str, Any]) -> str:
    if found["opacus"] is None:
        return "does not run it"
    by = found.get("opacus_by") or "hooks"
    return f"{found['opacus']:.2f}" + ("" if by == "hooks" else f" ({by})")


def zoo(read: Read, grid: Grid, file: Callable[[str], str]) -> str:
    """The section's goals and its two tables."""
    said = []
    for lora in (False, True):
        shown = models(read, lora)
        rows = [
            [name.removesuffix(LORA), f"{found['dp-sgd']:.2f}", _peer(found), f"{found['dp-srm']:.2f}"]
            for name, found in shown.models.items()
        ]
        what = "with LoRA adapters alone trained" if lora else "all parameters trained"
        said += [
            f"Batches of {shown.batch}, {what} ({file(shown.name)}):",
            grid("model | DP-SGD | Opacus | DP-SRM", rows),
        ]
    goals = ", ".join(f"{value:.2f} for {kind}" for kind, value in GOALS.items())
    above = (
        f"The goals for DP-SGD at batches of 64 are {goals}; those for DP-SRM are twice that less 0.3. [Rows above their "
        "goal](#where-quietgrad-loses) are listed below."
    )
    return "\n\n".join([above, *said])


def memory(read: Read, grid: Grid) -> str:
    """Peak memory of whole steps."""
    rows = []
    for name, found in read("memory_steps")["models"].items():
        kinds = ("dp-sgd", "dp-srm", "opacus", "opacus-ghost")
        cells = ["does not run it" if found[kind] is None else f"{found[kind]:.2f}" for kind in kinds]
        rows.append([SMALL[name][0] if name in SMALL else name, str(found["batch"]), f"{found['sgd_mb']}", *cells])
    return grid("model | batch | plain SGD, MB | DP-SGD ÷ plain | DP-SRM ÷ plain | Opacus' hooks | ghost", rows)


def _listed(rows: list[str]) -> str:
    return ", ".join(rows) if rows else "none"


def losses(read: Read, file: Callable[[str], str]) -> Iterator[str]:
    """Sentences: every row above its goal, and every row in which Opacus is cheaper."""
    whole, lora, small = models(read, False), models(read, True), read("torch_steps")["models"]
    for method, wanted in (("dp-sgd", goal), ("dp-srm", srm_goal)):
        for shown in (whole, lora):
            above = [
                f"{name} {found[method]:.2f} ({wanted(name):.2f})"
                for name, found in shown.models.items()
                if found[method] > wanted(name)
            ]
            yield (
                f"{'DP-SGD' if method == 'dp-sgd' else 'DP-SRM'} steps above the goal, in brackets, at batches of {shown.batch}"
                f"{', LoRA' if shown is lora else ''}: {_listed([each.replace(LORA, '') for each in above])} ({file(shown.name)})."
            )
    slow = []
    for place, method in ((1, "dp-sgd"), (2, "dp-srm")):
        for name, words in SMALL.items():
            ratio, most = small[name]["ratio_to_sgd"][method], float(words[place])
            if round(ratio, 2) > most:
                slow.append(f"{words[0]} at B = {small[name]['batch']} {method.upper()} {ratio:.2f} ({most:.1f})")
    yield f"Small networks above their goal: {_listed(slow)} ({file('torch_steps')})."
    cheaper = [
        f"{name} {found['opacus']:.2f} (here {found['dp-sgd']:.2f})"
        for shown in (whole, lora)
        for name, found in shown.models.items()
        if found["opacus"] is not None and found["opacus"] < found["dp-sgd"]
    ]
    sizes = " and ".join(sorted({f"{shown.batch}" for shown in (whole, lora)}))
    yield (
        f"Opacus' step is the cheaper one at batches of {sizes}, with noise of torch.randn: {_listed(cheaper)} ({', '.join(sorted({file(whole.name), file(lora.name)}))})."
    )
    held = read("memory_steps")["models"]
    much, more = [], []
    for name, found in held.items():
        words = str(SMALL[name][0]) if name in SMALL else name
        peers = [found[kind] for kind in ("opacus", "opacus-ghost") if found[kind] is not None]
        if found["dp-sgd"] > MEMORY:
            much.append(f"{words} {found['dp-sgd']:.2f}")
        if peers and min(peers) < found["dp-sgd"]:
            more.append(f"{words} {min(peers):.2f} (here {found['dp-sgd']:.2f})")
    yield (
        f"Peak memory of DP-SGD above {MEMORY:g} plain steps': {_listed(much)}; where Opacus needs less: {_listed(more)} "
        f"({file('memory_steps')})."
    )


def replay(read: Read) -> str:
    """What a recorded program could save at most, in per cent of a plain step, of the models of vmap_cost.json."""
    shares = sorted(
        (100.0 * sum(parts[f"vmapped {part}"] - parts[f"plain {part}"] for part in ("forward", "backward")), name)
        for name, parts in read("vmap_cost")["models"].items()
    )
    low, high = (f"{max(share, 0.0):.0f} % ({name})" for share, name in (shares[0], shares[-1]))
    return f"the median of {len(shares)} models is {shares[len(shares) // 2][0]:.0f} %, from {low} to {high}"


def steps_sentence(read: Read) -> str:
    """The sentence of docs/coming-from.md about whole steps."""
    small = read("torch_steps")["models"]

    def span(method: str) -> str:
        ratios = sorted(small[name]["ratio_to_sgd"][method] for name in SMALL)
        return f"{ratios[0]:.2f}–{ratios[-1]:.2f}"

    sizes = sorted({small[name]["batch"] for name in SMALL})
    return (
        f"a whole DP-SGD step is {span('dp-sgd')} plain SGD steps where that of Opacus' hooks is {span('opacus')}, in batches of "
        f"{sizes[0]} to {sizes[-1]} (`benchmarks/results/torch_steps.json`)"
    )


def with_sentence(text: str, pattern: str, sentence: str) -> str:
    """A page with one sentence made anew; raises ``ValueError`` if it is not there once."""
    made, count = re.subn(pattern, lambda _: sentence, text)
    if count != 1:
        raise ValueError(f"{count} sentences fit {pattern!r}; one must.")
    return made


STEPS_PATTERN = r"a whole DP-SGD step is [^|]*?\(`benchmarks/results/torch_steps\.json`\)"
REPLAY_PATTERN = r"the median of \d+ models\s+is[^;]*?(?= \(`benchmarks/results/vmap_cost\.json`\))"
