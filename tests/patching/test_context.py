"""Whose a function is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import wrapt

from ck_patch.context import Op, op_of


def stock(x: int) -> int:
    return x


def plain() -> Any:
    return functools.wraps(stock)(lambda x: stock(x))


def wrapper() -> Any:
    return wrapt.FunctionWrapper(stock, lambda wrapped, instance, args, kwargs: wrapped(*args))


def wrapper_of_a_builtin() -> Any:
    return wrapt.FunctionWrapper(abs, lambda wrapped, instance, args, kwargs: wrapped(*args))


MAKERS = [plain, wrapper, wrapper_of_a_builtin]


@pytest.mark.parametrize("make", MAKERS)
def test_the_function_of_an_op_is_its_own_active_or_not(make: Callable[[], Any]) -> None:
    function = make()
    op = Op(function)
    assert op.function is function
    assert op_of(function) is op
    assert op.active
    op.deactivate()
    assert op_of(function) is op
    assert not op.active


@pytest.mark.parametrize("make", MAKERS)
def test_what_an_op_wraps_and_what_wraps_it_is_not_its_own(make: Callable[[], Any]) -> None:
    function = make()
    inner = Op(function)
    assert op_of(function.__wrapped__) is None
    for foreign in (
        functools.wraps(function)(lambda x: function(x)),
        wrapt.FunctionWrapper(function, lambda wrapped, instance, args, kwargs: wrapped(*args)),
        functools.partial(function),
    ):
        assert op_of(foreign) is None
        outer = Op(foreign)
        assert op_of(foreign) is outer
    assert op_of(function) is inner


@pytest.mark.parametrize("other", [stock, abs, None, object(), Op])
def test_what_is_no_function_of_an_op_has_none(other: object) -> None:
    assert op_of(other) is None
