"""The order of an epoch's samples: a pure function of (seed, epoch, shard sizes, lanes, window).

Ranks, workers and batch size never enter. Position ``p`` of an epoch maps to one sample in closed form, so any
process can start anywhere, and the whole state of a shuffle is the number ``p``:

1. The shards, in a keyed order, form a line of ``N`` samples (the caller permutes them; see :func:`permute`).
2. The line is cut into ``L`` *lanes* of ``q = N // L`` samples; the ``N - q * L < L`` samples left over end the epoch.
3. In a lane, each piece of a shard is cut by a keyed permutation into ``K`` parts (the *window*); part ``i`` of piece
   ``j`` goes to slot ``j + i``. At any time about ``K`` shards of a lane are open; each slot brings one in and
   retires one.
4. A slot is shuffled by a second keyed permutation. Positions deal round over the lanes: ``p`` is lane ``p % L``, place
   ``p // L``.
"""

from __future__ import annotations

__all__ = ["EpochOrder", "SequentialOrder", "auto_lanes", "derive_key", "permute"]

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
_U64 = NDArray[np.uint64]
_MASK = (1 << 64) - 1
_ROUNDS = 6
_SMALL = 16
_CHUNK = 1 << 15
_SLOT, _PIECE = 1, 2


def _mix(x: _U64) -> _U64:
    """Finaliser of splitmix64 (Steele, Lea and Flood, 2014): a fixed bijection, unlike numpy's own generators."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive_key(*values: int) -> int:
    """Hash integers into one 64-bit key; the same on every machine and numpy version."""
    state = np.array([0x9E3779B97F4A7C15], np.uint64)
    for value in values:
        state = _mix((state ^ np.uint64(value & _MASK)) + np.uint64(0x9E3779B97F4A7C15))
    return int(state[0])


def _keys(key: int, numbers: Int) -> _U64:
    """One 64-bit key for each number."""
    return _mix(np.uint64(key) ^ _mix(numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)))


def permute(x: Int, n: Int | int, key: _U64 | int) -> Int:
    """Apply a keyed bijection of ``[0, n)`` to each element, without building the permutation.

    A balanced Feistel network with splitmix64 rounds; values that fall outside ``[0, n)`` walk the cycle until they are
    inside (Black and Rogaway, 2002). Domains of at most 16, where a Feistel network is visibly biased, are ranked by
    hash. ``n`` and ``key`` may differ from element to element.

    Args:
        x: One-dimensional; each value in ``[0, n)``.
        n: Size of the domain, at least 1 where ``x`` has an element.
        key: 64-bit key.

    Returns:
        Array of the shape of ``x``.
    """
    size = np.broadcast_to(np.asarray(n, np.int64), x.shape)
    keys = np.broadcast_to(np.asarray(key, np.uint64), x.shape)
    if len(x) > _CHUNK:  # temporaries that stay in the processor's cache
        starts = range(0, len(x), _CHUNK)
        return np.concatenate([permute(x[i : i + _CHUNK], size[i : i + _CHUNK], keys[i : i + _CHUNK]) for i in starts])
    bits = np.frexp((size - 1).astype(np.float64))[1]  # bit length of size - 1, exact below 2**53
    half = ((bits + 1) // 2).astype(np.uint64)
    out = x.astype(np.int64)
    small = np.flatnonzero(size <= _SMALL)
    out[small] = _rank_by_hash(out[small], size[small], keys[small])
    todo = np.flatnonzero(size > _SMALL)
    while todo.size:
        out[todo] = _feistel(out[todo].astype(np.uint64), half[todo], keys[todo]).astype(np.int64)
        todo = todo[out[todo] >= size[todo]]
    return out


def _rank_by_hash(x: Int, size: Int, key: _U64) -> Int:
    """Permute tiny domains: the rank of each value's hash among the hashes of its domain (ties keep their order)."""
    own, rank = _mix(_mix(key) + x.astype(np.uint64)), np.zeros_like(x)
    for other in range(int(size.max(initial=0))):
        value = _mix(_mix(key) + np.uint64(other))
        rank += (other < size) & ((value < own) | ((value == own) & (other < x)))
    return rank


def _feistel(x: _U64, half: _U64, key: _U64) -> _U64:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for number in range(_ROUNDS):
        salt = np.uint64((number + 1) * 0xD1342543DE82EF95 & _MASK)
        left, right = right, left ^ (_mix(right + (key ^ salt)) >> np.uint64(17) & mask)
    return left << half | right


class SequentialOrder:
    """Shards and samples as they lie: the order of validation and test.

    Args:
        counts: Samples of each shard along the line.
    """

    def __init__(self, counts: Int) -> None:
        self._edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.size = int(self._edges[-1])

    def locate(self, positions: Int) -> tuple[Int, Int]:
        """Return for each position the place of its shard in the line, and the number of the item in that shard."""
        shard = np.searchsorted(self._edges, positions, "right") - 1
        return shard, positions - self._edges[shard]


