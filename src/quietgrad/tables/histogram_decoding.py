"""Reading noisy histograms: which bins hold records, and the interval they span. No data here, only releases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.tables.range_queries import HIGHEST, LOWEST, PIECES
from quietgrad.tables.table import Floats

_FALSE_ALARM = 1e-3  # chance that noise alone opens a window anywhere in one release
_TARGET_ALARM = 1e-5  # the same for targets: a false range there is a useless model
_GROW = 2.5  # deviations at which the neighbour of an occupied bin counts as occupied
# Of a feature's non-zero values, so many may lie beyond its limit: a few far ones must not set the scale.
_TAIL, _LEAST_TAIL = 0.05, 0.005
_POOLED_TAIL = 0.1  # of all values, if all features share a limit: a few large features must not drown the rest
_BEYOND = 2  # octaves that a limit for all stored values goes on with them: few are large, and those tell
_CAUGHT = 0.9  # of the records a narrower interval must hold, as far as the noise lets one see
_COARSE, _FINER = 8, 0.5  # bins among which a feature is seen whole; more of them must halve what those show
_EVERYWHERE = 0.85  # of the records must have a value other than zero where a range leaves zero out
_LESSER = 0.25  # of the counts of the other sign below which a sign may count as absent
_ONE_SIDED = 1.5  # deviations within which a sign counts as absent
_EMPTY = 0.02  # of the targets may lie in an end of their interval that is left out
_THICK = 0.6  # of the fullest octave the last one holds where a column has no tail
_THIN = 3  # octaves of a tail that may stand out together where none does alone
_UNSEEN = 0.03  # of the records may hide in a bin that looks empty before the interval is widened


@dataclass(frozen=True)
class Windows:
    """First and last occupied bin of each row of counts; ``found`` is false where noise hides everything."""

    found: npt.NDArray[np.bool_]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]

    def inside(self, bins: int) -> npt.NDArray[np.bool_]:
        """Which of the bins lie in each window."""
        places = np.arange(bins)
        return np.asarray((places >= self.first[:, None]) & (places <= self.last[:, None]))


def windows(counts: Floats, sigma: float, alarm: float = _FALSE_ALARM) -> Windows:
    """Find the occupied bins of histograms (one per row) with noise of deviation ``sigma`` on every count.

    A window opens where 1, 2 or 4 neighbouring bins stand out so far that noise alone would anywhere in the release
    with probability at most ``alarm``. It takes in every other bin that stands out alone, and grows over neighbours
    above 2.5 deviations.
    """
    from scipy.special import ndtri

    rows, bins = counts.shape
    sigma = max(sigma, 1e-9)
    level = float(-ndtri(alarm / (3.0 * rows * bins)))
    kept = counts > level * sigma
    padded = np.concatenate([np.zeros((rows, 1)), np.cumsum(counts, axis=1)], axis=1)
    for width in (2, 4):
        if width > bins:
            continue
        sums = padded[:, width:] - padded[:, :-width]
        best = sums.argmax(axis=1)
        # Only where no narrower window opened: a wide one would take in its empty neighbours.
        opens = (sums[np.arange(rows), best] > level * sigma * math.sqrt(width)) & ~kept.any(axis=1)
        for shift in range(width):
            kept[np.flatnonzero(opens), best[opens] + shift] = True
    near = counts > _GROW * sigma
    for _ in range(bins):
        grown = kept.copy()
        grown[:, 1:] |= kept[:, :-1] & near[:, 1:]
        grown[:, :-1] |= kept[:, 1:] & near[:, :-1]
        if (grown == kept).all():
            break
        kept = grown
    found = np.asarray(kept.any(axis=1))
    return Windows(found, kept.argmax(axis=1), bins - 1 - kept[:, ::-1].argmax(axis=1))


@dataclass(frozen=True)
class MagnitudeEstimate:
    """Limits of each feature, read from a histogram of magnitudes.

    ``reach`` is an upper limit of |x|; ``seen`` whether it is the feature's own or one for all; ``offsets`` are
    features of one sign that keep within three octaves, with the interval [low, high] to refine.
    """

    reach: Floats
    seen: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    low: Floats
    high: Floats


def read_magnitudes(
    counts: Floats,
    sigma: float,
    *,
    n: float | None = None,
    whole: bool = False,
    sparse: bool = False,
    tight: bool = False,
) -> MagnitudeEstimate:
    """Upper limits from counts (features, sign, octave) of about ``n`` rows, with noise ``sigma``.

    A feature in whose histogram nothing stands out takes the limit of a usual feature. One octave is added when a
    tail of 3 % of the records could hide in the noise: cutting it costs more than a looser limit; with ``tight``
    not where the feature itself is hidden. With ``whole`` no value that was seen may lie beyond its limit. One
    limit for all values of ``sparse`` rows goes on with the values for two octaves: most words come once in a text,
    and those that come more often tell the most.
    """
    both, noise = counts.sum(axis=1), sigma * math.sqrt(2.0)
    mine = windows(both, noise)
    everybody = both.sum(axis=0, keepdims=True)
    shared = windows(everybody, noise * math.sqrt(len(both)))
    mass = np.array([row[a : b + 1].sum() for row, a, b in zip(both, mine.first, mine.last, strict=True)])
    mass = np.where(mine.found, mass, 0.0)
    most = float(mass.max(initial=0.0)) or float(np.abs(everybody).sum())
    tail = _POOLED_TAIL
    if whole:
        tail = 0.0
    elif len(both) > 1:  # the less, the smaller the noise is beside the records
        seen = 6.0 * (noise / most)
        tail = min(max(seen, min(_LEAST_TAIL, 10.0 * seen)), _TAIL)
    # A usual limit is the median of those found, else that of all features together.
    if mine.found.any():
        usual = int(np.median(_top(both, mine, tail)[mine.found]))
    else:
        usual = int(_top(everybody, shared, tail)[0]) if shared.found[0] else int(everybody.argmax())
    # A feature that does not stand out takes the top of its best four octaves if those are 3.5 deviations up. A
    # limit that is too small is the lesser evil: values beyond it are moved to it and keep their sign. One that is
    # too large makes the feature vanish.
    sums = np.lib.stride_tricks.sliding_window_view(both, 4, axis=1).sum(axis=2)
    likely = np.where(sums.max(axis=1) > 3.5 * 2.0 * noise, sums.argmax(axis=1) + 3, usual)
    top = np.where(mine.found, _top(both, mine, tail), likely)
    if sparse and len(both) == 1:
        for _ in range(_BEYOND):  # while the next octave is seen to hold values
            following = np.minimum(top + 1, both.shape[1] - 1)
            top = np.where(both[0, following] > _GROW * noise, following, top)
    pad = 1 if whole or 2.5 * noise > _UNSEEN * most else 0
    added = np.where(mine.found | (not tight), pad, int(whole))
    narrow = mine.found & (mine.last - mine.first < 3)
    if n is None:
        narrow &= mass >= 0.6 * most
    else:  # a row's k non-zero entries count 1/√k each: the mean √k is what all features hold, by n
        held = mass + 2.0 * noise * np.sqrt(mine.last - mine.first + 1.0)
        narrow &= held * max(float(everybody.sum()), most) >= _EVERYWHERE * n * n
    by_sign = np.where(mine.inside(counts.shape[2])[:, None], counts, 0.0).sum(axis=2).T  # (sign, feature)
    # As far as the noise lets one see: the empty side of a window of k octaves has a deviation of √k times σ.
    spread = _ONE_SIDED * sigma * np.sqrt(mine.last - mine.first + 1.0)
    lesser = by_sign.min(axis=0)
    one_sided = lesser < np.maximum(0.05 * np.abs(by_sign).sum(axis=0), spread)
    offsets = np.flatnonzero(narrow & one_sided)
    sign = np.where(by_sign[0] >= by_sign[1], 1.0, -1.0)[offsets]
    near, far = np.exp2(mine.first[offsets] + LOWEST - 1.0), np.exp2(mine.last[offsets] + LOWEST + float(pad))
    low, high = np.where(sign > 0, near, -far), np.where(sign > 0, far, -near)
    return MagnitudeEstimate(
        np.exp2(np.minimum(top + LOWEST + added, HIGHEST + 1.0)), mine.found, offsets, low, high
    )


@dataclass(frozen=True)
class WholeRanges:
    """The range [low, high] of each row of counts, and whether anything stands out of the noise in it."""

    low: Floats
    high: Floats
    seen: npt.NDArray[np.bool_]


def read_whole(counts: Floats, sigma: float) -> WholeRanges:
    """Ranges that hold all that is seen, from counts (features, sign, octave) with noise ``sigma``.

    A range reaches 0 on its near side: zeros and small values are in no octave that stands out. It has an octave
    more than what is seen, another where the last ones thin out, and further ones while the next three together
    hold values. A sign is left out if its counts keep within the noise and far below those of the other.

    >>> counts = np.zeros((1, 2, HIGHEST - LOWEST + 1))
    >>> counts[0, 0, 3 - LOWEST] = 1000.0  # values in (4, 8]
    >>> ranges = read_whole(counts, 10.0)
    >>> ranges.low.tolist(), ranges.high.tolist(), ranges.seen.tolist()
    ([0.0], [16.0], [True])
    """
    both, noise = counts.sum(axis=1), sigma * math.sqrt(2.0)
    mine = windows(both, noise, _FALSE_ALARM * len(both))  # for each column: what is hidden is not described
    padded = np.concatenate([both, np.zeros((len(both), _THIN + 1))], axis=1)
    edge = both[np.arange(len(both)), mine.last]
    tailed = (edge < _THICK * both.max(axis=1)) & (mine.last >= both.argmax(axis=1) + 2)
    last = mine.last + 1 + tailed
    for _ in range(_THIN):
        after = np.arange(1, _THIN + 1) + np.minimum(last, both.shape[1] - 1)[:, None]
        tail = np.take_along_axis(padded, after, axis=1).sum(axis=1)
        last = np.where(tail > _GROW * noise * math.sqrt(_THIN), last + 1, last)
    far = np.exp2(np.minimum(last + LOWEST, HIGHEST + 1.0))
    by_sign = np.where(mine.inside(counts.shape[2])[:, None], counts, 0.0).sum(axis=2)
    limit = _ONE_SIDED * sigma * np.sqrt(mine.last - mine.first + 1.0)
    lesser = by_sign.argmin(axis=1)
    # Within the noise, and far below the other sign's: of a column around 0 noise alone may hide a half.
    absent = by_sign.min(axis=1) < np.minimum(limit, _LESSER * by_sign.max(axis=1))
    high = np.where(absent & (lesser == 0), 0.0, far)
    low = np.where(absent & (lesser == 1), 0.0, -far)
    return WholeRanges(np.where(mine.found, low, -1.0), np.where(mine.found, high, 1.0), mine.found)


def middle_octave(counts: Floats) -> float:
    """The median octave of pooled counts (1, sign, octave), negative counts taken as none."""
    both = np.maximum(counts.sum(axis=(0, 1)), 0.0)
    return float(np.searchsorted(np.cumsum(both), 0.5 * both.sum()) + LOWEST)


def read_octaves(means: Floats, sigma: float, centre: float) -> Floats:
    """Upper limits from noisy mean octaves above ``centre``, shrunk towards it as far as they are noise."""
    signal = max(0.0, 1.0 - len(means) * sigma * sigma / max(float(means @ means), 1e-300))
    # The largest value is one or two octaves above the mean octave; an error in it is worse below than above.
    above = centre + signal * means + 1.0 + min(signal * sigma, 2.0)
    return np.exp2(np.clip(above, LOWEST, HIGHEST + 1.0))


def _top(counts: Floats, window: Windows, tail: float) -> npt.NDArray[np.int64]:
    """The octave up to which all but a small part of the counts in the window lie."""
    inside = window.inside(counts.shape[1])
    sums = np.cumsum(np.where(inside, np.maximum(counts, 0.0), 0.0), axis=1)
    return np.asarray((sums < (1.0 - tail) * sums[:, -1:]).sum(axis=1))


def read_pieces(
    counts: Floats, sigma: float, low: Floats, high: Floats, *, whole: bool = False
) -> tuple[Floats, Floats]:
    """Narrower intervals from counts in equal bins of [low, high]; the whole one where records would be cut off.

    With ``whole`` what lies beyond a narrower one must not add up to more than the deviation of its noise, and
    the end towards which values thin out from 0 stays.
    """
    total = counts.sum(axis=1)
    new_low, new_high = low.copy(), high.copy()
    down, up = _tails(counts, sigma, low, high) if whole else (np.zeros(len(counts), dtype=bool),) * 2
    for merged in (8, 4, 2, 1):  # the finest bins whose window misses little
        pieces = counts.shape[1] // merged
        noise = sigma * math.sqrt(merged)
        coarse = counts.reshape(len(counts), pieces, merged).sum(axis=2)
        inner = windows(coarse, noise)
        inside = inner.inside(pieces)
        caught = np.where(inside, coarse, 0.0).sum(axis=1) + 1.5 * noise * np.sqrt(inside.sum(axis=1))
        use = inner.found & (caught >= _CAUGHT * total)
        pad = np.where(2.5 * noise > _UNSEEN * total, 1, 0)
        if whole:  # what hides in the noise of one fine bin may reach on over several
            pad = np.where(pad > 0, max(1, pieces // _COARSE), 1)
        width = (high - low) / pieces
        nearer = low + np.maximum(inner.first - pad, 0) * width
        closer = low + np.minimum(inner.last + pad + 1, pieces) * width
        # What is spread over many bins leaves only its core above the noise of each: those must narrow it a lot.
        if whole:
            wider = np.arange(pieces)
            beyond = (wider < (inner.first - pad)[:, None]) | (wider > (inner.last + pad)[:, None])
            use &= np.where(beyond, coarse, 0.0).sum(axis=1) <= noise * np.sqrt(beyond.sum(axis=1))
        use &= (pieces <= _COARSE) | (closer - nearer <= _FINER * (new_high - new_low))
        new_low, new_high = np.where(use, nearer, new_low), np.where(use, closer, new_high)
    return np.where(down, low, new_low), np.where(up, high, new_high)


def _tails(
    counts: Floats, sigma: float, low: Floats, high: Floats
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether values thin out from 0 downwards, and whether they do upwards: noise hides where they stop."""
    inner, rows, bins = windows(counts, sigma), np.arange(len(counts)), counts.shape[1]
    width = (high - low) / bins
    begins, ends = low + inner.first * width, low + (inner.last + 1) * width
    thick = _THICK * counts.max(axis=1)
    alone = inner.first == inner.last
    down = inner.found & (ends >= 0.0) & (ends <= width) & (alone | (counts[rows, inner.first] < thick))
    up = inner.found & (begins <= 0.0) & (begins >= -width) & (alone | (counts[rows, inner.last] < thick))
    return np.asarray(down), np.asarray(up)


