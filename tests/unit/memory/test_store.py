"""The pipeline of tiles: everything is there when it is worked on, and little is there at a time."""

from __future__ import annotations

import pytest

from deepspeed.comm import Pending
from deepspeed.memory.tier import DeviceStore, through


class Waits:
    def __init__(self, done):
        self._done = done

    def wait(self):
        self._done()

    def is_completed(self):
        return False


class Recorded:
    """A store that writes down what happens."""

    def __init__(self):
        self.log, self.there, self.most = [], set(), 0

    def fetch(self, tile):
        self.log.append(("fetch", tile))
        self.there.add(tile)
        self.most = max(self.most, len(self.there))
        return Pending(None, Waits(lambda: self.log.append(("fetched", tile))))

    def keep(self, tile):
        self.log.append(("keep", tile))
        return Pending(None, Waits(lambda: self.there.discard(tile)))


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_tiles_are_fetched_ahead_and_kept_behind(count, ahead):
    store, tiles = Recorded(), list(range(count))
    through(tiles, store, lambda tile: store.log.append(("work", tile)), ahead=ahead)
    for tile in tiles:
        order = [store.log.index((act, tile)) for act in ("fetch", "fetched", "work", "keep")]
        assert order == sorted(order)
        if tile + 1 < count and ahead:
            assert store.log.index(("fetch", tile + 1)) < store.log.index(("work", tile)), "while one is worked on"
    assert [tile for act, tile in store.log if act == "work"] == tiles
    assert not store.there
    assert store.most <= ahead + 2


def test_states_at_home_need_nothing():
    seen = []
    through(["a", "b"], DeviceStore(), seen.append)
    assert seen == ["a", "b"]
