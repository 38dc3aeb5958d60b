"""Bodies of requests are read within bounds: of memory, and of the time in which others get no
turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pydantic import ValidationError

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.service.models import Place, Registration, from_json, to_json
from perseus_planner.extensions.service.parts import MOST_PLACES

_MOST_BRACKETS = 2**16
_MOST_COMMAS = 2**19
"""Of what is read at once. A list or an object costs the reader some 300 bytes, whatever is in it,
and a value 32 bytes to 150 bytes; so one text costs 100 MB at most. Groups of 10,000 alerts have
30,000 objects, and profiles of 70,000 rows 500,000 commas. Chosen by hand."""
_MOST_WIDE_BYTES = 8 * 2**20
_WIDE = re.compile(rb"\\u(?!00)")  # Alertmanager writes < as \u003c
_SLICE_BYTES = 2**16
_MOST_SLICE_BYTES = 2**18
"""How much of the places is read at once, some 500 of them: other threads get no turn meanwhile.
One place has 50 KB at most."""
_PLACES = re.compile(rb'"places"\s*:\s*\[\s*(?=\{)')
_PLACES_END = re.compile(rb"\}\s*\]")
_BETWEEN_PLACES = re.compile(rb"\}\s*,\s*\{")
_SENTINEL = Place(2**31 - 1, 0, ())  # stands for the places while the others are read


def check_size(text: bytes | bytearray, where: str = "the body") -> None:
    """Check that a JSON text holds no more values than can be read within 100 MB, before any of it
    is read.

    Raises:
        UsageError: If it may hold more.
    """
    brackets = text.count(b"[") + text.count(b"{")
    commas = text.count(b",")
    is_wide = len(text) > _MOST_WIDE_BYTES and not (text.isascii() and _WIDE.search(text) is None)
    if is_wide:
        raise UsageError(
            f"{where}: has more than {_MOST_WIDE_BYTES // 2**20} MiB and letters outside Latin-1, "
            "which take four times as much; send less at once"
        )
    if brackets > _MOST_BRACKETS or commas > _MOST_COMMAS:
        raise UsageError(
            f"{where}: has {brackets:,} lists and objects and {commas:,} commas, more than "
            f"{_MOST_BRACKETS:,} or {_MOST_COMMAS:,}; send less at once"
        )


def read_registration(body: bytes | bytearray) -> Registration:
    """Read a registration as `from_json` does, with its places in slices.

    Raises:
        ValueError, UsageError: If it is not one, or has too many values.
    """
    begin = _PLACES.search(body)
    if begin is not None:
        try:
            registration = _read_in_slices(body, begin.end())
        except ValidationError as error:
            # a name with brackets may be taken for the end of a place or of all of them
            if error.errors()[0]["type"] != "json_invalid":
                raise
        else:
            if registration is not None:
                return registration
    check_size(body)
    return from_json(Registration, body)


def _read_in_slices(body: bytes | bytearray, begin: int) -> Registration | None:
    """Read a registration with its places from a position on; None if those are not its own."""
    places: list[Place] = []
    end = begin
    for text, text_end in _slices(body, begin):
        end = text_end
        if len(text) > _MOST_SLICE_BYTES:
            raise UsageError(f"places.{len(places)}: is larger than a place can be; send less")
        try:
            places += from_json(tuple[Place, ...], b"[%b]" % text)
        except ValidationError as error:
            raise _of_a_place(error, len(places)) from None
        # Enough to know that there are too many, which `check_places` says below.
        if len(places) > MOST_PLACES:
            break
    # What is left is small: it is checked as a whole, with a stand-in for the list.
    with memoryview(body) as view:
        rest = bytearray(view[:begin])
        rest += to_json(_SENTINEL)
        rest += view[end:]
    check_size(rest)
    registration = from_json(Registration, rest)
    del rest
    registration.check_places(len(places))
    # The list that was read belongs to something else, such as a field with that name deeper down.
    if registration.places != (_SENTINEL,):
        return None
    return replace(registration, places=tuple(places))


def _slices(body: bytes | bytearray, begin: int) -> Iterator[tuple[bytes, int]]:
    """Yield the text of the list that begins at a position, in parts that end between two places,
    and where each part ends. A part that is larger than it may be is the last.
    """
    while True:
        most = begin + _MOST_SLICE_BYTES + 1
        cut = _BETWEEN_PLACES.search(body, begin + _SLICE_BYTES, most)
        last = _PLACES_END.search(body, begin, cut.start() + 1 if cut else most)
        end = most if cut is None else cut.start() + 1
        if last is not None:
            end = last.start() + 1
        yield bytes(body[begin:end]), end
        if last is not None or cut is None:
            return
        begin = cut.end() - 1


def _of_a_place(error: ValidationError, before: int) -> ValidationError | UsageError:
    """Return what is wrong with a place, by its number among all of them."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return error
    number, *where = first["loc"]
    path = ".".join(map(str, ("places", before + int(number), *where)))
    return UsageError(f"body.{path}: {first['msg']}; /openapi.json describes what is expected")
