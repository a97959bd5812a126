"""Tables of pixels as tables of scattering features: what ``quietgrad train --features scattering`` does to them.

Every row of features is a function of that row of pixels and of public constants, so nothing is spent and a record
more or less changes no other row. What was done is a few public words that are kept with the model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.features.scattering import Scattering

if TYPE_CHECKING:
    import torch

Normalization = Literal["picture", "photographs"]
_AT_ONCE = 256


@dataclass(frozen=True)
class Pictures:
    """Square pictures in rows of pixels, channel after channel, and how their scattering features are scaled.

    Args:
        size: pixels of a side, a multiple of 4.
        channels: 1 for grey, 3 for red, green, blue.
        normalization: ``"picture"`` scales by what is in the picture itself (see :meth:`Scattering.normalized`);
            ``"photographs"`` takes means and deviations of two public photographs, map by map.

    >>> Pictures.of(784)
    Pictures(size=28, channels=1, normalization='picture')
    >>> Pictures.of(3072).width
    15552
    """

    size: int
    channels: int = 1
    normalization: Normalization = "picture"
    scattering: Scattering = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.channels not in (1, 3) or isinstance(self.channels, bool):
            raise ValueError(f"channels={self.channels!r}: must be 1 or 3.")
        if self.normalization not in get_args(Normalization):
            raise ValueError(f"normalization={self.normalization!r}: must be 'picture' or 'photographs'.")
        object.__setattr__(self, "scattering", Scattering(self.size))

    @classmethod
    def of(cls, pixels: int) -> Pictures:
        """The pictures that rows of so many pixels are: grey if that is a square, coloured if a third of it is.

        >>> Pictures.of(100)
        Traceback (most recent call last):
        quietgrad.errors.DataError: rows of 100 numbers are no square pictures ...
        """
        for channels in (1, 3):
            side = math.isqrt(pixels // channels)
            if channels * side * side == pixels and side % 4 == 0 and side >= 8:
                return cls(side, channels, "picture" if channels == 1 else "photographs")
        raise DataError(
            f"rows of {pixels} numbers are no square pictures with one or three channels and a side that is a "
            "multiple of 4, such as 784 = 28 × 28 or 3072 = 3 × 32 × 32. Pad them first."
        )

    @property
    def pixels(self) -> int:
        """Numbers in a row of pixels."""
        return self.channels * self.size**2

    @property
    def width(self) -> int:
        """Numbers in a row of features."""
        return self.channels * math.prod(self.scattering.shape)

    @property
    def row_bound(self) -> float | None:
        """A bound on the norm of a row of features, if there is one.

        Within a group of N features Σ(x − m)²/(v + e) ≤ N, so the whole row is no longer than √width; rounding in
        float32 adds less than a thousandth.
        """
        return 1.001 * math.sqrt(self.width) if self.normalization == "picture" else None

    def to_json(self) -> dict[str, Any]:
        """Public words from which :meth:`from_json` makes the same."""
        given = {key: value for key, value in asdict(self).items() if key != "scattering"}
        return {"features": "scattering", **given}

    @classmethod
    def from_json(cls, words: Any) -> Pictures:
        """Read :meth:`to_json`; DataError if it is something else.

        >>> Pictures.from_json(Pictures(8).to_json())
        Pictures(size=8, channels=1, normalization='picture')
        """
        try:
            kind, size, channels = words["features"], words["size"], words["channels"]
            if kind == "scattering" and type(size) is type(channels) is int and size <= 4096:
                return cls(size, channels, words["normalization"])
        except (KeyError, TypeError, ValueError):
            pass
        raise DataError("the model's features are not described as this version knows them.")

    def rows(self, X: Any) -> npt.NDArray[np.float32]:
        """Rows of features of a table of pixels, dense or sparse; float32."""
        if X.shape[1] != self.pixels:
            raise DataError(f"rows of {X.shape[1]} numbers, must be {self.pixels} pixels.")
        import torch

        out = np.empty((X.shape[0], self.width), np.float32)
        for start in range(0, len(out), _AT_ONCE):
            some = X[start : start + _AT_ONCE]
            dense = np.array(some if isinstance(some, np.ndarray) else some.toarray(), np.float32)
            pictures = torch.from_numpy(dense).reshape(-1, self.channels, self.size, self.size)
            out[start : start + _AT_ONCE] = self._scaled(pictures).reshape(len(dense), -1).numpy()
        return out

    def _scaled(self, pictures: torch.Tensor) -> torch.Tensor:
        if self.normalization == "picture":
            return self.scattering.normalized(pictures)
        mean, deviation = self._constants
        return (self.scattering(pictures) - mean) / deviation

    @cached_property
    def _constants(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        from quietgrad.features.photographs import constants

        mean, deviation = (torch.tensor(c, dtype=torch.float32)[:, :, None, None] for c in constants(self.channels))
        return mean, deviation
