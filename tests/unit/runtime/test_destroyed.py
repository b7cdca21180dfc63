"""What remains after `destroy()`: clients that keep a destroyed engine can wrap its model again."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

from torch import nn

from deepspeed.runtime.destroyed import _REMAINS, Destroyed, _let_trainers_wrap_again


def remains(module):
    parts = SimpleNamespace(**dict.fromkeys(_REMAINS))
    return SimpleNamespace(_parts=Destroyed(parts, "script.py:1"), module=module)


def test_a_decorated_method_of_the_trainer_is_wrapped_once(monkeypatch):
    def decorated(function):  # as a release of Transformers may do: it sets __wrapped__
        return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))

    class Trainer:
        @decorated
        def _wrap_model(self, model):
            return model

    library = ModuleType("transformers.trainer")
    library.Trainer = Trainer
    monkeypatch.setitem(sys.modules, "transformers.trainer", library)
    module = nn.Linear(2, 2)
    _let_trainers_wrap_again()
    assert Trainer()._wrap_model(remains(module)) is module
    assert Trainer()._wrap_model(module) is module
    once = Trainer._wrap_model
    _let_trainers_wrap_again()
    assert Trainer._wrap_model is once
