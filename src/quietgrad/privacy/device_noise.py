"""Noise added where the sum is: on an accelerator, on the same grid, if the device does the arithmetic as it must.

A device that does not give the CPU's numbers on a public trial is not used, see :func:`usable`; its sums go through
the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from quietgrad.privacy.device_stream import DeviceStream

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_gaussian", "usable"]

_CLAMP = 2.0**52  # as in privacy.noise


def add_gaussian(total: Tensor, unit: Tensor, sigma: float, step: float) -> None:
    """Replace ``total`` by (rint(total/step) + rint(unit·σ/step))·step: :func:`noise.release_gaussian` on a device.

    >>> import torch
    >>> total = torch.tensor([0.3, -1.0], dtype=torch.float64)
    >>> add_gaussian(total, torch.tensor([0.5, 0.1], dtype=torch.float64), 1.0, 2.0**-20)
    >>> bool((total * 2**20 % 1 == 0.0).all())
    True
    """
    if sigma == 0.0:
        total.zero_()
        return
    # Division by a power of two is exact, and so is what follows: all are whole numbers below 2⁵³.
    total.mul_(1.0 / step).round_().clamp_(-_CLAMP, _CLAMP)
    total.add_((unit * (sigma / step)).round_()).mul_(step)


@cache
def usable(where: Any) -> bool:
    """Whether a device gives the CPU's numbers on a public trial: the cipher exactly, Φ⁻¹ within 10⁻¹⁵(|x| + ⅕).

    >>> import torch
    >>> usable(torch.device("cpu"))
    True
    """
    import torch

    try:
        here, there = (DeviceStream(bytes(32), "trial", place) for place in (torch.device("cpu"), where))
        if not torch.equal(here.words(0, 1 << 16), there.words(0, 1 << 16).cpu()):
            return False
        # From the far tail to the middle, on both sides of where Φ⁻¹ changes its formula (e⁻², e⁻³²).
        p = torch.cat([
            torch.logspace(-38, -0.3011, 60_000, dtype=torch.float64),
            torch.linspace(0.1, 0.5, 60_000, dtype=torch.float64),
        ])  # fmt: skip
        wanted, found = torch.special.ndtri(p), torch.special.ndtri(p.to(where)).cpu()
        close = bool(((wanted - found).abs() <= 1e-15 * (wanted.abs() + 0.2)).all())
        total, unit = 1e3 * wanted, wanted.flip(0)
        moved = total.to(where)
        add_gaussian(total, unit, 1.37, 2.0**-20)
        add_gaussian(moved, unit.to(where), 1.37, 2.0**-20)
        return close and torch.equal(total, moved.cpu())
    except (RuntimeError, TypeError, NotImplementedError):  # no float64 there, or no whole numbers of 64 bits
        return False
