"""Who hangs, and where: what each rank entered last, told through the job's store when a collective does not complete.

`box` and `report` are what is known of a rank, `look` and `neighbours` find it out, `mailbox` carries it, `verdict` is
the sentence, `watcher` the thread; `Watch` is what the dispatcher uses.
"""

from __future__ import annotations

from deepspeed.comm.watch.settings import HangSettings
from deepspeed.comm.watch.watch import Watch

__all__ = ["HangSettings", "Watch"]
