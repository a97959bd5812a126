"""Public features: functions of one record and of public constants, so they cost no privacy.

Wavelet features of pictures, the outputs of a network whose weights are public, directions of public rows.

>>> from quietgrad.features import Frozen, Pictures, Scattering
>>> Scattering(28).shape
(81, 7, 7)
>>> Pictures.of(3072).channels
3
"""

from quietgrad.features.frozen import Frozen
from quietgrad.features.scattering import Pictures, Scattering
from quietgrad.features.whitened import Whitened

__all__ = ["Frozen", "Pictures", "Scattering", "Whitened"]
