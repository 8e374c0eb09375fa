"""Methods with a cache that lives as long as their object."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class cached_method(Generic[S, P, R]):
    """A `functools.cache` for a method, stored in its object's `__dict__`."""

    def __init__(self, method: Callable[Concatenate[S, P], R]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "cached_method[S, P, R]": ...
    @overload
    def __get__(self, instance: S, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the cached method; later accesses find it in the object directly."""
        if instance is None:
            return self
        return instance.__dict__.setdefault(self._name, cache(partial(self._method, instance)))
