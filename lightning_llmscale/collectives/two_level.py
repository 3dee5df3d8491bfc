"""All-reduce in two levels: fast links inside a group of ranks, slow ones only between groups.

Inside each group the ranks sum their tensors so that each owns one part; the owners of the same part in all groups then
sum that part between groups; and inside each group the finished parts are passed round. Between groups travels what a
ring of groups would send, ``2 (g - 1) / g`` of the tensor for each of ``g`` groups, instead of ``2 (n - 1) / n`` for
all ``n`` ranks. The two levels overlap piece by piece: while one piece is summed between groups, the next is summed
inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_llmscale.collectives.across import Across
from lightning_llmscale.collectives.codecs import Codec
from lightning_llmscale.collectives.direct import DirectReducer
from lightning_llmscale.collectives.protocol import Group, Reducer
from lightning_llmscale.collectives.ring import RingReducer
from lightning_llmscale.collectives.shared_memory import SharedMemoryReducer
from lightning_llmscale.errors import ConfigurationError

__all__ = ["islands_of_hosts", "open_two_level"]

_PIECE_BYTES = 1 << 20
"""What is summed between islands at a time: each such sum fills and drains the slow links once."""


def islands_of_hosts(hosts: Sequence[str]) -> list[list[int]]:
    """The positions that share each host, in order of first appearance."""
    islands: dict[str, list[int]] = defaultdict(list)
    for position, host in enumerate(hosts):
        islands[host].append(position)
    return list(islands.values())


def open_two_level(
    group: Group, islands: Sequence[Sequence[int]], *, codec: Codec | None = None, error_feedback: bool = False
) -> Reducer:
    """Connect the two levels.

    Args:
        group: All ranks.
        islands: Positions in ``group`` that are near each other, see :func:`islands_of_hosts`. Inside an island the
        ranks
            use shared memory if they are on one host, else sockets.
        codec: Format on the wire between islands; ``None`` sends tensors as they are.
        error_feedback: Whether what encoding drops is added to the next tensor of the same stream.

    Raises:
        ConfigurationError: The islands do not divide the group into at least two parts of equal size of at least two.
        PeerFailureError: A rank did not show up.
    """
    sizes = sorted({len(island) for island in islands})
    if len(islands) < 2 or len(sizes) != 1 or sizes[0] < 2:
        raise ConfigurationError(
            f"algorithm='two_level' needs at least two hosts with the same number of ranks, at least two, on each and "
            f"there are {len(islands)} with {', '.join(map(str, sizes))} ranks; use algorithm='ring' or 'direct'."
        )
    if sorted(position for island in islands for position in island) != list(range(group.size)):
        raise ConfigurationError(f"The islands {islands} do not name each of {group.size} ranks once.")
    island = next(island for island in islands if group.position in island)
    index = island.index(group.position)
    inside = group.subset([group.members[position] for position in island])
    between = group.subset([group.members[other[index]] for other in islands])
    # Two ranks exchange halves either way; a lossy wire must not round at every hop of a ring.
    direct = codec is not None or between.size == 2
    across = Across(
        DirectReducer(between, codec=codec, error_feedback=error_feedback) if direct else RingReducer(between)
    )
    try:
        if len(set(inside.hosts)) == 1:
            return SharedMemoryReducer(inside, across=across)
        return DirectReducer(inside, segment_bytes=_PIECE_BYTES, across=across)
    except BaseException:
        across.close()
        raise
