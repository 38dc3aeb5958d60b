"""Call the kernels, which are written in C, as Python functions.

A kernel is declared in Python, with its types, beside what calls it; its body stands in the folder
`c` there. `compiling` makes a library of each such folder when the package is installed.

What Python hands over, by the name of its type:

    int, float, bool            int64_t, double, bool
    Integers, Indices, Floats   the address of the first number: int64_t *, int32_t *, double *
    a NamedTuple                the address of a struct of that name with its fields in the same
                                order; arrays there are structs of address, length and width
    ... | None                  NULL for None

Python's lock is not held meanwhile, so threads run kernels side by side.
"""

from __future__ import annotations

import ctypes
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.solver import compiling

if TYPE_CHECKING:
    from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])

_SCALARS = {"int": ctypes.c_int64, "float": ctypes.c_double, "bool": ctypes.c_bool}
_ARRAYS: dict[str, np.dtype[Any]] = {
    "Integers": np.dtype(np.int64),
    "Indices": np.dtype(np.int32),
    "Floats": np.dtype(np.float64),
}


_BINDING = threading.Lock()
"""Held while a kernel is bound, as two threads may call it for the first time at once."""

DECLARED: list[tuple[Callable[..., object], frozenset[str]]] = []
"""Each function that was declared so far, and the arguments that its kernel writes on."""


def kernel(*changed: str) -> Callable[[F], F]:
    """Make a declared function call the kernel of its name, without a leading underscore.

    Arguments are given by position. Arrays must have the declared type of numbers, and lie in one
    piece, row by row; else a TypeError says which one does not. Their lengths are the caller's
    business.

    Args:
        changed: the arguments that the kernel writes on, whose arrays must be writable.
    """

    def decorate(function: F) -> F:
        name = function.__name__.lstrip("_")
        DECLARED.append((function, frozenset(changed)))
        folder = Path(function.__code__.co_filename).with_name("c")
        call: Callable[..., object] | None = None
        converters: tuple[Callable[[Any], object], ...] = ()

        @wraps(function)
        def door(*values: object) -> object:
            nonlocal call, converters
            if call is None:
                # Loaded when it is first called, as looking at a frontier needs no kernel.
                with _BINDING:
                    made = declared(function, frozenset(changed))
                    converters = tuple(argument.convert for argument in made.arguments)
                    # Last, as another thread that sees it takes all the rest as made.
                    call = _bound(folder, name, made)
            if len(values) != len(converters):
                raise TypeError(f"{name}: takes {len(converters)} arguments, not {len(values)}")
            return call(
                *[convert(argument) for convert, argument in zip(converters, values, strict=True)]
            )

        return cast("F", door)

    return decorate


class Declared(NamedTuple):
    """What a kernel takes and returns, as its Python function declares."""

    arguments: tuple[_Scalar | _Array | Struct, ...]
    result: Any  #: a type of ctypes, or None


def declared(function: Callable[..., object], changed: frozenset[str]) -> Declared:
    """Return what a function declares."""
    annotated = {name: _text(annotation) for name, annotation in function.__annotations__.items()}
    result = annotated.pop("return")
    unknown = changed - annotated.keys()
    assert not unknown, f"{function.__name__} has no {unknown}"
    arguments = tuple(
        _argument(f"{function.__name__.lstrip('_')}: {name}", text, name in changed, function)
        for name, text in annotated.items()
    )
    return Declared(arguments, _SCALARS.get(result))


def _argument(
    name: str, text: str, is_changed: bool, function: Callable[..., object]
) -> _Scalar | _Array | Struct:
    text, _, optional = text.partition(" | ")
    if text in _SCALARS:
        return _Scalar(text)
    if text in _ARRAYS:
        return _Array(name, _ARRAYS[text], is_changed)
    return Struct(name, function.__globals__[text], is_changed, is_optional=optional == "None")


def _text(annotation: Any) -> str:
    """Return an annotation as it is written in the source."""
    return str(getattr(annotation, "__forward_arg__", annotation))


class _Scalar:
    """A number."""

    def __init__(self, text: str) -> None:
        self.ctype = _SCALARS[text]
        self.convert: Callable[[Any], object] = operator.index if text == "int" else float
        if text == "bool":
            self.convert = bool


