"""Every Python and JSON snippet of README, CONTRIBUTING and docs works as it stands there."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed.config.__main__ import main as look_at_config
from tests import harness
from tests.clients.server import SERVER as CLIENT_SERVER
from tests.docs.pages import PAGES, PROGRAMS, blocks, inline, of_language, prose
from tests.docs.scene import CONFIG, namespace, prepare_folder
from tests.harness import ROOT, ranks, shared_ranks
from tests.told import Told

PRETENDED = re.compile(r"on (\d+) pretended ranks")
BATCH = {"train_batch_size": 4}


def run(block, names):
    code = compile("\n" * block.line + block.text, block.page, "exec")
    exec(code, names)


@pytest.fixture
def _loaded(page, monkeypatch):
    """Snippets that need Transformers find it loaded."""
    if any("transformers" in block.text for block in of_language("python") if block.page == page):
        monkeypatch.setattr(harness, "SERVER", CLIENT_SERVER)


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.page == page for b in of_language("python"))])
@pytest.mark.usefixtures("_loaded")
@shared_ranks(2)
def test_python(page, tmp_path):
    """The snippets of a page, one after the other in one namespace, on two ranks."""
    prepare_folder(Path(tmp_path))
    names = namespace()
    for block in of_language("python"):
        if block.page == page and not block.tried:
            run(block, names)


def pretended(block):
    return PRETENDED.fullmatch(block.tried)


def test_blocks_that_are_tried_elsewhere_name_the_test():
    named = [block.tried for page in PAGES for block in blocks(page) if block.tried and not pretended(block)]
    assert [test for test in named if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("block", list(filter(pretended, of_language("python"))), ids=str)
@ranks(1, init=False)
def test_python_on_pretended_ranks(block):
    """Snippets for many ranks, by rank 0 of a world that is only pretended."""
    (world,) = pretended(block).groups()
    os.environ |= {"WORLD_SIZE": world, "LOCAL_SIZE": "8"}
    torch.distributed.init_process_group("fake", rank=0, world_size=int(world), store=FakeStore())
    run(block, {})


@shared_ranks(2)
def test_the_elastic_loop_saves_between_accumulations(tmp_path):
    prepare_folder(Path(tmp_path))
    names = namespace()
    config = Path(f"ds_config_{torch.distributed.get_rank()}.json")  # the other one writes its own
    config.write_text(json.dumps({**CONFIG, "gradient_accumulation_steps": 2}))
    (loop,) = (block for block in of_language("python") if block.page == "docs/elastic.md" and "while" in block.text)
    text = loop.text.replace("ds_config.json", str(config))
    assert "< 100" in text
    assert "% 20" in text
    loop = replace(loop, text=text.replace("< 100", "< 10").replace("% 20", "% 5"))
    with Told() as lines:
        run(loop, names)
    assert [line for line in lines if "micro steps after the last optimizer step" in line] == []
    assert names["engine"].micro_steps == 2 * names["engine"].global_steps >= 20
    assert {each.name for each in Path("checkpoints").glob("global_step*")} >= {"global_step5", "global_step10"}


def check(config, folder, capsys):
    (folder / "snippet.json").write_text(json.dumps(config))
    assert look_at_config(["check", str(folder / "snippet.json")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("block", of_language("json"), ids=str)
def test_json(block, tmp_path, capsys):
    config = json.loads(block.text)
    check(config if "elasticity" in config else BATCH | config, tmp_path, capsys)  # which computes the batch sizes


INLINE = sorted({(page, code) for page in PAGES for code in inline(page) if re.match(r'\{?"[\w$]+":', code)})


@pytest.mark.parametrize(("page", "code"), INLINE)
def test_json_within_lines(page, code, tmp_path, capsys):
    """`"fp16": {"enabled": true}`; a name in capitals stands for a number, dots for anything."""
    text = re.sub(r"\b[A-Z]\b", "1", code if code.startswith("{") else f"{{{code}}}")
    if "..." not in text:
        check(BATCH | json.loads(text), tmp_path, capsys)


def test_every_block_says_what_it_is():
    known = {"python", "json", "console", "mermaid", ""}
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 30
    assert [str(block) for block in found if block.language not in known] == []
    # A block without a language is a drawing or a formula; commands in it would not be tried.
    begins = re.compile(rf"^(\$ )?({'|'.join(PROGRAMS)}) ", re.MULTILINE)
    assert [str(block) for block in found if not block.language and begins.search(block.text)] == []


def test_links_lead_somewhere():
    """Generated pages are there after `make docs`, whose strict build knows them."""
    lost = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, anchor = target.partition("#")
            if "://" in target or path.startswith("generated/"):
                continue
            place = (ROOT / page).parent / path if path else ROOT / page
            titles = [] if not place.is_file() else re.findall(r"^#+ (.*)", place.read_text(), re.MULTILINE)
            names = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
            if not place.exists() or (anchor and anchor not in names):
                lost.append(f"{page}: {target}")
    assert lost == []


def test_few_blocks_are_not_tried():
    skipped = {str(block).partition(":")[0]: block.skipped for page in PAGES for block in blocks(page) if block.skipped}
    assert len([block for page in PAGES for block in blocks(page) if block.skipped]) <= 5, skipped
