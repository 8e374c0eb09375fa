"""Methods that remember what they answered, as long as their object lives."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class cached_method(Generic[S, P, R]):
    """`functools.cache` for a method of an object with a `__dict__`, where the answers are kept."""

    def __init__(self, method: Callable[Concatenate[S, P], R]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "cached_method[S, P, R]": ...
    @overload
    def __get__(self, instance: S, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the remembering method; the object has it by itself from the second time on."""
        if instance is None:
            return self
        return instance.__dict__.setdefault(self._name, cache(partial(self._method, instance)))