def read_ends(counts: Floats, sigma: float, low: float, high: float, mass: float) -> tuple[float, float]:
    """[low, high] without its empty ends, from counts of ``mass`` values in equal bins of it.

    A few targets beyond the interval cost more than an interval that is too wide: an end goes only while it seems
    to hold at most two in a hundred, and fewer where the noise is small; by eighths, or bin by bin where the noise
    is far less than that.
    """
    most = min(_EMPTY, 12.0 * sigma / mass) * mass
    step = 1 if 3.0 * sigma * math.sqrt(PIECES) < _EMPTY * mass else PIECES // 8

    def empty(line: Floats) -> int:
        gone = 0
        for size in range(step, PIECES, step):
            if line[:size].sum() > most:
                break
            gone = size
        return gone

    below, above = empty(counts), empty(counts[::-1])
    if below + above >= PIECES:  # noise alone
        return low, high
    width = (high - low) / PIECES
    return low + below * width, high - above * width


def read_norms(counts: Floats, sigma: float, edges: Floats, share: float = 0.99) -> float:
    """The length that a share of rows does not exceed, from counts below ``edges``; the last if none stands out."""
    window = windows(counts[None], sigma)
    if not window.found[0]:
        return float(edges[-1])
    inside = np.maximum(counts[window.first[0] : window.last[0] + 1], 0.0)
    reached = int(np.searchsorted(np.cumsum(inside), share * inside.sum())) + int(window.first[0])
    return float(edges[min(reached, len(edges) - 1)])


