"""The compiled kernel that draws many uniformly random subsets: partial Fisher–Yates without the array."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

_ROOM = (
    8  # places in the table per displaced record: few collisions, and for batches of 100 still first-level cache
)


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def draw_subsets(
    words: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], n: int, out: npt.NDArray[np.int64]
) -> Any:
    """Write batch j, a uniformly random subset of 0…n−1 in random order, to ``out[starts[j]:starts[j + 1]]``.

    The first b steps of a Fisher–Yates shuffle of 0…n−1: step i swaps position i with a random r ≥ i. Only
    what the swaps displaced is stored: positions below b in the output itself, those above in a small table.
    An entry carries its batch's number, so the next batch finds an empty table, the swaps being undone by
    being forgotten: batch j depends on its own words and on nothing before it, in O(b) time and memory.

    Step i needs r − i uniform on m = n − i values and takes ⌊w·m / 2⁶⁴⌋ of a uniform 64-bit word w. The w
    with a given result r are the integers in [r·2⁶⁴/m, (r+1)·2⁶⁴/m): ⌊2⁶⁴/m⌋ or ⌈2⁶⁴/m⌉ many, so P(r)·m is
    within 1 ± m·2⁻⁶⁴, and within 1 ± 2⁻⁴⁰ for n ≤ 2²⁴. A batch's probability is off by a factor of at most
    (1 + n·2⁻⁶⁴)^b: for 100 of 10⁶ by 6·10⁻¹². With w = 2³²h + l, ⌊(w·m)/2⁶⁴⌋ = ⌊(h·m + ⌊l·m/2³²⌋)/2³²⌋,
    which fits in 64 bits because m < 2³².
    """
    # Unsigned everywhere: a signed index would be tested for being negative at every access.
    low, half, one = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(1)
    most = 0
    for j in range(starts.size - 1):
        most = max(most, starts[j + 1] - starts[j])
    room = 1
    while room < _ROOM * most:
        room *= 2
    mask = np.uint64(room - 1)
    keys = np.zeros(room, np.uint64)
    held = np.empty(room, np.int64)
    for j in range(starts.size - 1):
        first = np.uint64(starts[j])
        count = np.uint64(starts[j + 1] - starts[j])
        batch = np.uint64(j + 1) << half  # keys of earlier batches are smaller
        head = out[first : first + count]
        for i in range(count):
            head[i] = i
        for i in range(count):
            word = words[first + i]
            m = np.uint64(n) - i
            r = i + (((word >> half) * m + (((word & low) * m) >> half)) >> half)
            displaced = head[i]
            if r < count:
                head[i] = head[r]
                head[r] = displaced
            else:
                place = r & mask
                key = keys[place]
                while key >= batch and key != batch | r:
                    place = (place + one) & mask
                    key = keys[place]
                head[i] = held[place] if key == batch | r else np.int64(r)
                keys[place] = batch | r
                held[place] = displaced
