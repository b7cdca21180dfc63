"""The server of the run page, without a browser: what it gives, and what it refuses."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import contextmanager

import pytest

from deepspeed.run_page.__main__ import main
from deepspeed.run_page.server import RunPage, RunPageServer, is_loopback
from tests.run_files import write_run


@contextmanager
def served(page, **options):
    with RunPageServer(page, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "run", "one", 20, ranks=3)
    return tmp_path / "run"


def test_data_ranks_and_a_stream_that_goes_on(folder):
    with served(RunPage([folder], {"moments": 4.0})) as server:
        page = ask(server, "/")
        assert page.status == 200
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert json.load(ask(server, "/runs")) == {"runs": [{"name": "run/one", "ranks": 3}], "plan": {"moments": 4.0}}
        data = json.load(ask(server, "/data?run=0"))
        assert data["columns"]["step"] == list(range(1, 21))
        assert json.load(ask(server, "/data?run=0&rank=2"))["run"]["rank"] == 2
        assert json.load(ask(server, "/ranks?run=0"))["ranks"] == [0, 1, 2]
        with (folder / "one.rank00000.jsonl").open("a") as file:
            file.write('{"kind":"step","step":21}\n')
        headers = {"Last-Event-ID": data["cursor"]}
        stream = ask(server, "/stream?run=0&cursor=0:0", **headers)
        name, piece = stream.readline().decode(), stream.readline().decode()
        assert json.loads(piece.removeprefix("data: "))["columns"]["step"] == [21]
        assert name.strip() == "id: " + json.loads(piece.removeprefix("data: "))["cursor"]
        stream.close()


def test_what_is_refused(folder):
    (folder.parent / "secret.rank00000.jsonl").write_text('{"kind":"secret"}\n')
    with served(RunPage([folder])) as server:
        for path in (
            *("/data", "/data?run=1", "/data?run=-1", "/data?run=../", "/data?run=0&rank=9", "/data?run=0&rank=x"),
            *("/one.rank00000.jsonl", "/../secret.rank00000.jsonl", "/%2e%2e/secret.rank00000.jsonl", "/stream?run=9"),
        ):
            assert ask(server, path).status == 404, path
        assert ask(server, "/", Host="evil.example").status == 403
        for method in ("POST", "PUT", "DELETE"):
            assert ask(server, "/data?run=0", method).status == 501
        assert not server.open_to_others


def test_another_address_needs_the_token(folder):
    with served(RunPage([folder]), host="0.0.0.0") as server:
        assert server.url.endswith(f"?token={server.token}")
        assert len(server.token) > 20
        for path in ("/", "/runs", "/data?run=0", "/runs?token=x", "/runs?token=%ff"):
            assert ask(server, path).status == 403
        assert ask(server, f"/runs?token={server.token}", Host="node.example").status == 200
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "node")] == [True] * 3 + [
        False
    ] * 2


def test_the_static_page_has_the_data_and_no_markup_of_it(folder, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text('{"memory": {"device": {"moments": 5}}}')
    assert main([str(folder), "--static", str(tmp_path / "page.html"), "--plan", str(plan)]) == 0
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script>") == text.count("</script>") == 1
    assert "<img" not in text
    assert '"moments":5.0' in text
    for word in ("http://", "https://", "src="):
        assert word not in text.replace("img src=x", "").replace("\\u003cimg src", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "is no folder"),
        (["{empty}"], "has no files"),
        (["{run}", "--plan", "{run}/one.rank00000.jsonl"], "cannot be read as JSON"),
        (["{run}", "--plan", "{empty}/plan.json"], "is no plan"),
        (["{run}", "--host", "256.1.1.1"], "cannot listen on"),
    ],
)
def test_wrong_arguments(arguments, message, folder, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "plan.json").write_text("{}")
    with pytest.raises(SystemExit):
        main([word.format(run=folder, empty=empty) for word in arguments])
    assert message in capsys.readouterr().err
