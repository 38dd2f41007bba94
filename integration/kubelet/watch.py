"""Watchers that miss nothing: of CSINode, and of the registration folder.

Times are `time.monotonic()` seconds throughout.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import pathlib
import ssl
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

DRIVER_NAME = "mounting.csi-warden.example"
NODE = "node1"
# The machine may be busy: a wait ends with what it waits for, and this only bounds it.
PATIENCE = 60.0


class Failed(Exception):
    """A check did not see what it should have."""


def wait_until(what: str, happened: Callable[[], object], patience: float = PATIENCE, pause: float = 0.02):
    """Returns the first true answer of `happened`."""
    end = time.monotonic() + patience
    while True:
        if answer := happened():
            return answer
        if time.monotonic() > end:
            raise Failed(f"not within {patience:.0f} s: {what}")
        time.sleep(pause)


class Api:
    """The API server, as an administrator."""

    def __init__(self, port: int):
        self.port = port
        self.tls = ssl._create_unverified_context()  # loopback, and a certificate of a minute ago
        self.headers = {"Authorization": "Bearer admintoken", "Content-Type": "application/json"}

    def call(self, method: str, path: str, body: object = None, content_type: str | None = None) -> dict:
        headers = dict(self.headers)
        if content_type:
            headers["Content-Type"] = content_type
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20, context=self.tls) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.msg = f"{error.msg}: {error.read().decode(errors='replace')}"  # it says which field
            raise

    def find(self, path: str) -> dict | None:
        """The object, or None where there is none."""
        try:
            return self.call("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def stream(self, path: str) -> Iterator[dict]:
        """The events of one watch, until the server ends it."""
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.tls)
        try:
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"HTTP {answer.status}")
            while line := answer.readline():
                yield json.loads(line)
        finally:
            connection.close()


class CsiNodeWatch:
    """When the driver came to and went from CSINode: `changes` is a list of (time, present)."""

    PATH = f"/apis/storage.k8s.io/v1/csinodes?fieldSelector=metadata.name%3D{NODE}&watch=true&timeoutSeconds=3600"

    def __init__(self, api: Api):
        self.api = api
        self.changes: list[tuple[float, bool]] = []
        self.present = False
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while True:
            try:
                for event in self.api.stream(self.PATH):
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self._see(time.monotonic(), event["object"])
            except (OSError, ValueError, http.client.HTTPException):
                time.sleep(0.1)  # the API server is away; what it says when it is back comes as ADDED

    def _see(self, now: float, csi_node: dict) -> None:
        present = any(driver["name"] == DRIVER_NAME for driver in csi_node["spec"].get("drivers") or [])
        if present != self.present:
            self.changes.append((now, present))
            self.present = present

    def since(self, then: float) -> list[tuple[float, bool]]:
        return [change for change in self.changes if change[0] >= then]

    def removals(self, then: float) -> int:
        return sum(not present for _, present in self.since(then))

    def wait(self, present: bool, then: float | None = None, patience: float = PATIENCE) -> float:
        """When the driver came or went; with `then`, for the first time since."""
        word = "with" if present else "without"
        if then is None:
            wait_until(f"CSINode {word} the driver", lambda: self.present == present, patience)
            return time.monotonic()
        return wait_until(
            f"CSINode {word} the driver",
            lambda: next((at for at, now_present in self.since(then) if now_present == present), None),
            patience,
        )


class FolderWatch:
    """What happened at one path of a folder: `events` is a list of (time, "shown" or "gone"), by inotify."""

    CREATE, DELETE, MOVED_FROM, MOVED_TO = 0x100, 0x200, 0x40, 0x80

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.events: list[tuple[float, str]] = []
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_CLOEXEC)
        mask = self.CREATE | self.DELETE | self.MOVED_FROM | self.MOVED_TO
        if self.fd < 0 or libc.inotify_add_watch(self.fd, os.fsencode(path.parent), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while block := os.read(self.fd, 65536):
            now, offset = time.monotonic(), 0
            while offset < len(block):
                _, mask, _, length = struct.unpack_from("iIII", block, offset)
                offset += 16
                name = block[offset : offset + length].rstrip(b"\0").decode()
                offset += length
                if name == self.path.name:
                    self.events.append((now, "shown" if mask & (self.CREATE | self.MOVED_TO) else "gone"))

    def since(self, then: float) -> list[tuple[float, str]]:
        return [event for event in self.events if event[0] >= then]

    def wait(self, what: str, then: float, patience: float = PATIENCE) -> float:
        """When the path was first `what` since `then`."""
        return wait_until(
            f"registration socket {what}",
            lambda: next((at for at, event in self.since(then) if event == what), None),
            patience,
            0.001,
        )
