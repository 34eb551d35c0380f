"""Notices that no signal brings: polled, each behind the same small protocol.

A cloud tells a spot machine of its end in its metadata service and sends no signal. Paths and headers of AWS: EC2's
instance metadata, version 2 (a session token, then `spot/instance-action`; 404 while there is none).
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from samerun.core.clock import Clock, SystemClock
from samerun.core.units import parse_seconds
from samerun.errors import UsageError
from samerun.preempt.flag import StopFlag

_HTTP_SECONDS: Final = 2.0
_TOKEN_SECONDS: Final = 21_600


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """This machine will end. `seconds_left` counts from now; None where the source does not say."""

    reason: str
    seconds_left: float | None


class NoticeSource(Protocol):
    """Something that may know of this machine's end. Write your own: these two members are all that is asked."""

    every_seconds: float

    def poll(self) -> Notice | None:
        """The notice, or None while there is none. Raises OSError or ValueError when it cannot tell."""


class FileNotice:
    """A file that an operator or a hook creates; its text may say how long there is (`90s`), else nobody knows."""

    def __init__(self, path: str | Path, *, every_seconds: float = 1.0) -> None:
        self._path = Path(path)
        self.every_seconds = every_seconds

    def poll(self) -> Notice | None:
        try:
            text = self._path.read_text().strip()
        except FileNotFoundError:
            return None
        return Notice(reason=f"file {self._path}", seconds_left=parse_seconds(text) if text else None)


class AwsSpotNotice:
    """EC2's interruption notice: two minutes, best effort. Polled every five seconds, as AWS advises."""

    link: Final = "aws-spot"
    """Its name in a kill chain."""

    def __init__(
        self, *, url: str = "http://169.254.169.254", every_seconds: float = 5.0, clock: Clock | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self.every_seconds = every_seconds
        self._clock = clock or SystemClock()

    def poll(self) -> Notice | None:
        token = self._ask("/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)})
        try:
            text = self._ask("/latest/meta-data/spot/instance-action", "GET", {"X-aws-ec2-metadata-token": token})
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        action = json.loads(text)
        end = datetime.strptime(action["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
        return Notice(reason=f"AWS spot {action['action']}", seconds_left=end - self._clock.wall_seconds())

    def _ask(self, path: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(self._url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=_HTTP_SECONDS) as answer:
            return str(answer.read(65_536).decode())


class SourceWatch:
    """Polls sources in one thread until one has a notice; a source that cannot tell is named once and asked again."""

    def __init__(self, flag: StopFlag, sources: Sequence[NoticeSource], *, say: Callable[[str], None]) -> None:
        for source in sources:
            if not source.every_seconds > 0:
                raise UsageError(f"{type(source).__name__}: every_seconds must be positive, got {source.every_seconds}")
        self._flag = flag
        self._sources = list(sources)
        self._say = say
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._poll, args=(source,), name=f"samerun-{type(source).__name__}", daemon=True)
            for source in self._sources
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _poll(self, source: NoticeSource) -> None:
        complained = False
        while not self._ended.is_set():
            try:
                notice = source.poll()
            except (OSError, ValueError, KeyError) as error:
                notice = None
                if not complained:
                    complained = True
                    self._say(f"notice source {type(source).__name__} cannot tell: {error}; asking again")
            if notice is not None:
                self._flag.note(notice.reason, seconds_left=notice.seconds_left)
                return
            self._ended.wait(source.every_seconds)
