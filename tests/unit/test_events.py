"""Events reach their listeners, in order, until the subscription is closed."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.events import EventStream


@dataclass(frozen=True)
class Ping:
    number: int


@dataclass(frozen=True)
class Pong:
    number: int


def test_only_the_wanted_kind_arrives_in_order():
    stream, heard = EventStream(), []
    stream.subscribe(Ping, lambda event: heard.append(("first", event.number)))
    stream.subscribe(Ping, lambda event: heard.append(("second", event.number)))
    stream.emit(Ping(1))
    stream.emit(Pong(2))
    assert heard == [("first", 1), ("second", 1)]


def test_wants_follows_subscriptions():
    stream = EventStream()
    assert not stream.wants(Ping)
    with stream.subscribe(Ping, lambda event: None) as subscription:
        assert stream.wants(Ping)
        assert not stream.wants(Pong)
    assert not stream.wants(Ping)
    subscription.close()


def test_a_listener_may_leave_while_an_event_is_told():
    stream, heard = EventStream(), []

    def once(event: Ping) -> None:
        heard.append(event.number)
        subscription.close()

    subscription = stream.subscribe(Ping, once)
    stream.subscribe(Ping, lambda event: heard.append(-event.number))
    stream.emit(Ping(1))
    stream.emit(Ping(2))
    assert heard == [1, -1, -2]
