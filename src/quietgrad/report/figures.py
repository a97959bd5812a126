"""Plots for files, drawn by matplotlib, which is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quietgrad.errors import QuietgradError


def save_epsilon_plot(path: Path, curve: Sequence[tuple[int, float]], *, delta: float, relation: str) -> None:
    """Draw ε over the number of releases to ``path``, whose suffix says the format."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure  # no pyplot: no window system, no global state
    except ImportError:
        raise QuietgradError("plots need matplotlib; install it with `pip install 'quietgrad[report]'`.") from None
    steps, values = zip(*curve, strict=True)
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(steps, values, color="#1f5c99", linewidth=2)
        axes.fill_between(steps, values, color="#1f5c99", alpha=0.08, linewidth=0)
        axes.set_title(f"ε = {values[-1]:.4g} after {steps[-1]} releases", loc="left", fontsize=12)
        axes.set(xlabel="releases", ylabel=f"ε at δ = {delta:g} ({relation})", ylim=(0, None))
        axes.margins(x=0.01)
        axes.grid(axis="y", color="#d9d9d9", linewidth=0.6)
        try:
            figure.savefig(path, dpi=160)
        except ValueError as error:  # an unknown suffix
            raise QuietgradError(f"{path}: {error}") from None
