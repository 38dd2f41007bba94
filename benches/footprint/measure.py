#!/usr/bin/env python3
"""Measures the agent, and peers beside it. Started by `run`, whose head says what it prints.

All stand idle at the same time over one driver, each registered, each asked for /healthz every 10 s as a kubelet's liveness
probe does. MB is 1 000 000 bytes, KiB is 1024.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

import kubelet

HERE = pathlib.Path(__file__).resolve().parent
DRIVER_NAME = "footprint.csi-warden.example"
MAX_RSS_MB, MAX_ANONYMOUS_MB, MAX_BINARY_MB, MAX_CPU_SECONDS_IN_300, MAX_GROWTH_KIB = 8.0, 2.0, 9.0, 0.3, 256
STARTS = 15
CONNECTIONS = 4
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """Something did not come up."""


def wait_until(what: str, happened: Callable[[], object], patience: float = 20, pause: float = 0.01) -> None:
    end = time.monotonic() + patience
    while not happened():
        if time.monotonic() > end:
            raise Failed(f"not within {patience:.0f} s: {what}")
        time.sleep(pause)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def status(port: int) -> int:
    """The code at /healthz; 0 where nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Node:
    """One folder with a driver in it, a health file, and what is measured."""

    def __init__(self, root: pathlib.Path, driver: str):
        self.root, self.count = root, 0
        self.driver_socket, self.health = root / "csi.sock", root / "health" / "health"
        self.health.parent.mkdir()
        self.write_health()
        self.children: list[subprocess.Popen] = []
        self.spawn([driver, "--endpoint", self.driver_socket, "--name", DRIVER_NAME, "--node-id", "n"], "driver")
        wait_until("the driver's socket", self.driver_socket.exists)

    def write_health(self) -> None:
        draft = self.health.with_name(".draft")
        draft.write_text("OK\n")
        draft.rename(self.health)

    def spawn(self, command: list, name: str) -> subprocess.Popen:
        with open(self.root / f"{name}.log", "ab") as log:
            child = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.children.append(child)
        return child

    def end(self, child: subprocess.Popen) -> None:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        self.children.remove(child)

    def close(self) -> None:
        for child in list(self.children):
            self.end(child)


@dataclass
class Setup:
    """A binary and how it is run."""

    name: str
    binary: str
    flags: list[str]
    registers: bool = True
    ours: bool = True

    def start(self, node: Node) -> Running:
        node.count += 1
        return Running(self, node, f"{node.count}")


