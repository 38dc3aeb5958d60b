"""Layouts: which layers each stage of a pipeline holds, as engines say it, and the layout that is
balanced.

A layout is a text. With `|` between stages it is Megatron's `pipeline_model_parallel_layout`: E is
the embedding, t a decoder layer, m a module of multi-token prediction, and L the loss with the
head; `x*3` repeats one character, `(...)*3` what is in the parentheses, and commas count for
nothing. `Et*3|(t*4|)*2t*3L` has four stages. Stages are in the order of the model, so with virtual
stages the first rank holds the first stage of each round.

Other texts follow the options of engines that count layers:

    first=7,last=5,virtual=1     Megatron's num_layers_in_first_pipeline_stage and _last_, of ranks
    account=embedding+loss       Megatron's account_for_embedding_in_pipeline_split and _loss_
    less=1+1                     torchtitan's pipeline_parallel_first_stage_less_layers and _last_
    parts=0+9+17+26              DeepSpeed's PipelineModule.parts, boundaries in its list of layers
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import ScheduleError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CONDITION = "layout"
"""The name under which the `conditions` of a profile keep the layout of its stages."""
_LETTERS = {
    "E": "embedding",
    "t": "decoder layer",
    "m": "multi-token prediction",
    "L": "loss with the head",
}
_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_ONE = re.compile(r"(.)\*(\d+)")
_LONGEST_TEXT = 4_000
_LONGEST = 100_000
"""The most characters of a layout, and of an unrolled one (by hand: the deepest models have some
hundred layers); a typing error such as `t*99999999` would take all memory.
"""
_ALIKE = 0.005
"""Ranks whose times differ by less, relative to each other, are not told apart (by hand: noise of a
profile); as in reports.
"""
_FORMS = (
    "write Megatron's layout, such as 'Et*3|(t*4|)*2t*3L'; or first=7,last=5; account=loss; "
    "less=1+1; or parts=0+9+17+26"
)


@dataclass(frozen=True)
class Layout:
    """What each stage holds, first to last.

    Raises:
        ScheduleError: If engines would not build it.
    """

    #: the letters of each stage, in the order of the model: E, t, m and L; empty for a stage that
    #: passes on what it gets.
    stages: tuple[str, ...]

    def __post_init__(self) -> None:
        # What engines would not build is refused.
        letters = "".join(self.stages)
        for letter in letters:
            if letter not in _LETTERS:
                allowed = ", ".join(
                    f"{known_letter} ({word})" for known_letter, word in _LETTERS.items()
                )
                raise self._refusal(f"{shown(letter)} is not a layer; write {allowed}")
        for letter, place, end in (("E", 0, "first"), ("L", -1, "last")):
            word = _LETTERS[letter]
            if letters.count(letter) != 1 or letter not in self.stages[place]:
                raise self._refusal(
                    f"needs one {letter} ({word}), in the {end} stage, where engines build it; "
                    "put it there"
                )
            if letters[place] != letter:
                raise self._refusal(f"{letter} ({word}) is not {end}; put it there")
        # Engines build modules of prediction after all decoder layers.
        if "t" in letters[letters.find("m") :] and "m" in letters:
            raise self._refusal("has a t after m; put m after all decoder layers")
        if sum("m" in stage for stage in self.stages) > 1:
            raise self._refusal("has m in several stages; put all of them in one")

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The number of decoder layers of each stage."""
        return tuple(stage.count("t") for stage in self.stages)

    @cached_property
    def predictions(self) -> tuple[int, ...]:
        """The number of modules of multi-token prediction of each stage."""
        return tuple(stage.count("m") for stage in self.stages)

    def with_layers(self, layers: Sequence[int]) -> Layout:
        """Return the layout with so many decoder layers in each stage, and all else as it is."""
        return Layout(
            tuple(
                "E" * stage.count("E")
                + "t" * count
                + "m" * stage.count("m")
                + "L" * stage.count("L")
                for stage, count in zip(self.stages, layers, strict=True)
            )
        )

    def check(self, *, layers: int | None = None, ranks: int | None = None) -> None:
        """Check that it is of a model with so many layers, and of so many ranks.

        Raises:
            ScheduleError: If it is not.
        """
        if layers is not None and sum(self.layers) != layers:
            raise self._refusal(
                f"has {sum(self.layers)} decoder layers, but the model has {layers}; correct one"
            )
        if ranks is None:
            return
        count = len(self.stages)
        if count % ranks:
            raise self._refusal(
                f"has {count} stages, which {ranks} ranks cannot hold evenly; correct one"
            )
        early = [stage for stage in range(count - ranks) if "m" in self.stages[stage]]
        if early:
            raise self._refusal(
                f"has m in stage {early[0]}, which is not the last virtual stage of its rank; put "
                f"m in one of the last {ranks} stages"
            )

    def _refusal(self, text: str) -> ScheduleError:
        return ScheduleError(f"layout {shown(str(self))}: {text}")

    def __str__(self) -> str:
        """The shortest of the usual ways to write it: runs of layers and of stages as products."""
        cells = [_cell(stage) for stage in self.stages]
        parts = list[str]()
        for cell, same in groupby(cells[:-1]):
            # A product that is longer than what it stands for would save nothing.
            count = len(list(same))
            once = f"{cell}|"
            product = f"({once})*{count}"
            is_short = count > 1 and len(product) <= len(once) * count
            parts.append(product if is_short else once * count)
        return "".join([*parts, *cells[-1:]])


