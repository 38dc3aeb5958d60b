"""A binary heap of nodes for kernels: the nearest one is the first; of equally near ones, that of
the lowest number.

Numba has `heapq`, which takes longer to compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.solver.kernels import inner_kernel

if TYPE_CHECKING:
    from perseus_planner.solver.network import Integers


@inner_kernel
def push(far: Integers, far_node: Integers, count: int, beyond: int, node: int) -> None:
    """Add a node to the heap of `count` nodes."""
    at = count
    while at > 0:
        above = (at - 1) // 2
        if far[above] < beyond or (far[above] == beyond and far_node[above] <= node):
            break
        far[at], far_node[at] = far[above], far_node[above]
        at = above
    far[at], far_node[at] = beyond, node


@inner_kernel
def pop(far: Integers, far_node: Integers, count: int) -> None:
    """Take away the first node of the heap, which leaves `count` nodes."""
    last, node, at, child = far[count], far_node[count], 0, 1
    while child < count:
        if child + 1 < count and (
            far[child + 1] < far[child]
            or (far[child + 1] == far[child] and far_node[child + 1] < far_node[child])
        ):
            child += 1
        if last < far[child] or (last == far[child] and node < far_node[child]):
            break
        far[at], far_node[at] = far[child], far_node[child]
        at, child = child, 2 * child + 1
    far[at], far_node[at] = last, node
