"""The small parts of elastic jobs: how many ranks a plan uses, ranges of hosts, where hosts meet, the public agent."""

from __future__ import annotations

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.elasticity import elastic_section, elastic_sizes
from deepspeed.elasticity.node import address_towards, open_store, section_of, usable_ranks
from deepspeed.errors import RendezvousError
from deepspeed.launcher.arguments import elastic_nodes, elastic_words
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.ports import claim_port
from deepspeed.launcher.protocol import RelaySetting, labels_only, new_token


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
    st.integers(8, 200),
    st.sampled_from([0.1, 0.2]),
    st.integers(1, 64),
)
def test_the_ranks_that_are_used_train_with_the_planned_batch(micros, most, version, there):
    section = elastic_section(
        {"enabled": True, "max_train_batch_size": most, "micro_batch_sizes": micros, "version": version}
    )
    usable = usable_ranks(section)
    used = usable(there)
    assert 1 <= used <= there
    assert elastic_sizes(section, used)[0] == elastic_sizes(section, usable(1))[0], "the batch is the same"
    assert usable(used) == used
    more = [count for count in range(used + 1, there + 1) if usable(count) > used]
    assert more == [], "no larger number would do"


def test_without_a_plan_and_below_every_plan_all_ranks_are_used():
    assert usable_ranks(None)(7) == 7
    section = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2], "min_gpus": 4, "version": 0.1}
    usable = usable_ranks(elastic_section(section))
    assert [usable(count) for count in (1, 3, 4, 5, 8)] == [1, 3, 4, 4, 8]  # the engine says what it thinks of 1 and 3


def test_where_the_launcher_finds_the_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.1}
    (tmp_path / "a.json").write_text(json.dumps({"elasticity": section}))
    (tmp_path / "b.json").write_text("{}")
    for words in (
        ["--deepspeed_config", "a.json"],
        ["--deepspeed_config=a.json", "--deepspeed"],
        ["--deepspeed", "--deepspeed_config", "a.json", "--lr", "1"],
        ["--x", "--deepspeed", "a.json"],
    ):
        found = section_of(words)
        assert found is not None
        assert found.max_train_batch_size == 8
    for words in ([], ["--deepspeed_config"], ["--deepspeed", "x" * 5000], ["--deepspeed_config=b.json"], ["a.json"]):
        assert section_of(words) is None


def test_model_parallel_ranks_stay_together():
    section = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2], "version": 0.2}
    usable = usable_ranks(elastic_section({**section, "num_gpus_per_node": 4, "model_parallel_size": 2}))
    assert [usable(count) for count in (4, 6, 7, 8, 9)] == [4, 4, 4, 8, 8]


def options(fewest=-1, most=-1, restarts=100, asked=True):
    return argparse.Namespace(
        min_elastic_nodes=fewest, max_elastic_nodes=most, max_elastic_restarts=restarts, elastic_training=asked
    )


def test_ranges_of_hosts():
    assert elastic_nodes(options(), 3) == (1, 3)
    assert elastic_nodes(options(2), 3) == (2, 3)
    assert elastic_nodes(options(2, 8), 3) == (2, 8), "others may come"
    for wrong in (options(0), options(3, 2), options(4), options(restarts=-1)):
        with pytest.raises(LaunchError):
            elastic_nodes(wrong, 3)


def test_what_a_node_is_told():
    assert elastic_words(options(asked=False)) == []
    assert "--elastic_store_kept" not in elastic_words(options())
    assert elastic_words(options(2, 4, 5), kept=True) == [
        *("--enable_elastic_training", "--min_elastic_nodes=2", "--max_elastic_nodes=4", "--max_elastic_restarts=5"),
        "--elastic_store_kept",
    ]


def test_ranks_of_an_elastic_job_are_labelled_and_tell_nothing():
    labelled = RelaySetting.parse(labels_only(str(RelaySetting(new_token(), labels=True))))
    assert (labelled.token, labelled.labels) == ("", True)
    assert RelaySetting.parse(labels_only(str(RelaySetting(new_token(), labels=False)))) is None
    assert RelaySetting.parse(labels_only("")) is None


def test_the_address_by_which_others_find_this_machine():
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(RendezvousError, match="no way to"):
        address_towards("no.such.host.invalid", 1)


def test_two_processes_cannot_keep_a_store_at_one_port():
    with claim_port(0) as port:
        store = open_store("127.0.0.1", port, keep=True)
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}, but the store could not be opened"):
            open_store("127.0.0.1", port, keep=True)
        del store
