#!/usr/bin/env python3
"""Measures calls through proxies against direct ones. Started by `run`, whose head says what it prints.

All rows share both ends, a driver and a caller of grpc-go, and take turns in each round, because a machine is never quiet.
A ratio is to the direct row of the same round; the table has the median over the rounds. "CPU us" is what the proxy itself
takes for a call, the steadiest of these figures. MB is 1 000 000 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
PATTERNS = {"kubelet": "connect, one call, close", "one": "one connection, 1 in flight", "many": "one connection, 32 in flight"}
MIN_THROUGHPUT, MAX_GROWTH_MB, HELD = 0.75, 1.0, 1_000
TICK = 1 / os.sysconf("SC_CLK_TCK")
STRETCH = {"one": 1.4, "kubelet": 1.5}  # p50 against direct; wished for, not required


class Failed(Exception):
    """Something did not come up."""


@dataclass
class Way:
    """One way to the driver, and the processes that it takes: `pid` and its children."""

    name: str
    socket: pathlib.Path
    pid: int = 0


    def cpu(self) -> float:
        """Seconds of CPU so far, those of children that have ended included."""
        if not self.pid:
            return 0.0
        children = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ticks = 0
        for pid in [self.pid, *children]:
            try:
                after_name = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # a child of socat's; it is counted with what has ended
                continue
            ticks += sum(int(word) for word in after_name[11 : 15 if int(pid) == self.pid else 13])
        return ticks * TICK


class Bed:
    """A driver, and before it the proxies, each in a folder of its own."""

    def __init__(self, root: pathlib.Path, args: argparse.Namespace):
        self.root, self.args = root, args
        self.children: list[subprocess.Popen] = []
        self.driver = root / "csi.sock"
        self.children.append(subprocess.Popen([args.load, "serve", self.driver]))
        end = time.monotonic() + 10
        while not self.driver.exists():
            if time.monotonic() > end:
                raise Failed("the driver did not come up")
            time.sleep(0.01)

    def stand(self, name: str, words: str) -> Way:
        folder = self.root / name
        folder.mkdir()
        link = folder / "csi.sock"
        link.symlink_to(self.driver)
        command = [self.args.stand, "--before", link, "--through", words]
        child = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
        self.children.insert(0, child)
        line = child.stdout.readline().split()
        if len(line) != 2:
            raise Failed(f"{name} did not come up")
        return Way(name, pathlib.Path(line[1]), int(line[0]))

    def ways(self) -> list[Way]:
        found = [Way("direct", self.driver)]
        if shutil.which("socat"):
            found.append(self.stand("socat", "socat UNIX-LISTEN:$PROXY,fork,backlog=1024 UNIX-CONNECT:$DRIVER"))
        if shutil.which("nginx"):
            found.append(self.stand("nginx", str(HERE / "nginx.sh")))
        for peer in self.args.peer:
            name, _, words = peer.partition("=")
            found.append(self.stand(name, words))
        return [*found, self.ours("ours")]

    def ours(self, folder: str) -> Way:
        way = self.stand(folder, self.args.ours)
        way.name = "ours"
        return way

    def close(self) -> None:
        for child in self.children:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class Bounds:
    """Lines of the kind PASS and FAIL, and their sum."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def say(self, good: bool, text: str) -> None:
        self.passed += good
        self.failed += not good
        print(f"{'PASS' if good else 'FAIL'} {text}", flush=True)


