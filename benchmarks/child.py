"""The process of one rank of one measurement: runs a case file and prints its numbers on one marked line.

It runs under every contender's interpreter, as a file and not as a module: the project's root must not be on the
path of real DeepSpeed, where it would put our `deepspeed` first.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["MARK", "main"]

MARK = "benchmark-result "


def load(name: str, file: Path, *, package: bool = False) -> ModuleType:
    """Import `file` as `name`, whatever the path is."""
    folders = [str(file.parent)] if package else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def versions(contender: str) -> dict[str, str]:
    """What a contender's interpreter imports as torch and deepspeed, and on which kind of device it computes."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = {"torch": str(torch.__version__), "device": device}
    if contender != "torch":
        import deepspeed

        found["deepspeed"] = deepspeed.__version__
    return found


def main(arguments: list[str]) -> None:
    """`child.py probe CONTENDER`, or `child.py CASE_FILE JOB_AS_JSON`."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    result: object
    what, detail = arguments
    if what == "probe":
        result = versions(detail)
    else:
        load("benchmarks", here / "__init__.py", package=True)
        from benchmarks.case import Job

        result = load("benchmark_case", Path(what)).measure(Job(**json.loads(detail)))
    sys.stdout.flush()
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