class EpochOrder:
    """The shuffled order of one epoch (see the module's docstring for the algorithm).

    Memory is about 50 bytes a shard, whatever the number of samples.

    Args:
        counts: Samples of each shard along the line, in the epoch's shard order; zeros are allowed.
        key: 64-bit key of (seed, epoch).
        lanes: ``L``; values above the number of samples are lowered to it.
        window: ``K``, the shards open in a lane at a time.
    """

    def __init__(self, counts: Int, key: int, lanes: int, window: int) -> None:
        self._edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.size = int(self._edges[-1])
        self.lanes = max(1, min(lanes, self.size))
        self._per_lane = self.size // self.lanes
        self._keys = derive_key(key, _SLOT), derive_key(key, _PIECE)
        self._cut_pieces()
        self._window = np.minimum(window, self._pieces)
        self._cut_slots()

    def _cut_pieces(self) -> None:
        """Cut the line at the borders of shards and lanes."""
        lane_edges = np.arange(self.lanes + 1) * self._per_lane
        cuts = np.concatenate([self._edges[self._edges <= lane_edges[-1]], lane_edges])
        cuts.sort(kind="stable")  # merges two sorted runs
        cuts = cuts[np.flatnonzero(np.diff(cuts, append=cuts[-1] + 1))]
        self._first_piece = np.searchsorted(cuts, lane_edges)
        self._pieces = np.diff(self._first_piece)
        # a piece begins in the last shard whose edge is not beyond it, so empty shards have none
        self._piece_shard = np.searchsorted(self._edges, cuts[:-1], "right") - 1
        self._piece_start = cuts[:-1] - self._edges[self._piece_shard]
        self._piece_size = np.diff(cuts)

    def _cut_slots(self) -> None:
        """Lay the parts of the pieces into slots; slots of all lanes stand in one row, each lane ``per_lane`` long."""
        self._first_slot = np.concatenate([[0], np.cumsum(self._pieces + self._window - 1)]).astype(np.int64)
        sizes = np.zeros(self._first_slot[-1], np.int64)
        for begin in range(0, len(self._piece_size), _CHUNK):
            piece = np.arange(begin, min(begin + _CHUNK, len(self._piece_size)))
            lane = np.searchsorted(self._first_piece, piece, "right") - 1
            slot = piece - self._first_piece[lane] + self._first_slot[lane]
            for part in range(int(self._window.max(initial=0))):
                use = part < self._window[lane]
                low, high = _part(self._piece_size[piece[use]], part, self._window[lane[use]])
                sizes[slot[use] + part] += high - low
        self._slot_edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def locate(self, positions: Int) -> tuple[Int, Int]:
        """Return for each position the place of its shard in the line, and the number of the item in that shard.

        Vectorised: under a microsecond an item when thousands are asked for at once.
        """
        dealt = positions < self._per_lane * self.lanes
        if not dealt.all():
            shard = np.searchsorted(self._edges, positions, "right") - 1
            item = positions - self._edges[shard]
            shard[dealt], item[dealt] = self._locate_dealt(positions[dealt])
            return shard, item
        return self._locate_dealt(positions)

    def _locate_dealt(self, positions: Int) -> tuple[Int, Int]:
        lane, place = positions % self.lanes, positions // self.lanes
        row = lane * self._per_lane + place
        slot = np.searchsorted(self._slot_edges, row, "right") - 1
        start = self._slot_edges[slot]
        rest = permute(row - start, self._slot_edges[slot + 1] - start, _keys(self._keys[0], slot))
        newest = slot - self._first_slot[lane]  # piece of the lane that this slot brings in
        window, pieces, first = self._window[lane], self._pieces[lane], self._first_piece[lane]
        piece, item = np.zeros_like(positions), np.zeros_like(positions)
        missing = np.ones(len(positions), bool)
        for part in range(int(self._window.max(initial=0))):
            candidate = newest - part
            valid = missing & (part < window) & (candidate >= 0) & (candidate < pieces)
            number = np.where(valid, candidate + first, 0)
            low, high = _part(self._piece_size[number], part, window)
            found = valid & (rest < high - low)
            piece[found] = number[found]
            item[found] = (low + rest)[found]
            missing &= ~found
            rest = np.where(valid, rest - (high - low), rest)
        item = permute(item, self._piece_size[piece], _keys(self._keys[1], piece))
        return self._piece_shard[piece], self._piece_start[piece] + item


def _part(size: Int, part: int, window: Int) -> tuple[Int, Int]:
    """First and last + 1 place of part ``part`` when ``size`` is cut into ``window`` parts."""
    return part * size // window, (part + 1) * size // window


def auto_lanes(global_batch_size: int) -> int:
    """Choose the number of lanes for a batch size.

    Two samples of a batch come from one shard hardly more often than by chance once lanes * window reaches the batch
    size; 64 lanes are cheap for any batch. A divisor of the batch size is preferred: each lane then stays with one
    rank.
    """
    most = min(global_batch_size, max(64, global_batch_size // 4))
    return next((n for n in range(most, most // 2, -1) if global_batch_size % n == 0), most)
