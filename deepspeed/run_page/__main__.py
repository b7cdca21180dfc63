"""`python -m deepspeed.run_page RUN_FOLDER [OTHER]`: the run page, live, or as a file with `--static`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.run_page.server import RunPage, RunPageServer
from deepspeed.trust import read_regular

_LARGEST_PLAN = 16 << 20


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; give the folder of events.file (or DS_EVENTS)")
    return path


def _plan(text: str) -> dict[str, float]:
    """Bytes by kind out of what `ds_plan --json` writes."""
    try:
        found = json.loads(read_regular(text, _LARGEST_PLAN))["memory"]["device"]
        return {str(kind): float(size) for kind, size in found.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read as JSON ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no plan: expected bytes by kind in memory.device") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted, or write a file."""
    parser = argparse.ArgumentParser("python -m deepspeed.run_page", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=_folder, nargs="+", help="folders of files of events; two runs are compared")
    parser.add_argument("--static", metavar="FILE", help="write the page as one file and end")
    parser.add_argument("--plan", type=_plan, metavar="JSON", help="a plan, whose memory by kind is drawn")
    parser.add_argument("--host", default="127.0.0.1", help="address; one that is not loopback needs a token")
    parser.add_argument("--port", type=int, default=8585, help="port; 0 is any that is free")
    parser.add_argument("--token", help="what the address of the page must have; made up where one is needed")
    given = parser.parse_args(arguments)
    page = RunPage(given.folder, given.plan)
    if not page.runs():
        parser.error(f"{given.folder[0]} has no files *.rank00000.jsonl; set events.file in the config, or DS_EVENTS")
    if given.static:
        Path(given.static).write_text(page.static(), encoding="utf-8")
        return 0
    try:
        server = RunPageServer(page, given.host, given.port, given.token)
    except OSError as error:
        parser.error(f"cannot listen on {given.host}:{given.port} ({error}); choose another --port")
    with server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.ending = True
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