def _cell(stage: str) -> str:
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(f"{letter}*{n}" if n > 2 else letter * n for letter, n in runs)


def unroll(text: str) -> tuple[str, ...]:
    """Return the letters of each stage of a layout of Megatron, as its
    `PipelineParallelLayerLayout.parse_str_to_list` does: products in parentheses first, which do
    not nest, then products of one character.

    Raises:
        ScheduleError: If a letter is unknown, or the text is too long.
    """
    unrolled = text.replace(",", "")
    # The length is found before anything is written, as a typing error could fill the memory.
    length = len(unrolled)
    # Groups first, as Megatron unrolls them, so that characters inside are repeated after.
    for product in (_GROUP, _ONE):
        if length <= _LONGEST_TEXT:
            length += sum(len(match[1]) * int(match[2]) for match in product.finditer(unrolled))
        if length > (_LONGEST if product is _ONE else _LONGEST_TEXT):
            raise ScheduleError(
                f"layout {shown(text)}: is longer than any model is deep; correct a product"
            )
        unrolled = product.sub(lambda match: match[1] * int(match[2]), unrolled)
    stages = tuple(unrolled.split("|"))
    unknown = next((letter for letter in "".join(stages) if letter not in _LETTERS), None)
    if unknown is not None:
        allowed = ", ".join(f"{letter} ({word})" for letter, word in _LETTERS.items())
        raise ScheduleError(
            f"layout {shown(text)}: {shown(unknown)} is not a layer; write {allowed}, | "
            "between stages, and x*3 or (...)*3 for repeats"
        )
    return stages