@dataclass(frozen=True)
class _Array:
    """An array of one type of numbers."""

    name: str
    dtype: np.dtype[Any]
    is_changed: bool

    ctype = ctypes.c_void_p

    def convert(self, array: NDArray[Any]) -> int:
        """Return the address of the first number."""
        if (
            not isinstance(array, np.ndarray)
            or array.dtype != self.dtype
            or not array.flags.c_contiguous
            or not (array.flags.writeable or not self.is_changed)
        ):
            raise TypeError(f"{self.name}: {self._problem(array)}")
        return array.ctypes.data

    def words(self, array: NDArray[Any]) -> tuple[int, int, int]:
        """Return the three words of the struct that a field is: address, length and width."""
        address = self.convert(array)
        count = len(array)
        return address, count, array.size // count if count else array.strides[0] // array.itemsize

    def _problem(self, array: object) -> str:
        wanted = f"give an array of {self.dtype} in one piece"
        if not isinstance(array, np.ndarray):
            return f"is {type(array).__name__}; {wanted}"
        if array.dtype != self.dtype:
            return f"is an array of {array.dtype}; {wanted}"
        if not array.flags.c_contiguous:
            return f"is an array with gaps, or column by column; {wanted}"
        return "is an array that may not be written on; give a copy"


class Struct:
    """A NamedTuple of numbers and arrays."""

    def __init__(self, name: str, kind: Any, is_changed: bool, *, is_optional: bool) -> None:
        self.name = name
        self.kind = kind
        self.is_optional = is_optional
        self.ctype = ctypes.POINTER(structure(kind))
        #: the last tuple and its struct: most calls have the problem of the call before
        self._last: tuple[object, ctypes.Structure | None] = (None, None)
        self.fields = [
            _Array(f"{name}.{field}", _ARRAYS[text], is_changed)
            if text in _ARRAYS
            else _Scalar(text)
            for field, text in fields(kind)
        ]

    def convert(self, value: tuple[Any, ...] | None) -> object:
        """Return the struct that holds what a tuple holds, or None for NULL."""
        last, made = self._last
        if value is last and value is not None:
            return made
        if value is None and self.is_optional:
            return None
        if not isinstance(value, self.kind):
            raise TypeError(f"{self.name}: is {type(value).__name__}; give {self.kind.__name__}")
        assert value is not None
        made = structure(self.kind)(*self._words(value))
        self._last = (value, made)
        return made

    def _words(self, value: tuple[Any, ...]) -> Iterator[object]:
        for field, content in zip(self.fields, value, strict=True):
            if isinstance(field, _Scalar):
                yield field.convert(content)
            else:
                yield from field.words(content)


def fields(kind: Any) -> list[tuple[str, str]]:
    """Return the name and the type of each field of a NamedTuple."""
    return [(name, _text(kind.__annotations__[name])) for name in kind._fields]


@cache
def structure(kind: Any) -> type[ctypes.Structure]:
    """Return the struct of a NamedTuple; each array is three words of it."""
    words = list[tuple[str, Any]]()
    for name, text in fields(kind):
        if text in _ARRAYS:
            words += [(f"{name}_{part}", ctypes.c_int64) for part in ("at", "count", "width")]
        else:
            words.append((name, _SCALARS[text]))
    return type(kind.__name__, (ctypes.Structure,), {"_fields_": words})


def _bound(folder: Path, name: str, made: Declared) -> Callable[..., object]:
    function = getattr(library_of(folder), name)
    function.argtypes = [argument.ctype for argument in made.arguments]
    function.restype = made.result
    return cast("Callable[..., object]", function)


@cache
def library_of(folder: Path) -> ctypes.CDLL:
    """Load the library of a folder of C sources.

    Raises:
        UsageError: If it is not there, or cannot be loaded.
    """
    path = compiling.library(folder)
    remedy = "type `make compiled` in the folder of perseus-planner, or install it again with pip"
    if not path.exists():
        others = [*folder.glob("kernels-*.so")]
        what = "were compiled from other sources" if others else "are not compiled"
        raise UsageError(f"{folder}: the kernels {what}; {remedy}")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be loaded: {error}; {remedy}") from error
