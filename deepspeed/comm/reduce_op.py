"""`ReduceOp`: torch's, with the one member that scripts may name and torch does not show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as td

__all__ = ["ReduceOp"]

if TYPE_CHECKING:
    from torch.distributed import ReduceOp
else:

    class ReduceOp(td.ReduceOp):
        """torch's reductions (the very same members) and UNUSED, which no backend carries out."""

        # torch's C++ enum has it right after its last public member but does not export it to Python.
        UNUSED = td.ReduceOp.RedOpType(len(td.ReduceOp.RedOpType.__members__))