def call(args: argparse.Namespace, way: Way, pattern: str, length: str) -> dict:
    command = [args.load, "call", str(way.socket), pattern, length]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise Failed(f"{way.name}, {pattern}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def rows(args: argparse.Namespace, ways: list[Way], pattern: str, bounds: Bounds) -> None:
    """One part of the table."""
    seen: dict[str, list[dict]] = {way.name: [] for way in ways}
    for turn in range(args.rounds):
        order = ways if turn % 2 == 0 else ways[::-1]
        for way in order:
            before = way.cpu()
            outcome = call(args, way, pattern, f"{args.seconds / args.rounds:.3f}")
            seen[way.name].append({**outcome, "cpu": way.cpu() - before})
    line(PATTERNS[pattern], ["calls/s", "p50 us", "p99 us", "x calls/s", "x p50", "x p99", "CPU us", "failed"])
    ratios: dict[str, dict[str, float]] = {}
    for name, rounds in seen.items():
        for one in rounds:
            one["rate"] = one["calls"] / one["seconds"]
        pairs = list(zip(rounds, seen["direct"], strict=True))
        keys = ("rate", "p50", "p99")
        ratios[name] = {key: statistics.median(one[key] / direct[key] for one, direct in pairs) for key in keys}
        values = [statistics.median(one[key] for one in rounds) for key in keys]
        failed = sum(one["failed"] for one in rounds)
        cells = [f"{value:.0f}" for value in values] + [f"{ratios[name][key]:.2f}" for key in keys]
        cpu = sum(one["cpu"] for one in rounds) / max(1, sum(one["calls"] for one in rounds)) * 1e6
        line(f"  {name}", [*cells, f"{cpu:.0f}" if cpu else "-", str(failed)])
        if name in ("direct", "ours"):
            first = next((one["error"] for one in rounds if one["failed"]), "")
            if failed:
                bounds.say(False, f"{pattern}, {name}: {failed} calls failed, the first with {first}")
    judge(pattern, seen, ratios, bounds)


def judge(pattern: str, seen: dict[str, list[dict]], ratios: dict[str, dict[str, float]], bounds: Bounds) -> None:
    if "nginx" in seen:
        against = statistics.median(mine["rate"] / its["rate"] for mine, its in zip(seen["ours"], seen["nginx"], strict=True))
        bounds.say(against >= 1, f"{pattern}: {against:.2f} times nginx's calls a second, at least 1")
    else:
        print(f"{pattern}: no nginx here to compare with")
    if pattern == "many":
        rate = ratios["ours"]["rate"]
        bounds.say(rate >= MIN_THROUGHPUT, f"{pattern}: {rate:.2f} of the direct calls a second, at least {MIN_THROUGHPUT}")
    if pattern in STRETCH:
        p50 = ratios["ours"]["p50"]
        word = "reached" if p50 <= STRETCH[pattern] else "not reached"
        print(f"{pattern}: p50 {p50:.2f} times direct; wished for {STRETCH[pattern]}: {word}")
    print(flush=True)


def line(name: str, cells: list[str]) -> None:
    print(f"{name:30}" + "".join(f"{cell:>11}" for cell in cells), flush=True)


def memory(pid: int) -> tuple[float, float]:
    """RSS and its anonymous part, MB."""
    fields = dict(text.split(":", 1) for text in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    rss, anonymous = (int(fields[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon"))
    return rss, anonymous


def footprint(bed: Bed, bounds: Bounds) -> None:
    """A proxy of ours that has done nothing yet."""
    args, way = bed.args, bed.ours("memory")
    line("memory of ours, MB", ["RSS", "anonymous"])

    def told(what: str) -> float:
        time.sleep(1)  # it has come to rest
        rss, anonymous = memory(way.pid)
        line(f"  {what}", [f"{rss:.2f}", f"{anonymous:.2f}"])
        return anonymous

    told("at rest")
    call(args, way, "kubelet", "2000calls")
    call(args, way, "many", "2000calls")
    before = told("after 4000 calls")
    call(args, way, "kubelet", f"{args.count // 2}calls")
    call(args, way, "many", f"{args.count - args.count // 2}calls")
    after = told(f"after {args.count} more")
    ends = told_while_held(args, way, told)
    bounds.say(after - before <= MAX_GROWTH_MB, f"memory: {after - before:+.2f} MB over {args.count} calls, at most {MAX_GROWTH_MB}")
    print(f"memory: {HELD} connections cost {(ends[0] - after) * 1000 / HELD:.1f} kB each; {ends[1] - after:+.2f} MB once they are closed")


def told_while_held(args: argparse.Namespace, way: Way, told) -> tuple[float, float]:
    command = [args.load, "hold", str(way.socket), str(HELD)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if holder.stdout.readline().strip() != "held":
            raise Failed(f"{HELD} connections could not be opened")
        held = told(f"with {HELD} connections open")
    finally:
        holder.stdin.close()
        holder.wait(30)
    return held, told("once they are closed")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True)
    parser.add_argument("--stand", required=True)
    parser.add_argument("--ours", default="")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=WORDS")
    args = parser.parse_args()
    args.only = args.only.split(",") if args.only else [*PATTERNS, "memory"]
    unknown = set(args.only) - {*PATTERNS, "memory"}
    if unknown or args.rounds < 1 or args.seconds <= 0:
        parser.error(f"--only takes {', '.join([*PATTERNS, 'memory'])}; --rounds and --seconds are above 0")
    return args


def main() -> int:
    args, bounds = arguments(), Bounds()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="csi-b.", dir="/tmp") as folder:  # short, because a socket's path is
        bed = None
        try:
            bed = Bed(pathlib.Path(folder), args)
            patterns = [pattern for pattern in PATTERNS if pattern in args.only]
            if patterns:
                ways = bed.ways()
                for pattern in patterns:
                    rows(args, ways, pattern, bounds)
            if "memory" in args.only:
                footprint(bed, bounds)
        except (Failed, OSError) as why:
            bounds.say(False, str(why))
        finally:
            if bed:
                bed.close()
    print(f"{bounds.passed} passed, {bounds.failed} failed", flush=True)
    return 1 if bounds.failed else 0


if __name__ == "__main__":
    sys.exit(main())
