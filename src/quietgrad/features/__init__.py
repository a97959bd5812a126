"""Fixed features of images: public functions of one picture, so they cost no privacy.

>>> from quietgrad.features import Scattering
>>> Scattering(28).shape
(81, 7, 7)
"""

from quietgrad.features.scattering import Scattering

__all__ = ["Scattering"]
