"""The errors: one base, and the built-in type that torch raises for the same fault."""

from __future__ import annotations

import pytest

import wideload as wl
from wideload import errors

BUILTIN = {
    "TraceError": TypeError,
    "DtypeError": TypeError,
    "LayoutError": ValueError,
    "RangeError": ValueError,
    "OverlapError": RuntimeError,
    "DeviceError": RuntimeError,
    "CompileError": RuntimeError,
    "GradError": RuntimeError,
}


@pytest.mark.parametrize(("name", "builtin"), BUILTIN.items())
def test_each_is_caught_as_ours_and_as_torchs(name: str, builtin: type[Exception]) -> None:
    error = getattr(wl, name)
    for caught in (wl.WideloadError, builtin):
        with pytest.raises(caught, match="what to change"):
            raise error("what to change")
    others = {TypeError, ValueError, RuntimeError} - {builtin}
    assert not any(issubclass(error, other) for other in others)
    assert error.__doc__


def test_every_error_is_public_and_listed_here() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, wl.WideloadError)}
    assert defined == {*BUILTIN, "WideloadError"} == set(errors.__all__)
    assert defined <= set(wl.__all__)
