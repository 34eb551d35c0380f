"""Polled notices: a file, and AWS's metadata paths against a real local HTTP server that speaks them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from samerun.core.clock import ManualClock
from samerun.errors import UsageError
from samerun.preempt.flag import StopFlag
from samerun.preempt.sources import AwsSpotNotice, FileNotice, SourceWatch

TOKEN = "a-session-token"


class Metadata(BaseHTTPRequestHandler):
    """Version 2 of the instance metadata: no answer without a token that was asked for with a lifetime."""

    action: str | None = None

    def do_PUT(self) -> None:
        good = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self._answer(200 if good else 400, TOKEN)

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            self._answer(401, "")
        elif self.path != "/latest/meta-data/spot/instance-action" or type(self).action is None:
            self._answer(404, "")
        else:
            self._answer(200, str(type(self).action))

    def log_message(self, *args: object) -> None:
        return None

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def metadata() -> Iterator[str]:
    Metadata.action = None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_aws_says_how_long_there_is(metadata: str) -> None:
    clock = ManualClock(seconds=0.0, wall_offset_seconds=1_796_000_000.0)  # 2026-11-30T00:53:20Z
    source = AwsSpotNotice(url=metadata, clock=clock)
    assert source.poll() is None
    Metadata.action = json.dumps({"action": "terminate", "time": "2026-11-30T00:55:20Z"})
    notice = source.poll()
    assert notice is not None
    assert (notice.reason, notice.seconds_left) == ("AWS spot terminate", 120.0)


def test_a_watch_turns_a_notice_into_the_flag(metadata: str, tmp_path: Path) -> None:
    flag, said = StopFlag(), []
    file = FileNotice(tmp_path / "stop", every_seconds=0.01)
    watch = SourceWatch(flag, [AwsSpotNotice(url=metadata, every_seconds=0.01), file], say=said.append)
    watch.start()
    assert not flag.wait(0.1)
    (tmp_path / "stop").write_text("90s")
    assert flag.wait(10)
    watch.stop()
    left = flag.seconds_left()
    assert left is not None and 80 < left <= 90
    assert flag.stop is not None and flag.stop.reason == f"file {tmp_path / 'stop'}"
    assert said == []


def test_a_source_that_cannot_tell_is_named_once(tmp_path: Path) -> None:
    class Broken:
        every_seconds = 0.001
        asked = 0

        def poll(self) -> None:
            type(self).asked += 1
            if type(self).asked == 5:
                enough.set()
            raise OSError("no route")

    enough, said = threading.Event(), []
    watch = SourceWatch(StopFlag(), [Broken()], say=said.append)
    watch.start()
    assert enough.wait(10)
    watch.stop()
    assert said == ["notice source Broken cannot tell: no route; asking again"]


def test_an_empty_file_says_stop_but_not_when(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    notice = FileNotice(tmp_path / "stop").poll()
    assert notice is not None and notice.seconds_left is None


def test_a_source_polled_never_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every_seconds must be positive"):
        SourceWatch(StopFlag(), [FileNotice(tmp_path, every_seconds=0)], say=print)