@dataclass(frozen=True)
class Counts:
    """Limit, mean and spread of targets that are counts, read from a histogram of magnitudes.

    ``most`` is a limit of them, ``mean`` about their mean, and 99.5 % differ from it by at most ``spread`` means.
    """

    most: float
    mean: float
    spread: float


def read_counts(counts: Floats, sigma: float) -> Counts | None:
    """Limit, mean and spread of counts, from their magnitudes; ``None`` if nothing stands out of the noise."""
    octaves = HIGHEST - LOWEST + 1
    line = np.concatenate([[counts[-1] + counts[octaves:-1].clip(min=0.0).sum()], counts[:octaves]])
    found = windows(line[None, :], sigma, _TARGET_ALARM)
    if not found.found[0]:
        return None
    last = int(found.last[0])
    tops = np.exp2(np.arange(octaves) + LOWEST)
    middles = np.where(tops <= 1.0, tops, 0.5 * (0.5 * tops + 1.0 + tops))  # of the whole numbers in an octave
    values = np.concatenate([[0.0], middles])
    mass = np.where((np.arange(len(line)) <= last) & (line > _GROW * sigma), line, 0.0)
    mean = max(float(values @ mass / mass.sum()), sigma / float(mass.sum()), 1e-9)
    away = np.abs(values / mean - 1.0)
    order = np.argsort(away)
    within = int(np.searchsorted(np.cumsum(mass[order]), 0.995 * mass.sum()))
    pad = 2.0 if 2.5 * sigma > _UNSEEN * float(mass.sum()) else 1.0
    most = pad * (float(tops[last - 1]) if last else 1.0)
    return Counts(most, mean, float(away[order[min(within, len(order) - 1)]]))


