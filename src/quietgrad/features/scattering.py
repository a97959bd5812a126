"""The scattering transform (Mallat 2012; for private learning Tramèr and Boneh 2021): wavelets, moduli, averages.

Two scales, eight angles: S0 = x⋆φ, S1 = |x⋆ψ_{j,k}|⋆φ and S2 = ||x⋆ψ_{0,k}|⋆ψ_{1,l}|⋆φ, 81 maps of a quarter of the
picture's size per channel. Nothing is learned, so a linear model on these features needs few parameters and its
noise little room. Every picture is transformed on its own: no privacy is spent, and none may be by normalising with
statistics of private pictures. :meth:`Scattering.normalized` divides by what is in the picture itself.

``Pictures`` turns tables of pixels into tables of these features. Every row of
features is a function of that row of pixels and of public constants, so nothing is spent and a record more or less
changes no other row. What was done is a few public words that are kept with the model.

Means and deviations come from two public photographs, so they are constants. These are the two pictures that come
with scikit-learn, a temple and a flower, cut 600 times into squares of 48 to 400 pixels and shrunk to 32. The
numbers are kept in ``photographs.json``, which ``tools/photographs.py`` makes again: a model means the same
everywhere.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError

if TYPE_CHECKING:
    import torch


Complex = npt.NDArray[np.complex128]

_PAD, _ANGLES, _SCALES = 4, 8, 2
_PERIODS = range(-2, 3)
_AT_ONCE = 32  # pictures whose temporaries stay in the cache


@dataclass(frozen=True)
class Scattering:
    """Scattering features of square pictures whose side is a multiple of 4.

    Args:
        size: pixels of a side.

    >>> import torch
    >>> features = Scattering(28)(torch.zeros(2, 28, 28))
    >>> tuple(features.shape), float(features.abs().max())
    ((2, 81, 7, 7), 0.0)
    """

    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or self.size < 8 or self.size % 4:
            raise ValueError(f"size={self.size!r}: must be a multiple of 4, at least 8.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Maps, rows and columns for one channel."""
        return 1 + _SCALES * _ANGLES + _ANGLES**2, self.size // 4, self.size // 4

    def __call__(self, pictures: torch.Tensor | npt.ArrayLike) -> torch.Tensor:
        """Features (…, 81, size/4, size/4) of pictures (…, size, size), in float32."""
        import torch

        given = torch.as_tensor(pictures, dtype=torch.float32)
        if given.shape[-2:] != (self.size, self.size):
            raise ValueError(f"pictures of shape {tuple(given.shape)}: must end in {self.size} × {self.size}.")
        flat = given.reshape(-1, self.size, self.size)
        features = torch.empty(len(flat), *self.shape)
        # Always as many at once: libraries choose their ways by the shape of a batch, and a picture's last bits
        # must not tell how many others there are.
        at_once = torch.zeros(_AT_ONCE, self.size, self.size)
        with torch.no_grad():
            for start in range(0, len(flat), _AT_ONCE):
                some = flat[start : start + _AT_ONCE]
                at_once[: len(some)] = some
                features[start : start + _AT_ONCE] = self._some(at_once)[: len(some)]
        return features.reshape(*given.shape[:-2], *self.shape)

    def normalized(self, pictures: torch.Tensor | npt.ArrayLike, groups: int = 27) -> torch.Tensor:
        """Features with mean 0 and variance 1 within each of ``groups`` groups of maps, picture by picture.

        Every row then has the same length, so that a clip of gradients acts on the residual only.

        >>> import torch
        >>> rows = Scattering(28).normalized(torch.rand(3, 28, 28))
        >>> bool(((rows**2).sum((1, 2, 3)).sqrt() / 3969**0.5 - 1).abs().max() < 1e-2)
        True
        """
        import torch

        features = self(pictures)
        maps, rows, columns = self.shape
        flat = features.reshape(-1, maps, rows, columns)
        return torch.nn.functional.group_norm(flat, groups, eps=1e-10).reshape(features.shape)

    # --- the transform ----------------------------------------------------------------------------------------

    def _some(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        fine, coarse, average, average_coarse = self._constants
        padded = torch.nn.functional.pad(x[:, None], (_PAD,) * 4, mode="reflect")[:, 0]
        spectrum = torch.fft.fft2(padded)
        low = [_averaged(padded[:, None], average)]
        first = torch.fft.ifft2(spectrum[:, None] * fine).abs()  # j = 0, full size
        wide = torch.fft.ifft2(_folded(spectrum[:, None] * coarse)).abs()  # j = 1, half size
        low += [_averaged(first, average), _averaged(wide, average_coarse)]
        again = torch.fft.fft2(first)
        for k in range(_ANGLES):
            second = torch.fft.ifft2(_folded(again[:, k, None] * coarse)).abs()
            low.append(_averaged(second, average_coarse))
        return torch.cat(low, 1)

    @cached_property
    def _constants(self) -> tuple[torch.Tensor, ...]:
        """Spectra of the wavelets of both scales, and the matrices that average and take every fourth pixel."""
        import torch

        n = self.size + 2 * _PAD
        spectra = [
            np.stack([np.fft.fft2(wavelet(n, scale, k)).real for k in range(_ANGLES)]) for scale in range(_SCALES)
        ]
        wavelets = [torch.tensor(each, dtype=torch.float32) for each in spectra]
        return (*wavelets, *(torch.tensor(_sampling(n, every), dtype=torch.float32) for every in (1, 2)))


def gabor(n: int, sigma: float, theta: float, xi: float, slant: float) -> Complex:
    """g(u) = s/(2πσ²)·exp(−(a² + s²b²)/2σ² + iξa), a and b turned by θ, summed over periods of n."""
    total = np.zeros((n, n), np.complex128)
    for p in _PERIODS:
        for q in _PERIODS:
            u, v = np.meshgrid(np.arange(n) + p * n, np.arange(n) + q * n, indexing="ij")
            a, b = u * math.cos(theta) + v * math.sin(theta), -u * math.sin(theta) + v * math.cos(theta)
            total += np.exp(-(a * a + (slant * b) ** 2) / (2.0 * sigma * sigma) + 1j * xi * a)
    return total * (slant / (2.0 * math.pi * sigma * sigma))


def wavelet(n: int, scale: int, angle: int) -> Complex:
    """A Morlet wavelet: a Gabor function without its mean.

    >>> bool(abs(wavelet(36, 1, 3).sum()) < 1e-12)
    True
    """
    sigma, theta, xi = 0.8 * 2**scale, (3 - angle) * math.pi / _ANGLES, 3.0 * math.pi / (4.0 * 2**scale)
    wave, hill = (gabor(n, sigma, theta, frequency, 0.5) for frequency in (xi, 0.0))
    return np.asarray(wave - (wave.sum() / hill.sum()) * hill)


def _folded(spectrum: torch.Tensor) -> torch.Tensor:
    """Return the spectrum of a picture's every second pixel: the mean of the four quadrants of its own."""
    half = spectrum.shape[-1] // 2
    rows = spectrum[..., :half, :] + spectrum[..., half:, :]
    return (rows[..., :half] + rows[..., half:]) / 4.0


def _sampling(n: int, every: int) -> npt.NDArray[np.float64]:
    """A Gaussian average of σ = 1.6 pixels at every fourth pixel, without the border: one side of A·U·Aᵀ."""
    size = n // every
    places = (np.arange(_PAD, n - _PAD, 4)[:, None] - every * np.arange(size)[None, :]).astype(np.float64)
    weights = sum(np.exp(-((places + p * n) ** 2) / (2.0 * 1.6**2)) for p in _PERIODS)
    return np.asarray(weights) * (every / (1.6 * math.sqrt(2.0 * math.pi)))


def _averaged(maps: torch.Tensor, sampling: torch.Tensor) -> torch.Tensor:
    return sampling @ maps @ sampling.T


Normalization = Literal["picture", "photographs"]
_PICTURES_AT_ONCE = 256


@dataclass(frozen=True)
class Pictures:
    """Square pictures in rows of pixels, and how their features are scaled.

    Rows hold channel after channel; features are scattering coefficients.

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

    def __post_init__(self) -> None:
        if self.channels not in (1, 3) or isinstance(self.channels, bool):
            raise ValueError(f"channels={self.channels!r}: must be 1 or 3.")
        if self.normalization not in get_args(Normalization):
            raise ValueError(f"normalization={self.normalization!r}: must be 'picture' or 'photographs'.")
        Scattering(self.size)  # refuses other sizes

    @classmethod
    def of(cls, pixels: int) -> Pictures:
        """The pictures that rows of so many pixels are: grey if that is a square, coloured if a third of it is.

        >>> Pictures.of(100)
        Traceback (most recent call last):
        quietgrad.core.errors.DataError: rows of 100 numbers are no square pictures ...
        """
        for channels in (1, 3):
            side = math.isqrt(pixels // channels)
            if channels * side * side == pixels and side % 4 == 0 and side >= 8:
                return cls(side, channels, "picture" if channels == 1 else "photographs")
        raise DataError(
            f"rows of {pixels} numbers are no square pictures with one or three channels and a side that is a "
            "multiple of 4, such as 784 = 28 × 28 or 3072 = 3 × 32 × 32. Pad them first."
        )

    @cached_property
    def scattering(self) -> Scattering:
        return Scattering(self.size)

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

    @property
    def note(self) -> str:
        """The note on these features in a privacy statement."""
        return "features are wavelet coefficients of single pictures, scaled by public constants"

    def to_json(self) -> dict[str, Any]:
        """Public words from which :meth:`from_json` makes the same."""
        return {"features": "scattering", **asdict(self)}

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

    def save(self, folder: object) -> None:
        """Write nothing: the words of :meth:`to_json` say it all."""

    def rows(self, X: Any) -> npt.NDArray[np.float32]:
        """Rows of features of a table of pixels, dense or sparse; float32."""
        if X.shape[1] != self.pixels:
            raise DataError(f"rows of {X.shape[1]} numbers, must be {self.pixels} pixels.")
        import torch

        out = np.empty((X.shape[0], self.width), np.float32)
        for start in range(0, len(out), _PICTURES_AT_ONCE):
            some = X[start : start + _PICTURES_AT_ONCE]
            dense = np.array(some if isinstance(some, np.ndarray) else some.toarray(), np.float32)
            pictures = torch.from_numpy(dense).reshape(-1, self.channels, self.size, self.size)
            out[start : start + _PICTURES_AT_ONCE] = self._scaled(pictures).reshape(len(dense), -1).numpy()
        return out

    def _scaled(self, pictures: torch.Tensor) -> torch.Tensor:
        if self.normalization == "picture":
            return self.scattering.normalized(pictures)
        mean, deviation = self._constants
        return (self.scattering(pictures) - mean) / deviation

    @cached_property
    def _constants(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        mean, deviation = (torch.tensor(c, dtype=torch.float32)[:, :, None, None] for c in constants(self.channels))
        return mean, deviation


Floats = npt.NDArray[np.float64]


def constants(channels: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each map, (channels, 81) each, of pixels in [0, 1]; grey is the mean colour.

    >>> mean, deviation = constants(3)
    >>> mean.shape, bool((deviation > 0.0).all())
    ((3, 81), True)
    """
    kept = json.loads((files("quietgrad.features") / "photographs.json").read_text())
    mean, deviation = (np.array(kept["grey" if channels == 1 else "colour"][part]) for part in ("mean", "std"))
    return mean, deviation
