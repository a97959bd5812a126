"""Fixed features of images: public functions of one picture, so they cost no privacy.

>>> from quietgrad.features import Pictures, Scattering
>>> Scattering(28).shape
(81, 7, 7)
>>> Pictures.of(3072).channels
3
"""

from quietgrad.features.scattering import Pictures, Scattering

__all__ = ["Pictures", "Scattering"]