def read_target(counts: Floats, sigma: float, *, whole: bool = False) -> tuple[float, float] | None:
    """The interval [low, high] that holds the targets, from their magnitudes; ``None`` if nothing stands out.

    It is widened by an octave where a tail could hide in the noise, and with ``whole`` always.
    """
    octaves = HIGHEST - LOWEST + 1
    # From the most negative to the most positive, zero in the middle: one line of bins.
    line = np.concatenate([counts[octaves:-1][::-1], counts[-1:], counts[:octaves]])[None]
    found = windows(line, sigma, _TARGET_ALARM)
    if not found.found[0]:
        return None
    edges = np.exp2(np.arange(LOWEST, HIGHEST + 1, dtype=float))
    uppers: Any = np.concatenate([-edges[::-1] / 2.0, [0.0], edges])
    lowers: Any = np.concatenate([-edges[::-1], [0.0], edges / 2.0])
    low, high = float(lowers[found.first[0]]), float(uppers[found.last[0]])
    reach = max(-low, high, float(edges[3]))
    top = int(math.log2(reach)) - LOWEST
    # A tail of the other sign, too thin in each octave, may stand out of four of them together.
    tails = [float(counts[start + top - 3 : start + top + 1].sum()) for start in (0, octaves)]
    high = max(high, reach / 2.0) if tails[0] > _GROW * 2.0 * sigma else high
    low = min(low, -reach / 2.0) if tails[1] > _GROW * 2.0 * sigma else low
    if whole or 2.5 * sigma > _UNSEEN * float(line.clip(min=0.0).sum()):
        low, high = (2.0 * low if low < 0.0 else low / 2.0), (2.0 * high if high > 0.0 else high / 2.0)
    return (low, high) if low < high else (low - 1.0, high + 1.0)
