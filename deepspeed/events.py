"""Events: what happened, told to whoever listens; nothing that watches is imported by anything that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["EventStream", "Subscription"]

E = TypeVar("E")


class Subscription:
    """One listener of one kind of event; `close()` ends it, and so does leaving a `with` block."""

    __slots__ = ("_handler", "_kind", "_stream")

    def __init__(self, stream: EventStream, kind: type, handler: Callable[[Any], None]) -> None:
        self._stream = stream
        self._kind = kind
        self._handler = handler

    def close(self) -> None:
        """Stop listening; closing twice is harmless."""
        self._stream._drop(self._kind, self._handler)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EventStream:
    """Passes events to their subscribers in the order of subscription.

    An emitter guards with `if stream.wants(Kind):`, so that with no listener an event is not even built.
    """

    __slots__ = ("_handlers",)

    def __init__(self) -> None:
        self._handlers: dict[type, tuple[Callable[[Any], None], ...]] = {}

    def wants(self, kind: type) -> bool:
        """True if somebody listens to this kind."""
        return kind in self._handlers

    def emit(self, event: object) -> None:
        """Hand `event` to the listeners of its exact type."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> Subscription:
        """Call `handler` with every later event of `kind` until the subscription is closed."""
        self._handlers[kind] = (*self._handlers.get(kind, ()), handler)
        return Subscription(self, kind, handler)

    def _drop(self, kind: type, handler: Callable[[Any], None]) -> None:
        left = tuple(h for h in self._handlers.get(kind, ()) if h is not handler)
        if left:
            self._handlers[kind] = left
        else:
            self._handlers.pop(kind, None)
