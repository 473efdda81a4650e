"""The server behind the live page: who is let in, what is answered, what ends."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_server import HOSTILE, TOKEN

from partita.errors import InputError
from partita.serve import workers
from partita.serve.app import MOST_BODY, MOST_VIEWS, Views
from partita.serve.asks import SimulateAsk
from partita.serve.server import check_loopback, listen

LONG = {
    "kind": "schedule",
    "ask": {"placement": "interlace_mlm", "devices": 8, "microbatches": 20, "memory": 12,
            "time_limit": 600},
}  # fmt: skip


class Stream:
    """A search as a browser follows it."""

    def __init__(self, port, body):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.connection.request("POST", f"/{TOKEN}/search", json.dumps(body))
        self.response = self.connection.getresponse()

    def next(self):
        name = self.response.readline().decode().strip().removeprefix("event: ")
        data = self.response.readline().decode().strip().removeprefix("data: ")
        self.response.readline()
        return name, json.loads(data) if data else None

    def close(self):
        self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


# --- who is let in -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/options", "/wrong/", "/wrong/ask", f"/x{TOKEN}/", "//"])
def test_without_the_token_nobody_is_told_anything(served, path):
    status, headers, text = served.raw("GET", path)
    assert status == 403
    assert text == "open the address that partita serve printed: it has a token\n"
    assert TOKEN not in str(headers)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil", "", "[::"])
def test_a_request_by_another_name_is_refused(served, host):
    status, _, text = served.request("GET", "options", headers={"Host": host})
    assert (status, text) == (403, "this page answers to 127.0.0.1 and localhost only\n")


def test_a_page_of_another_site_may_not_ask(served):
    body = {"kind": "simulate", "ask": {}}
    status, _, text = served.request("POST", "ask", body, {"Origin": "https://evil.example"})
    assert (status, text) == (403, "a page of another site may not ask\n")


def test_a_tunnel_to_another_port_is_let_in(served):
    assert served.request("GET", "options", headers={"Host": "localhost:9999"})[0] == 200


def test_a_body_of_a_gigabyte_is_refused_unread(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:
        head = f"POST /{TOKEN}/ask HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**30}\r\n\r\n"
        line.sendall(head.encode())  # and not a byte of the body
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert f"a question has at most {MOST_BODY:,} bytes".encode() in answer


def test_a_body_without_an_end_is_read_no_further_than_a_question(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:
        head = (
            f"POST /{TOKEN}/ask HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        line.sendall(head.encode())
        try:
            for _ in range(200):
                line.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
        except ConnectionError:
            pass
        assert line.recv(65536).startswith(b"HTTP/1.1 413")


def test_nothing_is_loaded_from_elsewhere(served):
    status, headers, page = served.request("GET", "")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    script, style = (served.request("GET", name)[2] for name in ("app.js", "app.css"))
    for text in (page, script, style):
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
    assert served.request("GET", "other.js")[0] == 404
    assert served.request("GET", "views/none")[0] == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_page_for_other_machines_is_refused(host):
    with pytest.raises(InputError, match="can be reached from other machines; use"):
        check_loopback(host)


def test_a_port_that_is_taken_is_a_sentence(served):
    with pytest.raises(InputError) as error:
        listen("127.0.0.1", served.port)
    told = f"--port: port {served.port} is taken; choose another with --port, or leave it out"
    assert str(error.value).startswith(told)


# --- what is answered ----------------------------------------------------------------------------


def test_a_what_if_is_answered_with_its_command_and_its_view(served):
    told = served.ask("strategy", model="gpt2", cluster="8xA100", batch=64, pp=2, links=0.5)
    words = "partita simulate gpt2 --cluster 8xA100@links=0.5 --batch 64 --micro-batch 1 --pp 2"
    assert told["command"] == words
    status, headers, view = served.request("GET", f"views/{told['view']}")
    assert status == 200
    assert "connect-src" not in headers["Content-Security-Policy"]
    assert "<canvas" in view


@pytest.mark.parametrize("name", [HOSTILE, "<script>alert(1)</script>", "a\nb", "\u202egpt2", ""])
def test_a_hostile_name_is_text(served, name):
    body = {"kind": "simulate", "ask": {"model": name, "cluster": name or "2xA100", "batch": 1}}
    status, headers, text = served.request("POST", "ask", body)
    assert status in (200, 400)
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "\n" not in json.loads(text)["refused"]


@pytest.mark.parametrize("body", [[], "text", {"kind": "plan"}, {"ask": {}}, {"kind": 1, "ask": 2}])
def test_what_is_no_question_is_refused(served, body):
    status, _, text = served.request("POST", "ask", body)
    assert status == 400
    assert json.loads(text)["refused"]


def test_a_search_is_no_what_if_and_a_what_if_no_search(served):
    assert "is a search" in json.loads(served.request("POST", "ask", LONG)[2])["refused"]
    body = {"kind": "simulate", "ask": {"model": "gpt2", "cluster": "2xA100", "batch": 1}}
    assert "is no search" in json.loads(served.request("POST", "search", body)[2])["refused"]


def test_only_the_last_views_are_kept():
    views = Views()
    names = [views.keep({"page.html": "x"}) for _ in range(MOST_VIEWS + 3)]
    assert len(views.kept) == MOST_VIEWS
    assert names[-1] in views.kept
    assert names[0] not in views.kept


# --- searches ------------------------------------------------------------------------------------


def test_two_searches_run_side_by_side_and_one_is_stopped_with_its_best(served):
    first, second = Stream(served.port, LONG), Stream(served.port, LONG)
    streams = (first, second)
    names = []
    for stream in streams:
        event, data = stream.next()
        assert event == "started"
        assert data["command"].startswith("partita schedule interlace_mlm --devices 8")
        names.append(data["id"])
    assert names[0] != names[1]
    for stream in streams:
        data = {"objective": None}
        while data["objective"] is None:
            event, data = stream.next()
            assert event == "better"
        assert 0 < data["bound"] <= data["objective"]
    # neither keeps a third from its what-if
    assert served.ask("strategy", model="gpt2", cluster="2xA100", batch=4)["fits"]
    assert served.request("POST", "stop", {"id": "unknown"})[2] == '{"stopped":false}'
    assert served.request("POST", "stop", {"id": names[0]})[2] == '{"stopped":true}'
    event = "better"
    while event == "better":
        event, data = first.next()
    assert event == "answer"
    assert data["numbers"]["status"] == "stopped"
    assert data["numbers"]["makespan"] > 0
    assert data["view"]
    # the other one still runs, until its browser goes
    worker = served.live.running[names[1]]
    second.close()
    served_until(lambda: names[1] not in served.live.running)
    served_until(lambda: worker.is_free or not worker.alive)
    first.close()


def served_until(fact, tries=600):
    """Wait for what the server does after its answer."""
    for _ in range(tries):
        if fact():
            return
        time.sleep(0.05)
    raise AssertionError("it does not happen")


def test_a_worker_that_is_killed_is_one_sentence_and_replaced(served):
    stream = Stream(served.port, LONG)
    _, data = stream.next()
    os.kill(served.live.running[data["id"]].process.pid, signal.SIGKILL)
    event = "better"
    while event == "better":
        event, data = stream.next()
    assert data["refused"] == "the process that searched has ended (code -9); ask again"
    stream.close()


def test_too_many_searches_at_once_are_refused(served):
    most, served.live.searching.most = served.live.searching.most, 0
    free, served.live.searching._free = served.live.searching._free, []
    try:
        status, _, text = served.request("POST", "search", LONG)
    finally:
        served.live.searching.most, served.live.searching._free = most, free
    assert status == 503
    assert "are being answered; stop one, or wait" in json.loads(text)["refused"]


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            children.append(int(stat.parent.name))
    return children


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_page(ending):
    command = [sys.executable, "-m", "partita", "serve", "--json", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["format"] == "partita/serve@1"
        _, _, _, token, _ = told["url"].split("/")
        port = int(told["url"].split("/")[2].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", f"/{token}/search", json.dumps(LONG))
        response = connection.getresponse()
        assert b"started" in response.readline()
        workers = children(process.pid)
        assert len(workers) >= 2
        process.send_signal(ending)
        code = process.wait(30)
        assert code == (0 if ending == signal.SIGINT else -9)
        served_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        connection.close()


def test_a_process_that_does_not_end_in_time_is_ended(monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0.0)  # it has not even loaded by then

    async def borrowed_and_given_back() -> tuple[workers.Workers, int | None]:
        pool = workers.Workers(1)
        worker = await pool.borrow(30)
        answers = worker.answer(SimulateAsk("alexnet", "1xA100", 1))
        asking = asyncio.ensure_future(anext(answers))
        while worker.is_free:
            await asyncio.sleep(0)
        asking.cancel()
        pool.give_back(worker)
        again = await pool.borrow(30)  # the pool has room for one only
        assert again is not worker
        await pool.close()
        return pool, worker.process.returncode

    pool, code = asyncio.run(borrowed_and_given_back())
    assert code == -signal.SIGKILL
    assert not pool.all
