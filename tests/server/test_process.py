"""The process: it answers while it loads, drains on a signal, and its exit code says how it ended."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("server_process.py")


class Process:
    def __init__(self, *arguments):
        self.child = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments], stderr=subprocess.PIPE, text=True
        )
        self.log = []

    def wait_for(self, pattern):
        while line := self.child.stderr.readline():
            self.log.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError("".join(self.log))

    def end(self):
        """(exit code, the rest of the log)"""
        rest = self.child.stderr.read()
        return self.child.wait(timeout=20), rest


@pytest.fixture
def start():
    processes = []

    def start(*arguments):
        processes.append(Process(*arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.child.kill()
        process.child.communicate()


def post(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        return response.read().decode()


def status(url):
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(start, number):
    process = start("20")
    url = process.wait_for(r"ready: serving fake at (\S+)/v1").group(1)
    body = {"prompt": "hi", "max_tokens": 60, "stream": True}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, f"{url}/v1/completions", body) for _ in range(4)]
        while 'num_requests_running{model_name="fake"} 4' not in _metrics(url):
            pass
        process.child.send_signal(number)
        process.wait_for("shutting down")
        assert status(f"{url}/ready") == 503
        texts = [answer.result() for answer in answers]
    assert all(text.count("data: ") == 61 and text.endswith("data: [DONE]\n\n") for text in texts)
    code, rest = process.end()
    assert code == 0, rest


def _metrics(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as response:
        return response.read().decode()


def test_a_second_signal_ends_it_at_once(start):
    process = start("60")
    url = process.wait_for(r"ready: serving fake at (\S+)/v1").group(1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, f"{url}/v1/completions", {"prompt": "hi", "max_tokens": 500})
        while 'num_requests_running{model_name="fake"} 1' not in _metrics(url):
            pass
        process.child.terminate()
        process.wait_for("shutting down")
        process.child.terminate()
        assert process.end()[0] == 128 + signal.SIGTERM
        assert answer.exception() is not None


def test_a_signal_while_loading_ends_it(start):
    process = start("60", "slow")
    url = process.wait_for(r"loading fake; (\S+) answers").group(1)
    assert (status(f"{url}/health"), status(f"{url}/ready")) == (200, 503)
    process.child.terminate()
    assert process.end()[0] == 0


def test_a_failure_to_load_is_one_line_and_exit_1(start):
    process = start("1", "fail")
    process.wait_for("loading fake")
    code, rest = process.end()
    assert code == 1
    assert rest == "jaxserve: error: no such weights\n"


def test_a_dead_engine_ends_the_process_with_exit_1(start):
    process = start("1", "die")
    process.wait_for("the engine has stopped")
    assert process.end()[0] == 1


def test_an_engine_that_hangs_ends_the_process_with_exit_1_and_shows_where_it_is(start):
    process = start("1", "hang")
    process.wait_for("a step has not ended in 11 s")
    code, rest = process.end()
    assert code == 1
    assert "most recent call first" in rest
    assert "run_forever" in rest


def test_the_admin_listener_is_a_port_of_its_own(start):
    process = start("1", "admin")
    admin = process.wait_for(r"admin listener at (http://127.0.0.1:\d+)").group(1)
    url = process.wait_for(r"ready: serving fake at (\S+)/v1").group(1)
    assert (status(f"{admin}/server_info"), status(f"{url}/server_info")) == (200, 404)
    assert post(f"{admin}/reset_prefix_cache", {}) == '{"status": "ok"}'
    process.child.terminate()
    assert process.end()[0] == 0


@pytest.mark.parametrize(("mode", "is_warned"), [("", False), ("open", True), ("open-with-key", False)])
def test_a_server_that_is_open_to_all_machines_says_so(start, mode, is_warned):
    process = start("1", *filter(None, [mode]))
    url = process.wait_for(r"ready: serving fake at (\S+)/v1; try it at ").group(1)
    assert process.log[-1].endswith(f"; try it at {url}/\n")
    warnings = [line for line in process.log if " WARNING " in line]
    assert len(warnings) == is_warned
    assert all("--api-key" in line and url in line for line in warnings)


def test_without_the_flag_there_is_no_admin_listener(start):
    process = start("1")
    process.wait_for("ready: serving")
    assert not any("admin" in line for line in process.log)


def test_requests_that_outlast_the_drain_get_an_error_and_the_exit_is_clean(start):
    process = start("0.5")
    url = process.wait_for(r"ready: serving fake at (\S+)/v1").group(1)
    with ThreadPoolExecutor(2) as pool:
        long = {"prompt": "hi", "max_tokens": 500, "stream": True}
        stream = pool.submit(post, f"{url}/v1/completions", long)
        whole = pool.submit(post, f"{url}/v1/completions", {**long, "stream": False})
        while 'num_requests_running{model_name="fake"} 2' not in _metrics(url):
            pass
        begun = time.monotonic()
        process.child.terminate()
        process.wait_for("shutting down")
        assert status(f"{url}/ready") == 503
        assert time.monotonic() - begun < 1
        *_, error, done, _ = stream.result().split("\n\n")
        assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == (
            "draining",
            "data: [DONE]",
        )
        assert whole.exception().code == 503
    code, rest = process.end()
    assert (code, "did not end in 0.5 s" in rest) == (0, True)
    assert time.monotonic() - begun < 5.5
