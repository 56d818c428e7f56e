"""Numbers from the caller: tensors, arrays, nested lists and single numbers become plain CPU tensors, or are refused.

Nothing is converted in silence. A value that would be cut off, become infinite, or be read as another kind of number
than it is, is refused by the name of its argument. numpy is imported only where an array comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_pgloss.errors import DataError


class Array(Protocol):
    """Whatever numpy reads as an array: numpy's own arrays, and those of other libraries."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """The numpy array."""


def tensor(name: str, value: Any, floats: torch.dtype | None = None) -> Tensor:
    """``value`` as a detached, dense CPU tensor; its dtype is for the caller to judge.

    Tensors and arrays keep their dtype. Of Python's numbers, integers become int64, bools bool and floats float32.

    Args:
        name: the argument, for errors.
        value: a tensor, an array, a list (of lists) of numbers, or one number.
        floats: the dtype that Python's floats and integers become where floats are wanted.

    Raises:
        DataError: the value is none of these, its rows have different lengths, it has no numbers (a meta tensor), it is
            not dense (sparse, masked), or its elements are objects.
    """
    return _tensor(name, value, floats, name)


def _tensor(name: str, value: Any, floats: torch.dtype | None, at: str) -> Tensor:
    if isinstance(value, Tensor):
        return _dense(name, value)
    if _is_list(value):
        return _nested(name, value, floats, at)
    if isinstance(value, bool | int | float):
        return _numbers(name, [value], floats, at).reshape(())
    if hasattr(value, "__array__") and not isinstance(value, type):
        return _array(name, value)
    raise DataError(
        f"{name} is not a tensor, an array or a list of numbers",
        expected="torch.Tensor, numpy.ndarray or list", got=type(value).__name__,
    )  # fmt: skip


def _dense(name: str, value: Tensor) -> Tensor:
    if value.is_meta:
        raise DataError(f"{name} is a meta tensor: it has a shape and no numbers", expected="a tensor with numbers")
    form = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
    if form != torch.strided:
        raise DataError(f"{name} is not a dense tensor", expected="torch.strided", got=form, fix=f"{name}.to_dense()")
    value = value.detach()  # what the caller hands over is a constant
    return value if value.device.type == "cpu" else value.cpu()


def _array(name: str, value: Any) -> Tensor:
    import numpy

    if isinstance(value, numpy.ma.MaskedArray):
        raise DataError(f"{name} is a masked array, whose mask would be lost", fix=f"{name}.filled(...)")
    array = numpy.asarray(value)
    kind = array.dtype
    if kind.kind not in "biuf" or (kind.kind == "f" and kind.itemsize > 8):
        raise DataError(f"{name} is an array of an unusable type", expected="bool, int or float32/64", got=kind)
    if kind.kind == "u":
        if array.size and int(array.max()) > torch.iinfo(torch.int64).max:
            raise DataError(f"{name} holds a number beyond int64", expected="torch.int64", got=int(array.max()))
        kind = numpy.dtype("int64")
    # A copy of our own: the caller's array may be read-only, run backwards, or be written to later.
    return torch.from_numpy(numpy.array(array, dtype=kind.newbyteorder("="), order="C", copy=True))


def _nested(name: str, value: Sequence[Any], floats: torch.dtype | None, at: str) -> Tensor:
    """A list of numbers, or of rows of one shape: lists, tensors, arrays."""
    if not any(_is_row(item) for item in value):
        return _numbers(name, value, floats, at)
    parts: list[Tensor] = []
    for place, item in enumerate(value):
        if not _is_row(item):
            raise DataError(f"{name} mixes rows and single numbers", got=repr(item)[:32], where=f"{at}[{place}]")
        parts.append(_tensor(name, item, floats, f"{at}[{place}]"))
        if parts[-1].shape != parts[0].shape:
            raise DataError(
                f"{name} has rows of different lengths", expected=list(parts[0].shape), got=list(parts[-1].shape),
                where=f"{at}[{place}]", fix="fill the rows up, or lay them end to end for from_packed",
            )  # fmt: skip
    kinds = sorted({str(part.dtype) for part in parts})
    if len(kinds) > 1 and floats is None:
        return _nested(name, value, torch.float32, at)  # a row of floats makes floats of all
    if len(kinds) > 1:
        raise DataError(f"{name} has rows of different types", expected="one type", got=", ".join(kinds))
    return torch.stack(parts)


def _is_list(value: Any) -> bool:
    """Whether it is a list, a tuple or a range; text and bytes are sequences too, but hold no numbers."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_row(item: Any) -> bool:
    """Whether an entry of a list is a row; a tensor or an array without dimensions is one number."""
    return _is_list(item) or (hasattr(item, "__array__") and getattr(item, "ndim", 1) > 0)


def _numbers(name: str, values: Sequence[Any], floats: torch.dtype | None, at: str) -> Tensor:
    kinds = set(map(type, values))
    if not kinds <= {bool, int, float}:
        values = [_number(name, value, f"{at}[{place}]") for place, value in enumerate(values)]
        kinds = set(map(type, values))
    if bool in kinds and len(kinds) > 1:
        place = next(place for place, value in enumerate(values) if isinstance(value, bool))
        raise DataError(f"{name} mixes bools and numbers", got=values[place], where=f"{at}[{place}]")
    dtype = torch.bool if bool in kinds else floats or (torch.float32 if float in kinds else torch.int64)
    try:
        found = torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype)
    except (OverflowError, RuntimeError, ValueError):
        raise DataError(f"{name} holds a number beyond int64", expected="a smaller number", where=at) from None
    if not dtype.is_floating_point:
        return found
    # float32 ends at 3e38, and holds whole numbers up to 2^24.
    kept = found.to(dtype)
    lost = kept.isinf() & ~found.isinf()
    if int in kinds:
        exact = [not isinstance(given, int) or given == have for given, have in zip(values, kept.tolist(), strict=True)]
        lost = lost | ~torch.tensor(exact, dtype=torch.bool)
    if bool(lost.any()):
        place = int(lost.to(torch.int8).argmax())
        raise DataError(f"{name} holds a number that {dtype} cannot", got=values[place], where=f"{at}[{place}]")
    return kept


def _number(name: str, value: Any, at: str) -> bool | int | float:
    """A Python number from whatever holds one: a subclass, or a tensor or an array without dimensions."""
    if hasattr(value, "__array__") and not isinstance(value, float):
        value = _tensor(name, value, None, at).item()
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise DataError(f"{name} holds something that is no number", got=f"{type(value).__name__} {value!r}"[:48], where=at)