class Running:
    """One process of a setup."""

    def __init__(self, setup: Setup, node: Node, name: str):
        self.setup, self.node, self.port, self.name = setup, node, free_port(), name
        folder = node.root / f"reg-{name}"
        folder.mkdir()
        self.socket = folder / f"{DRIVER_NAME}-reg.sock"
        flags = [f"--csi-address={node.driver_socket}"]
        if setup.registers:
            flags += [f"--kubelet-registration-path={node.driver_socket}", f"--plugin-registration-path={folder}"]
            flags += [f"--http-endpoint=127.0.0.1:{self.port}"]
        else:
            flags += [f"--http-endpoint=127.0.0.1:{self.port}"]
        flags += [flag.replace("STATE", str(folder)).replace("PORT", str(free_port())) for flag in setup.flags]
        self.started = time.monotonic()
        self.child = node.spawn([setup.binary, *flags], f"agent-{name}")
        try:
            shown = self.socket.is_socket if setup.registers else lambda: status(self.port) == 200
            wait_until(f"{setup.name} ready", lambda: shown() or self.child.poll() is not None, pause=0.0002)
            self.ready_after = time.monotonic() - self.started
            if self.child.poll() is not None:
                raise Failed(f"{setup.name} ended with {self.child.returncode}: {self.log()}")
            if setup.registers:
                kubelet.register(self.socket)
            wait_until(f"{setup.name}: /healthz answers 200", lambda: status(self.port) == 200)
        except BaseException:
            self.end()
            raise

    def log(self) -> str:
        lines = (self.node.root / f"agent-{self.name}.log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:])

    def end(self) -> None:
        self.node.end(self.child)

    def fields(self) -> dict[str, str]:
        lines = pathlib.Path(f"/proc/{self.child.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def kib(self, name: str) -> int:
        return int(self.fields()[name].split()[0])

    def cpu(self) -> tuple[float, float]:
        """Seconds of CPU so far: its own, and those of the commands that it ran."""
        after_name = pathlib.Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        own_user, own_system, user, system = (int(ticks) * TICK for ticks in after_name[11:15])
        return own_user + own_system, user + system


@dataclass
class Row:
    """What was seen of one setup."""

    setup: Setup
    rss: float
    anonymous: float
    threads: int
    cpu: float
    children_cpu: float
    binary: float
    ready_ms: float


class Bounds:
    """Lines of the kind PASS and FAIL, and their sum."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def at_most(self, what: str, seen: float, bound: float, unit: str) -> None:
        self.say(seen <= bound, f"{what}: {seen:.2f} {unit}, at most {bound:.2f}")

    def say(self, good: bool, text: str) -> None:
        self.passed += good
        self.failed += not good
        print(f"{'PASS' if good else 'FAIL'} {text}", flush=True)


def setups(agent: str, peers: list[str], node: Node) -> list[Setup]:
    known = help_of(agent)
    health = [f"--health-file={node.health}", "--health-interval=1s", "--state-dir=STATE"]
    found = [Setup("registrar alone", agent, []), Setup("with a health file at 1 s", agent, health)]
    if "--config" in known and "--liveness-endpoint" in known:
        config = node.root / "config.yaml"
        text = (HERE / "three-probes.yaml").read_text()
        config.write_text(text.replace("DRIVER_SOCKET", str(node.driver_socket)))
        duty = [f"--config={config}", "--liveness-endpoint=127.0.0.1:PORT", "--state-dir=STATE"]
        found.append(Setup("livenessprobe's duty, 3 probes at 1 s", agent, duty))
    for peer in peers:
        name, _, binary = peer.partition("=")
        text = help_of(binary)
        if "kubelet-registration-path" in text:
            found.append(Setup(f"{name} (registrar)", binary, [], ours=False))
        elif "csi-address" in text:
            found.append(Setup(f"{name} (livenessprobe)", binary, [], registers=False, ours=False))
        else:
            raise Failed(f"--peer {peer}: its help names neither --kubelet-registration-path nor --csi-address")
    return found


def help_of(binary: str) -> str:
    try:
        done = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        raise Failed(f"{binary}: {error}") from None
    return done.stdout + done.stderr


def idle(node: Node, wanted: list[Setup], seconds: int, bounds: Bounds) -> list[Row]:
    """All of them side by side for so long; the health file is written every second, as a prober would."""
    ready = {}
    for setup in wanted:
        samples = []
        for _ in range(STARTS):
            try:
                one = setup.start(node)
            except Failed as why:
                bounds.say(False, str(why))
                break
            samples.append(one.ready_after)
            one.end()
        if len(samples) == STARTS:
            ready[setup.name] = statistics.median(samples) * 1000
    running = [setup.start(node) for setup in wanted if setup.name in ready]
    time.sleep(3)  # a start's work is not idling
    before = [one.cpu() for one in running]
    for second in range(seconds):
        time.sleep(1)
        node.write_health()
        if second % 10 == 9:
            for one in running:
                if status(one.port) != 200:
                    bounds.say(False, f"{one.setup.name}: /healthz is not 200: {one.log()}")
    rows = []
    for one, (own, children) in zip(running, before, strict=True):
        if one.child.poll() is not None:
            bounds.say(False, f"{one.setup.name} ended with {one.child.returncode}: {one.log()}")
            continue
        rss, anonymous = one.kib("VmRSS") * 1024 / 1e6, one.kib("RssAnon") * 1024 / 1e6
        own, children = one.cpu()[0] - own, one.cpu()[1] - children
        size = os.path.getsize(one.setup.binary) / 1e6
        threads = int(one.fields()["Threads"])
        rows.append(Row(one.setup, rss, anonymous, threads, own, children, size, ready[one.setup.name]))
        one.end()
    return rows


def table(rows: list[Row], seconds: int) -> None:
    line("", ["RSS MB", "anon. MB", "threads", "CPU s", "children s", "binary MB", "start ms"])
    for row in rows:
        memory = [f"{row.rss:.2f}", f"{row.anonymous:.2f}", f"{row.threads}"]
        cpu = [f"{row.cpu:.2f}", f"{row.children_cpu:.2f}"]
        line(row.setup.name, [*memory, *cpu, f"{row.binary:.2f}", f"{row.ready_ms:.1f}"])
    print(f"CPU: over {seconds} s at rest, its own and that of the commands it ran. Start: from exec to the registration")
    print(f"socket, or to a livenessprobe's first 200; median of {STARTS}\n", flush=True)


def ratios(rows: list[Row]) -> None:
    """Each peer, and all of them together, against ours: the plain registrar, and the one that does most."""
    ours, peers = [row for row in rows if row.setup.ours], [row for row in rows if not row.setup.ours]
    if not ours or not peers:
        return
    fields = ("rss", "anonymous", "threads", "cpu", "binary")

    def compare(name: str, them: list[Row], us: Row) -> None:
        pairs = [(sum(getattr(row, field) for row in them), getattr(us, field)) for field in fields]
        line(f"  {name}", [f"{theirs / mine:.1f}" if mine else "-" for theirs, mine in pairs])

    for us in ours:
        line(f"how many times {us.setup.name}", ["RSS", "anon.", "threads", "CPU", "binary"])
        for peer in peers:
            compare(peer.setup.name, [peer], us)
        if {row.setup.registers for row in peers} == {True, False}:
            compare("all of them together", peers, us)
    print(flush=True)


def line(name: str, cells: list[str]) -> None:
    print(f"{name:54}" + "".join(f"{cell:>11}" for cell in cells))


def bounds_of(rows: list[Row], seconds: int, bounds: Bounds) -> None:
    for row in rows:
        if row.setup.ours:
            name = row.setup.name
            bounds.at_most(f"{name}: RSS", row.rss, MAX_RSS_MB, "MB")
            bounds.at_most(f"{name}: anonymous", row.anonymous, MAX_ANONYMOUS_MB, "MB")
            bounds.at_most(f"{name}: binary", row.binary, MAX_BINARY_MB, "MB")
            # The kernel tells hundredths of a second.
            bound = max(MAX_CPU_SECONDS_IN_300 * seconds / 300, TICK)
            bounds.at_most(f"{name}: CPU in {seconds} s", row.cpu, bound, "s")


# --- growth ----------------------------------------------------------------------------------------------------------


def ask(port: int, times: int) -> None:
    """`GET /healthz` so often, over a few connections that are kept."""
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    wrong: list[str] = []

    def one(share: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            for _ in range(share):
                connection.sendall(request)
                answer = connection.recv(4096)
                if not answer.startswith(b"HTTP/1.1 200"):
                    wrong.append(answer[:60].decode(errors="replace"))
                    return

    shares = [times // CONNECTIONS + (index < times % CONNECTIONS) for index in range(CONNECTIONS)]
    threads = [threading.Thread(target=one, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise Failed(f"/healthz answered {wrong[0]!r}")


class Reads:
    """Counts how often a file is opened, by inotify."""

    IN_OPEN = 0x20

    def __init__(self, path: pathlib.Path):
        libc = ctypes.CDLL(None, use_errno=True)
        self.count, self.name = 0, path.name.encode()
        self.fd = libc.inotify_init1(os.O_CLOEXEC)
        if self.fd < 0 or libc.inotify_add_watch(self.fd, os.fsencode(path.parent), self.IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while block := os.read(self.fd, 1 << 20):
            offset = 0
            while offset < len(block):
                length = int.from_bytes(block[offset + 12 : offset + 16], sys.byteorder)
                self.count += block[offset + 16 : offset + 16 + length].rstrip(b"\0") == self.name
                offset += 16 + length


def growth_of_requests(node: Node, agent: str, times: int, bounds: Bounds) -> None:
    one = Setup("registrar alone", agent, []).start(node)
    ask(one.port, 2_000)  # buffers have found their size
    before, then = one.kib("RssAnon"), time.monotonic()
    ask(one.port, times)
    took, after = time.monotonic() - then, one.kib("RssAnon")
    one.end()
    print(f"anonymous memory over {times} health requests: {before} -> {after} KiB ({times / took:.0f} a second)")
    bounds.at_most(f"growth over {times} health requests", after - before, MAX_GROWTH_KIB, "KiB")


def growth_of_rounds(node: Node, agent: str, times: int, bounds: Bounds) -> None:
    node.write_health()
    reads = Reads(node.health)
    # 1 ms is what the runtime's timer can tell apart.
    flags = [f"--health-file={node.health}", "--health-interval=1ms", "--health-max-age=1h", "--state-dir=STATE"]
    one = Setup("health file at 1 ms", agent, [*flags, "--health-dead-after=2h"]).start(node)
    wait_until("2000 rounds", lambda: reads.count >= 2_000, 60)
    before, first, then = one.kib("RssAnon"), reads.count, time.monotonic()
    try:
        wait_until(f"{times} rounds", lambda: reads.count >= first + times, times / 200 + 10, 0.1)
    finally:
        rounds, took, after = reads.count - first, time.monotonic() - then, one.kib("RssAnon")
        one.end()
    print(f"anonymous memory over {rounds} probe rounds: {before} -> {after} KiB ({rounds / took:.0f} a second)")
    bounds.at_most(f"growth over {rounds} probe rounds", after - before, MAX_GROWTH_KIB, "KiB")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", required=True)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=BIN")
    return parser.parse_args()


def main() -> int:
    args, bounds = arguments(), Bounds()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="csi-f.", dir="/tmp") as folder:  # short, because a socket's path is
        node = Node(pathlib.Path(folder), args.driver)
        try:
            wanted = setups(args.agent, args.peer, node)
            rows = idle(node, wanted, args.seconds, bounds)
            table(rows, args.seconds)
            ratios(rows)
            bounds_of(rows, args.seconds, bounds)
            for growth in (growth_of_requests, growth_of_rounds):
                try:
                    growth(node, args.agent, args.count, bounds)
                except (Failed, OSError) as why:
                    bounds.say(False, f"{growth.__name__.replace('_', ' ')}: {why}")
        except Failed as why:
            bounds.say(False, str(why))
        finally:
            node.close()
    print(f"{bounds.passed} passed, {bounds.failed} failed", flush=True)
    return 1 if bounds.failed else 0


if __name__ == "__main__":
    sys.exit(main())
