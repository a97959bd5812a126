"""Numbers of the scattering transform from kymatio, for a picture that is a formula: what ours is tested against.

pip install kymatio==0.3.0          # in an environment of its own; wants scipy.special.sph_harm, see below
python benchmarks/scattering_reference.py > tests/features/scattering_reference.json
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = 12


def picture(size: int) -> npt.NDArray[Any]:
    """A disc with waves on it, to six digits."""
    row, column = np.mgrid[0:size, 0:size] / size
    waves = 0.5 + 0.5 * np.sin(9.0 * row + 4.0 * column**2) * np.cos(7.0 * row * column - 2.0)
    return np.asarray(np.round(waves * ((row - 0.5) ** 2 + (column - 0.45) ** 2 < 0.16), 6))


def main() -> None:
    """Print the picture's features, map by map."""
    import scipy.special

    vars(scipy.special)["sph_harm"] = None  # gone from scipy; kymatio imports it for three dimensions only
    from kymatio.numpy import Scattering2D  # type: ignore[import-not-found]

    features = Scattering2D(J=2, shape=(SIZE, SIZE), L=8)(picture(SIZE))
    record = {"command": "python benchmarks/scattering_reference.py", "kymatio": version("kymatio"), "size": SIZE}
    maps = [[round(float(value), 6) for value in each.ravel()] for each in features]
    print(json.dumps(record)[:-1] + ', "maps": [')
    print(",\n".join(json.dumps(each) for each in maps) + "]}")


if __name__ == "__main__":
    main()