def read_layout(
    text: str, *, layers: int | None = None, stages: int | None = None, virtual_stages: int = 1
) -> Layout:
    """Return the layout that a text writes; see the head of this file.

    Args:
        text: the layout.
        layers: decoder layers of the model. Texts with "=" need it, but for parts.
        stages: pipeline stages, over all virtual ones. Texts with "=" need it, but for parts.
        virtual_stages: stages of each rank.

    Raises:
        ScheduleError: If the text is not a layout, or not one of such a model and pipeline.
    """
    if "=" not in text:
        layout = Layout(unroll(text))
    else:
        layout = Layout(_counted(text, layers, stages, virtual_stages))
    # A layout says how many stages there are, so it must agree with the pipeline.
    if stages not in (None, len(layout.stages)):
        raise ScheduleError(
            f"layout {shown(text)}: has {len(layout.stages)} stages, but the pipeline has "
            f"{stages}; correct one"
        )
    if len(layout.stages) % virtual_stages:
        raise ScheduleError(
            f"layout {shown(text)}: has {len(layout.stages)} stages, which ranks of "
            f"{virtual_stages} virtual stages do not share evenly; correct one"
        )
    layout.check(layers=layers, ranks=len(layout.stages) // virtual_stages)
    return layout


def _counted(
    text: str, layers: int | None, stages: int | None, virtual_stages: int
) -> tuple[str, ...]:
    """Return the letters of each stage of a text with "="."""
    # An option that is there twice would be read once.
    values = dict[str, str]()
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name in values or not value:
            raise ScheduleError(f"layout {shown(text)}: {shown(part)} is unknown; {_FORMS}")
        values[name] = value
    where = f"layout {shown(text)}"
    # The set of options tells which engine's they are.
    reader = next(
        (read for names, read in _READERS if values and values.keys() <= names),
        None,
    )
    if reader is None:
        raise ScheduleError(f"{where}: is unknown; {_FORMS}")
    # Only boundaries say how many layers there are.
    if reader is not _of_parts and (layers is None or stages is None):
        raise ScheduleError(
            f"{where}: follows from the number of layers, which is not known here; write "
            "Megatron's string, with a t for each layer"
        )
    try:
        counts = reader(values, layers or 0, stages or 0, virtual_stages)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None
    # Embedding and loss are where all of these engines have them.
    cells = ["t" * count for count in counts]
    cells[0] = f"E{cells[0]}"
    cells[-1] = f"{cells[-1]}L"
    return tuple(cells)


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise ScheduleError(f"{name}: {shown(text)} is not a number of layers; write 0 or more")
    return int(text)


def _of_ends(
    values: Mapping[str, str], layers: int, stages: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return the layers of stages where the first and last rank have numbers of their own, as
    Megatron's `get_num_layers_to_build` does.
    """
    ranks = stages // virtual_stages
    ends = {
        end_rank: _number(name, values[name])
        for name, end_rank in (("first", 0), ("last", ranks - 1))
        if name in values
    }
    # Of two different numbers of one rank, one would be left out.
    if ranks == 1 and len({_number(name, text) for name, text in values.items()}) > 1:
        raise ScheduleError("first and last are the same rank, and differ; give one of them")
    # What both ends leave is shared evenly by the other ranks.
    left = layers - sum(ends.values())
    others = ranks - len(ends)
    # Without other ranks nothing may be left over.
    if left < 0 or (others and left % others) or (not others and left):
        raise ScheduleError(
            f"leaves {left} layers for {others} other ranks, which they do not share evenly; "
            "change a number"
        )
    per_rank = left // others if others else 0
    of_rank = [ends.get(rank, per_rank) for rank in range(ranks)]
    return _virtual(of_rank, virtual_stages)


def _virtual(of_rank: Sequence[int], virtual_stages: int) -> tuple[int, ...]:
    for rank, count in enumerate(of_rank):
        # Virtual stages of a rank hold as many layers each.
        if count % virtual_stages:
            raise ScheduleError(
                f"rank {rank} has {count} layers, which its {virtual_stages} virtual stages do not "
                "share evenly; change a number"
            )
    return tuple(count // virtual_stages for count in of_rank) * virtual_stages


def _of_account(
    values: Mapping[str, str], layers: int, stages: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return the layers of stages where embedding or loss count as a layer of the even split."""
    words = values["account"].split("+")
    if not {*words} <= {"embedding", "loss"} or len({*words}) < len(words):
        raise ScheduleError(
            f"account: {shown(values['account'])} is unknown; write embedding, loss or "
            "embedding+loss"
        )
    ranks = stages // virtual_stages
    # Embedding and loss count as layers of an even split, and are taken out of it after.
    total = layers + len(words)
    if total % ranks:
        raise ScheduleError(
            f"{layers} layers and {' and '.join(words)} are {total}, which {ranks} ranks do not "
            "share evenly; change the number of ranks"
        )
    counts = list(_virtual([total // ranks] * ranks, virtual_stages))
    counts[0] -= "embedding" in words
    counts[-1] -= "loss" in words
    if min(counts) < 0:
        raise ScheduleError("leaves no room for the embedding or loss; use fewer stages")
    return tuple(counts)


def _of_less(
    values: Mapping[str, str], layers: int, stages: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return the layers of stages in torchtitan (`generate_llm_fqn_per_model_part`, 0.3.0): the
    even split of layers, and so many for what is first and last; the first stages take the rest.
    """
    first, _, last = values["less"].partition("+")
    less = [_number("less", text) for text in (first, last or "1")]
    # One stage has all layers, whatever is taken from ends.
    if stages == 1:
        return (layers,)
    # What is first and last counts as so many layers, and the first stages take what is left over.
    per_stage, more = divmod(layers + sum(less), stages)
    if per_stage == 0 or max(less) > per_stage:
        raise ScheduleError(
            f"{stages} stages have {per_stage} layers each, and {max(less)} are taken from one; "
            "use fewer stages or take less"
        )
    counts = [per_stage + (stage < more) for stage in range(stages)]
    counts[0] -= less[0]
    counts[-1] -= less[1]
    return tuple(counts)


def _of_parts(
    values: Mapping[str, str], layers: int, stages: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return the layers of stages between the boundaries of DeepSpeed's list, whose first entry is
    the embedding and whose last one is the head, with `layers` decoder layers before it.

    What else follows the layers, such as a norm, counts to the head.
    """
    bounds = [_number("parts", text) for text in values["parts"].split("+")]
    if len(bounds) < 2 or bounds[0] != 0 or sorted(bounds) != bounds:
        raise ScheduleError("parts: are not rising from 0; copy PipelineModule.parts")
    # Without a number of layers all entries but both ends are layers.
    layers = layers or bounds[-1] - 2
    if not 0 < layers <= bounds[-1] - 2:
        raise ScheduleError(
            f"parts: has {bounds[-1]} entries, too few for {layers} layers with an embedding and a "
            "head; copy PipelineModule.parts"
        )
    # Entry 0 is the embedding, so layers are entries 1 and following.
    return tuple(max(0, min(stop, layers + 1) - max(start, 1)) for start, stop in pairwise(bounds))


_READERS: tuple[
    tuple[frozenset[str], Callable[[Mapping[str, str], int, int, int], tuple[int, ...]]], ...
] = (
    (frozenset({"first", "last"}), _of_ends),
    (frozenset({"account"}), _of_account),
    (frozenset({"less"}), _of_less),
    (frozenset({"parts"}), _of_parts),
)


class Rebalanced(NamedTuple):
    """A balanced layout, and the seconds of its stages."""

    layout: Layout
    #: forward and backward of a microbatch on each stage, at full clocks
    stage_s: tuple[float, ...]


def rebalance(
    layout: Layout, stage_s: Sequence[float], stage_ranks: Sequence[int]
) -> Rebalanced | None:
    """Return the layout whose slowest rank is fastest, by the seconds of the stages of `layout`;
    None if they do not tell what a layer takes. Memory is not known, so it is not kept.

    A layer takes what it takes in the median stage that has layers alone; what other stages take
    beyond their layers stays where it is.

    Args:
        layout: what each stage holds.
        stage_s: seconds of a microbatch's forward and backward on each stage.
        stage_ranks: the rank of each stage.
    """
    # A stage with layers alone tells what a layer takes.
    plain = [
        time_s / len(stage)
        for stage, time_s in zip(layout.stages, stage_s, strict=True)
        if stage and not stage.strip("t")
    ]
    # Without such a stage, layers and what is beside them cannot be told apart.
    if not plain or min(plain) <= 0.0:
        return None
    layer_s = median(plain)
    # What a stage takes beyond its layers belongs to what it has beside them, and stays.
    beside_s = [
        max(0.0, time_s - count * layer_s) if stage.strip("t") or not stage else 0.0
        for stage, count, time_s in zip(layout.stages, layout.layers, stage_s, strict=True)
    ]
    split = balance(sum(layout.layers), stage_ranks, layer_s, beside_s)
    if split is None:
        return None
    ranks = range(1 + max(stage_ranks))

    def slowest_s(counts: Sequence[int]) -> float:
        return max(
            sum(
                beside_s[stage] + counts[stage] * layer_s
                for stage, holder in enumerate(stage_ranks)
                if holder == rank
            )
            for rank in ranks
        )

    # Of equally fast layouts the one that is there needs no change.
    if slowest_s(split) >= slowest_s(layout.layers) * (1 - _ALIKE):
        split = layout.layers
    # Measured times change by the layers that move, and by nothing else.
    times_s = tuple(
        time_s + (after - before) * layer_s
        for time_s, before, after in zip(stage_s, layout.layers, split, strict=True)
    )
    return Rebalanced(layout.with_layers(split), times_s)


def balance(
    layers: int,
    stage_ranks: Sequence[int],
    layer_s: float,
    beside_s: Sequence[float],
    *,
    layer_bytes: Sequence[float] | None = None,
    free_bytes: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """Return the number of layers of each stage with which the slowest rank is fastest, within
    memory; None if memory does not allow any.

    Layers are alike. A stage has at least one, unless it has something beside layers. A rank takes
    its next layer where that ends soonest, which is optimal: of alike layers, one that the slowest
    rank does not take another has to. Within a rank, stages are as alike as memory allows.

    Args:
        layers: layers of the model.
        stage_ranks: the rank of each stage.
        layer_s: seconds of a layer's forward and backward.
        beside_s: seconds of what each stage has beside layers, 0 for nothing.
        layer_bytes: bytes that a layer takes on each stage; none by default.
        free_bytes: bytes that each rank has for its layers; no limit by default.
    """
    stages = range(len(stage_ranks))
    # Without memory in the question, layers take none and ranks have no end of it.
    bytes_each = [0.0] * len(stage_ranks) if layer_bytes is None else list(layer_bytes)
    least = [0 if beside > 0.0 else 1 for beside in beside_s]
    ranks = list[_Rank]()
    for number in range(1 + max(stage_ranks)):
        own = [stage for stage in stages if stage_ranks[stage] == number]
        free = math.inf if free_bytes is None else free_bytes[number]
        # How many layers a rank can hold depends on which of its stages they are on.
        room = _room(own, bytes_each, free, least)
        ranks.append(_Rank(own, free, room, sum(least[stage] for stage in own)))
    if any(rank.count > rank.room for rank in ranks):
        return None
    # What each stage must have is not free to move.
    left = layers - sum(rank.count for rank in ranks)
    if left < 0:
        return None
    # When each rank would end with one layer more. Of equally fast ranks the last one gets the next
    # layer, as it keeps fewer microbatches: so numbers count down.
    ends = [
        (sum(beside_s[stage] for stage in rank.stages) + (rank.count + 1) * layer_s, -number)
        for number, rank in enumerate(ranks)
        if rank.count < rank.room
    ]
    heapq.heapify(ends)
    # The greedy choice is optimal, as layers are alike.
    for _ in range(left):
        if not ends:
            return None
        end_s, minus_number = heapq.heappop(ends)
        rank = ranks[-minus_number]
        rank.count += 1
        if rank.count < rank.room:
            heapq.heappush(ends, (end_s + layer_s, minus_number))
    split = list(least)
    for rank in ranks:
        _fill(split, rank.stages, rank.count, layer_s, beside_s, bytes_each, rank.free_bytes)
    return tuple(split)


@dataclass
class _Rank:
    """A rank while layers are given to it."""

    stages: list[int]  #: its stages
    free_bytes: float  #: what it has for its layers
    room: float  #: the most layers that it can hold
    count: int  #: the layers that it has so far


def _room(
    own: Sequence[int], bytes_each: Sequence[float], free: float, least: Sequence[int]
) -> float:
    """Return the most layers of a rank with these stages; less than it must have if none fit."""
    # What is left once each stage has what it must have.
    left = free - sum(bytes_each[stage] * least[stage] for stage in own)
    smallest = min(bytes_each[stage] for stage in own)
    if left < 0:
        return -1
    # The most layers are those on the stage where a layer is smallest.
    more = math.inf if smallest == 0.0 or math.isinf(left) else left // smallest
    return sum(least[stage] for stage in own) + more


def _fill(
    split: list[int],
    own: Sequence[int],
    count: int,
    layer_s: float,
    beside_s: Sequence[float],
    bytes_each: Sequence[float],
    free: float,
) -> None:
    """Give the stages of a rank `count` layers, each to the stage that ends soonest with it, of
    those with which the others still fit.
    """
    smallest = min(bytes_each[stage] for stage in own)
    while (more := count - sum(split[stage] for stage in own)) > 0:
        left = free - sum(bytes_each[stage] * split[stage] for stage in own)
        # A layer may go where it leaves room for the others at their smallest.
        fitting = [
            stage
            for stage in own
            if bytes_each[stage] == smallest or bytes_each[stage] + (more - 1) * smallest <= left
        ]
        # Of equal ends the last stage, as it keeps fewer microbatches.
        nearest = min(fitting, key=lambda s: (beside_s[s] + (split[s] + 1) * layer_s, -s))
        split[nearest] += 1
