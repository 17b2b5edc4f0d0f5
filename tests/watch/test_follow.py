"""The page of a run that goes on: served on this machine alone, and up to date."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from browser_helpers import chromium, needs_chromium
from etils import epath
from made_up_run import make_run, train_line

from spmd_trainer.errors import UserError
from spmd_trainer.watch.pages.page_mode import PageServer
from spmd_trainer.watch.pages.run_page import PageData


@pytest.fixture
def mine(tmp_path):
    return make_run(tmp_path / "mine")


@contextlib.contextmanager
def served(read):
    server = PageServer(read, seconds_between_reads=0.0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


@pytest.fixture
def server(mine):
    with served(PageData([epath.Path(mine)]).read) as found:
        yield found


def ask(server, path="/", **headers):
    """Returns the status, the headers and the body."""
    address = server.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.putrequest("GET", path, skip_host=True)
    for name, value in {"Host": address, **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, body


def add_step(directory, step):
    with (directory / "summaries" / "train" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_line(step)) + "\n")


def test_data_is_sent_again_only_when_it_has_changed(server, mine):
    status, headers, body = ask(server, "/data.json")
    assert (status, json.loads(body)["follow"]) == (200, True)
    tag = headers["ETag"]
    assert ask(server, "/data.json", If_None_Match=tag)[0::2] == (304, "")
    add_step(mine, 110)
    status, headers, body = ask(server, "/data.json", If_None_Match=tag)
    assert status == 200
    assert headers["ETag"] != tag
    (loss,) = (chart for chart in json.loads(body)["charts"] if chart["key"] == "train/loss")
    assert sum(loss["series"][0]["steps"]) == 110


def test_the_page_is_served_to_this_machine_alone(server):
    status, headers, body = ask(server)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "<h1" in body
    assert server.url.startswith("http://127.0.0.1:")
    assert ask(server, Host="localhost:80")[0] == 200
    for host in ("example.org", "example.org:80", "127.0.0.1.example.org", "", "10.0.0.1"):
        status, _, body = ask(server, Host=host)
        assert (status, "<h1" in body) == (403, False), host
    assert ask(server, "/../etc/passwd")[0] == 404


def test_an_error_while_reading_does_not_end_the_server():
    answers = iter([ValueError("cut short"), {"runs": [], "charts": []}])

    def read():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with served(read) as server:
        assert ask(server, "/data.json")[0] == 500
        assert ask(server, "/data.json")[0] == 200


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port={port} can't be used: .*--port=0"):
            PageServer(dict, port)


def test_ctrl_c_ends_it_in_order(mine):
    command = [sys.executable, "-m", "spmd_trainer.main", "--mode=page", f"--job_log_dir={mine}", "--follow"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        url = process.stdout.readline()
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert not (mine / "run.html").exists()


@needs_chromium
def test_an_open_page_follows_the_run(server, mine, tmp_path):
    with chromium(tmp_path / "profile") as browser:
        page = browser.open(server.url)
        page.evaluate("window.untouched = true")
        end = "plots.get('train/loss').data[0].at(-1)"
        assert page.evaluate(end) == 100
        page.evaluate("document.querySelector('.log').click()")
        add_step(mine, 120)
        page.wait_for(f"{end} === 120")
        assert page.evaluate("plots.get('train/loss').data[1].at(-1)") == pytest.approx(5 / 2.2)
        assert page.texts("#main-charts .values")[0] == "2.2727 at 120"
        assert page.evaluate("plots.get('train/loss').scales.y.distr") == 3, "what was chosen stays"
        assert page.evaluate("window.untouched"), "the page was not loaded again"
        assert page.texts(".fact b")[1] == "2.2727"
        assert page.texts("#written")[0].startswith("Following the run")
        assert page.errors == []
        server.close()
        page.wait_for("document.getElementById('written').textContent.startsWith('The server has ended')")
