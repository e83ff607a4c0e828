"""The output of `limitforge demo`, and the commands that it prints."""

import http.client
import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from tests.cli.command import ENVIRONMENT, INSTALLED_PROGRAM
from tests.postgres import PostgresServer
from tests.service.program import run_demo

ROOT = Path(__file__).parents[2]


def test_the_line_that_it_prints_works_ten_times_and_then_is_refused() -> None:
    with subprocess.Popen(
        [INSTALLED_PROGRAM, "demo", "--port", "0"],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            text = ""
            while "-d '" not in text:
                line = process.stdout.readline()
                assert line, "it ended before it text what to try"
                text += line
            words = shlex.split(text[text.index("curl ") :].replace("\\\n", ""))
            url = urlsplit(next(word for word in words if word.startswith("http://")))
            headers = dict(words[index + 1].split(": ") for index, word in enumerate(words) if word == "-H")
            body = words[words.index("-d") + 1]
            connection = http.client.HTTPConnection(url.netloc, timeout=30)
            statuses = []
            for _ in range(30):
                connection.request("POST", url.path, body, headers)
                answer = connection.getresponse()
                statuses.append(answer.status)
                assert "allowed" in json.load(answer)
            connection.close()
            assert statuses[:10] == [200] * 10
            assert 429 in statuses
        finally:
            process.send_signal(signal.SIGINT)
        _, ended = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Stopped." in ended
    assert "Traceback" not in ended


def test_make_demo_is_the_same() -> None:
    """The command of the README, except for the port."""
    command = ["make", "--silent", "demo", "ARGS=--port 0 --json"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            made = json.loads(next(line for line in process.stdout if line.startswith("{")))
            assert made.keys() >= {"base_url", "admin_token", "tenant_id", "api_key", "plans"}
            connection = http.client.HTTPConnection(urlsplit(made["base_url"]).netloc, timeout=30)
            headers = {"x-api-key": made["api_key"], "content-type": "application/json"}
            connection.request("POST", "/v1/check", '{"resource": "GET:/orders", "subject": "user:42"}', headers)
            answer = connection.getresponse()
            assert (answer.status, json.load(answer)["remaining"]) == (200, 9)
            connection.close()
        finally:
            process.send_signal(signal.SIGTERM)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            for child in children.read_text().split() if children.exists() else ():
                os.kill(int(child), signal.SIGTERM)


def test_it_runs_on_a_database_of_ones_own(postgres_url: str, postgres_server: PostgresServer) -> None:
    url = postgres_url.replace("postgresql://", "postgresql+asyncpg://")
    with run_demo("--database", url) as first:
        assert first.check().status == 200
    with run_demo("--database", url) as second:  # replaces the first
        assert second.check().status == 200
        assert second.check(key=first.key).status == 401
        assert set(second.demo["plans"]) >= {"free", "pro", "enterprise", "token_bucket", "quota"}
    assert postgres_server.running
