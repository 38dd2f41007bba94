#!/usr/bin/env python3
"""Figures of the agent under a real kubelet: median and worst of many rounds. Started by `run --figures`.

Times come from inotify on the registration folder and from a watch of CSINode. The kubelet looks at the folder's
changes once a second, so its part of each time is up to a second and not the agent's.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import statistics
import sys
import threading
import time

from bed import Bed, Process
from watch import wait_until

HOLD = 2.0


class Table:
    """Rows of samples, printed as they come."""

    def __init__(self) -> None:
        print(f"{'figure':58} {'median':>10} {'worst':>10} {'rounds':>6}", flush=True)

    def row(self, name: str, samples: list[float], unit: str = "ms", scale: float = 1000) -> None:
        median, worst = statistics.median(samples) * scale, max(samples) * scale
        print(f"{name:58} {median:7.2f} {unit:2} {worst:7.2f} {unit:2} {len(samples):6}", flush=True)

    def value(self, name: str, text: str) -> None:
        print(f"{name:58} {text:>10}", flush=True)


def health_rounds(bed: Bed, table: Table, rounds: int) -> None:
    """Deregistration and recovery, over and over."""
    bed.start_agent(f"--recovery-hold={HOLD:.0f}s", f"--max-recovery-hold={HOLD:.0f}s", fresh=True)
    gone, left, left_after, shown, back, back_after = [], [], [], [], [], []
    for _ in range(rounds):
        bed.csi_node.wait(True)
        bed.agent.wait_http("/registered", 200)
        # The kubelet looks once a second; a round must not always meet it at the same point of that second.
        time.sleep(random.random())
        decided = bed.health.fail()
        at = bed.folder.wait("gone", decided - 1)
        removed = bed.csi_node.wait(False, decided - 1)
        gone.append(at - decided)
        left.append(removed - decided)
        left_after.append(removed - at)
        time.sleep(1 + random.random())
        stop = threading.Event()
        first = bed.health.write("OK")
        writer = threading.Thread(target=lambda: [bed.health.write("OK") for _ in iter(lambda: stop.wait(0.25), True)])
        writer.start()
        at = bed.folder.wait("shown", first)
        added = bed.csi_node.wait(True, first)
        stop.set()
        writer.join()
        shown.append(at - first - HOLD)
        back.append(added - first - HOLD)
        back_after.append(added - at)
    table.row("deciding ERROR written -> socket unlinked", gone)
    table.row("deciding ERROR written -> CSINode without the driver", left)
    table.row("  of it the kubelet's: socket unlinked -> CSINode", left_after)
    table.row("first OK written -> socket shown, without the hold", shown)
    table.row("first OK written -> CSINode has the driver, without hold", back)
    table.row("  of it the kubelet's: socket shown -> CSINode", back_after)
    bed.end_agents()


def starts(bed: Bed, table: Table, name: str, rounds: int, *, health: bool) -> None:
    """From exec to the socket, with a driver that is ready."""
    samples = []
    for _ in range(rounds):
        bed.health.write("OK")
        agent = bed.start_agent(health=health, fresh=True)
        samples.append(bed.folder.wait("shown", agent.started) - agent.started)
        agent.send(signal.SIGTERM)
        wait_until("the socket gone", lambda: not bed.identity())
    table.row(f"{name}: started -> socket shown", samples)


def mount_times(bed: Bed, table: Table, rounds: int) -> None:
    """Pods with a staged volume, by turns through the proxy and without it."""
    ways = {"through the proxy": ["--on-unhealthy=fence"], "without": ["--proxy=off"]}
    mounted: dict[str, list[float]] = {way: [] for way in ways}
    running: dict[str, list[float]] = {way: [] for way in ways}
    bed.health.write("OK")
    for turn in range(2):
        for way, flags in ways.items():
            bed.end_agents()
            agent = bed.start_agent(*flags, fresh=True)
            agent.wait_http("/registered", 200)
            for index in range((rounds + 1) // 2):
                name = f"mount-{way.split()[0]}-{turn}-{index}"
                bed.create_claim(name)
                then = time.monotonic()
                with bed.pod(name, claim=name):
                    wait_until("it runs", lambda name=name: "running" in bed.container_of(name).get("state", {}))
                    running[way].append(time.monotonic() - then)
                mounted[way].append(mount_time(bed, name))
    for way in ways:
        table.row(f"{way}: the kubelet stages and publishes a volume", mounted[way])
        table.row(f"{way}: pod created -> its container runs", running[way])
    bed.end_agents()


def mount_time(bed: Bed, volume: str) -> float:
    """How long the kubelet took by its own log, from its decision to the volume published."""

    def seconds(words: str) -> float:
        line = next(line for line in lines if words in line and f'for volume \\"{volume}\\"' in line)
        hours, minutes, rest = line.split()[1].split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(rest)

    lines = (bed.root / "log/kubelet.log").read_text(errors="replace").splitlines()
    return (seconds("MountVolume.SetUp succeeded") - seconds("MountVolume started")) % 86400


def footprint(bed: Bed, table: Table, name: str, *, health: bool) -> None:
    """Memory and threads at rest, after a registration."""
    agent = bed.start_agent(health=health, fresh=True)
    bed.csi_node.wait(True, agent.started)
    time.sleep(5)
    fields = status(agent)
    table.value(f"{name}: VmRSS at rest", f"{int(fields['VmRSS'].split()[0]) / 1024:.2f} MiB")
    table.value(f"{name}: RssAnon at rest", f"{int(fields['RssAnon'].split()[0]) / 1024:.2f} MiB")
    table.value(f"{name}: threads", fields["Threads"])
    table.value(f"{name}: binary", f"{os.path.getsize(bed.agent_binary) / 1048576:.2f} MiB")
    agent.send(signal.SIGTERM)
    bed.csi_node.wait(False)


def status(process: Process) -> dict[str, str]:
    lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="the cluster's folder")
    parser.add_argument("--agent", required=True, help="the binary to measure")
    parser.add_argument("--driver", required=True, help="the mounting-driver binary")
    args = parser.parse_args()
    rounds = int(os.environ.get("ROUNDS", "20"))
    registrar = os.environ.get("REGISTRAR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bed = Bed(args.dir, args.agent, args.driver, os.environ.get("AGENT_KIND", "csi-warden"))
    try:
        bed.start_driver()
        table = Table()
        if bed.has_health:
            bed.health.write("OK")
            mount_times(bed, table, rounds)
            health_rounds(bed, table, rounds)
            starts(bed, table, "csi-warden, health file", rounds, health=True)
            footprint(bed, table, "csi-warden, health file", health=True)
        starts(bed, table, "csi-warden, no health file", rounds, health=False)
        footprint(bed, table, "csi-warden, no health file", health=False)
        if registrar:
            bed.agent_binary = registrar
            starts(bed, table, "other registrar", rounds, health=False)
            footprint(bed, table, "other registrar", health=False)
    finally:
        bed.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
