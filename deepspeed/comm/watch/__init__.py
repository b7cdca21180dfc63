"""Which rank hangs, and where: ranks exchange their last calls through the job's store when a collective hangs.

`call_log` and `report` hold what is known of a rank, `threads` and `neighbours` find it out, `store` carries it,
`verdict` makes the sentence, `watcher` is the thread; `Watch` is what the dispatcher uses.
"""

from __future__ import annotations

from deepspeed.comm.watch.settings import HangSettings
from deepspeed.comm.watch.watch import Watch

__all__ = ["HangSettings", "Watch"]
