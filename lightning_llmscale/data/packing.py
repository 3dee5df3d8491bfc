"""Pack pieces of documents into sequences of equal length."""

from __future__ import annotations

__all__ = ["best_fit", "split_lengths"]

from bisect import bisect_left, insort

import numpy as np

from lightning_llmscale.data.order import Int


def split_lengths(lengths: Int, capacity: int) -> tuple[Int, Int, Int]:
    """Cut what is longer than ``capacity`` into pieces, all full but the last; nothing is dropped.

    Args:
        lengths: Lengths of the documents; those of 0 give no piece.
        capacity: Greatest length of a piece.

    Returns:
        Document, start in the document and length of each piece, in order.
    """
    pieces = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * capacity
    return document, start, np.minimum(lengths[document] - start, capacity)


def best_fit(lengths: Int, capacity: int) -> Int:
    """Assign lengths to bins by best-fit decreasing: the longest first, each to the fullest bin that still takes it.

    At most 11/9 of the fewest bins plus 4 (Johnson, 1973); on log-normal lengths well under 1 % of the room stays
    empty.

    Args:
        lengths: Each in ``1 .. capacity``.
        capacity: Room of a bin.

    Returns:
        Number of the bin of each length.
    """
    bins = np.zeros(len(lengths), np.int64)
    open_bins: dict[int, list[int]] = {}
    rooms: list[int] = []  # sorted; the rooms for which open_bins has a bin
    count = 0
    sizes = lengths.tolist()
    for item in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[item]
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            same = open_bins[room]
            number = same.pop()
            if not same:
                del open_bins[room], rooms[at]
        else:
            room, number, count = capacity, count, count + 1
        bins[item] = number
        left = room - size
        if left:
            if left not in open_bins:
                open_bins[left] = []
                insort(rooms, left)
            open_bins[left].append(number)
    return bins
