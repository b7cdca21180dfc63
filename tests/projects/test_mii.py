"""DeepSpeed-MII serves models, for which it needs the inference engine, which is still to come."""

from __future__ import annotations

import pytest

from tests.harness import ranks
from tests.projects.stand_ins import needs, stand_ins

pytestmark = [needs("mii"), pytest.mark.slow]


# When inference comes: generate text with `mii.pipeline` here instead.
@ranks(1, init=False)
def test_its_import_says_what_is_missing():
    message = r"deepspeed\.inference is not part of this version yet; until then: "
    with stand_ins("ujson", "zmq", "shortuuid"), pytest.raises(ImportError, match=message):
        import mii  # noqa: F401
