"""How long `import torch` takes in a cold process, and what `import deepspeed` adds to it."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="import_time",
    title="import, cold process",
    file=__file__,
    measures=(
        Measure("torch_s", "import torch", "s"),
        Measure("deepspeed_s", "import deepspeed after it", "s", targets=(Target(0.3),)),
        Measure("modules", "modules loaded in the end", "modules"),
        Measure("deepspeed_modules", "of these, deepspeed's own", "modules"),
    ),
    rounds=9,
)

# Run by an interpreter that has loaded nothing else: this process has already paid for what `Case` needs.
_SCRIPT = """
import sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
{statement}
end = time.perf_counter()
names = list(sys.modules)
import json
own = sum(name.partition(".")[0] == "deepspeed" for name in names)
sys.stdout.write("\\n" + json.dumps([middle - start, end - middle, len(names), own]))
"""


def measure(job: Job) -> dict[str, float]:
    """Seconds and module counts of one fresh interpreter."""
    statement = "" if job.contender == "torch" else "import deepspeed"
    process = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(statement=statement)], stdout=subprocess.PIPE, text=True, check=True
    )
    torch_s, deepspeed_s, modules, own = json.loads(process.stdout.splitlines()[-1])
    if job.contender == "torch":
        return {"torch_s": torch_s, "modules": modules}
    return {"torch_s": torch_s, "deepspeed_s": deepspeed_s, "modules": modules, "deepspeed_modules": own}
