#!/usr/bin/env python3
"""Checks the agent in a real kernel. Started by `run`; the last line is the sum.

A check is a function below with @check; its name on the command line is the function's with dashes. It starts from a
settled bed (port up, a new agent, driver registered), raises Failed or returns what it saw.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from bed import ANY, CARRIER, DISK, FABRIC, HOLD, Bed
from vm import Failed, Machine, pack

# What the figures must keep: DESIGN's promise, in seconds.
WORST_CONFIRMED = 1.4
MEDIAN_AT_ONCE = 0.1
# In milliseconds.
STOOD_STILL = 50
# How often a machine is booted whose kernel falls over before anything of ours runs.
BOOTS = 3


@dataclass
class Check:
    """One promise and how to see it kept."""

    name: str
    group: str
    boot: str
    run: Callable[[Bed], str]


CHECKS: list[Check] = []
ROUNDS = 20


def check(group: str, boot: str = ""):
    """Adds a function to the checks; `boot`: it needs a machine of its own, booted with these words."""

    def add(function: Callable[[Bed], str]) -> Callable[[Bed], str]:
        CHECKS.append(Check(function.__name__.replace("_", "-"), group, boot, function))
        return function

    return add


def expect(good: object, otherwise: object) -> None:
    """Fails the check unless `good`."""
    if not good:
        raise Failed(str(otherwise))


def recovers(bed: Bed, mended: float, hold: float = HOLD) -> str:
    """The socket comes back, and not before the hold is over."""
    bed.registered()
    shown = bed.changes()[-1]
    expect(shown[1] == "shown" and shown[0] - mended >= hold, f"back {shown[0] - mended:.2f} s after: {bed.changes()}")
    return f"back after {shown[0] - mended:.2f} s"


def port(said: dict, name: str = "rxe0/1") -> dict:
    """What a probe saw of one port."""
    observed = said["probes"][0]["observed"]
    expect(name in observed, f"no {name} among {observed}")
    return observed[name]


# --- the port --------------------------------------------------------------------------------------------------------


@check("port")
def healthy(bed: Bed) -> str:
    """A port that is up: registered, and `probe` tells what it saw of it."""
    status = bed.status()
    expect(status["health"]["verdict"] == "healthy", status["health"])
    code, said = bed.probe()
    expect(code == 0 and said["health"] == "healthy", said)
    seen = port(said)
    expect(seen.get("outcome") == "success", seen)
    table = bed.vm.sh("csi-warden probe --config /run/warden.yaml")
    expect("rxe0/1" in table, table)
    return f"{seen}"


@check("port")
def carrier_off(bed: Bed) -> str:
    """A pulled cable: PortDown, the socket gone; plugged in again: back after the hold."""
    cut = bed.unplug()
    bed.gone("PortDown")
    took = bed.changes()[-1][0] - cut
    code, said = bed.probe()
    expect(code == 1 and said["health"] == "unhealthy" and said["probes"][0]["reason"] == "PortDown", said)
    bed.vm.wait("the kubelet drops it", "tail -n 1 /tmp/node.log | grep -q ^deregistered")
    return f"gone after {took:.2f} s, {recovers(bed, bed.plug())}"


@check("port")
def link_down(bed: Bed) -> str:
    """`ip link set down` is an operator's act: AdminDown."""
    bed.vm.sh("ip link set dummy0 down")
    bed.gone("AdminDown")
    mended = bed.now()
    bed.vm.sh("ip link set dummy0 up")
    return recovers(bed, mended)


@check("port")
def blip(bed: Bed) -> str:
    """A cable out for a fifth of a second: one failure is none, and nothing happens."""
    bed.vm.sh(f"echo 0 > {CARRIER}; sleep 0.2; echo 1 > {CARRIER}")
    bed.stays_shown(4)
    return "nothing happened"


@check("port")
def last_address_removed(bed: Bed) -> str:
    """Without an address of its own, the port has the GID that the kernel makes of its MAC: fit for use."""
    bed.vm.sh("ip addr flush dev dummy0")
    bed.vm.wait("the GID goes", "grep -q 0000:0000:0000:0000:0000:0000:0000:0000 /sys/class/infiniband/rxe0/ports/1/gids/1")
    bed.stays_shown(4)
    return f"{port(bed.probe()[1])}"


@check("port")
def flaps(bed: Bed) -> str:
    """Twenty flaps in half a minute: damping holds, and the kubelet is hardly bothered."""
    for _ in range(20):
        bed.vm.sh(f"echo 0 > {CARRIER}; sleep 1.3; echo 1 > {CARRIER}; sleep 0.3")
    gone = [at for at, what in bed.changes() if what == "gone"]
    expect(1 <= len(gone) <= 3, f"gone {len(gone)} times: {bed.changes()}")
    bed.registered()
    return f"20 flaps, gone {len(gone)} times, back at the end"


# --- devices and their files -----------------------------------------------------------------------------------------


@check("device")
def device_deleted(bed: Bed) -> str:
    """One of two devices goes: DeviceGone; it is added again: back."""
    bed.vm.sh("ip link add dummy1 type dummy; ip link set dummy1 up; rdma link add rxe1 type rxe netdev dummy1")
    try:
        bed.settle(FABRIC.replace("rxe0", "rxe0, rxe1"))
        bed.vm.sh("rdma link delete rxe1")
        bed.gone("DeviceGone")
        mended = bed.now()
        bed.vm.sh("rdma link add rxe1 type rxe netdev dummy1")
        return recovers(bed, mended)
    finally:
        bed.vm.run("ip link del dummy1")


@check("device")
def all_devices_deleted(bed: Bed) -> str:
    """All of them go at once, as when a driver is loaded again: nothing is known, and the verdict is held."""
    bed.vm.sh("rdma link delete rxe0")
    bed.stays_shown(6)
    probe = bed.status()["probes"][0]
    expect((probe["outcome"], probe["reason"]) == ("unknown", "DriverReload"), probe)
    bed.vm.sh("rdma link add rxe0 type rxe netdev dummy0")
    bed.stays_shown(4)
    probe = bed.status()["probes"][0]
    expect(probe["outcome"] == "success", probe)
    return "held as DriverReload, and well again"


@check("device")
def verbs_missing(bed: Bed) -> str:
    """Without its uverbs node no program can use the port: VerbsMissing."""
    bed.vm.sh("rm /dev/infiniband/uverbs0")
    bed.gone("VerbsMissing")
    mended = bed.now()
    bed.vm.sh("mknod /dev/infiniband/uverbs0 c 231 192")
    return recovers(bed, mended)


@check("device")
def foreign_verbs_node(bed: Bed) -> str:
    """A node of another device under the right name is as good as none."""
    bed.vm.sh("rm /dev/infiniband/uverbs0; mknod /dev/infiniband/uverbs0 c 1 3")
    bed.gone("VerbsMissing")
    bed.vm.sh("rm /dev/infiniband/uverbs0")
    return "seen by its number"


# --- the disk --------------------------------------------------------------------------------------------------------


@check("disk")
def drive_warns(bed: Bed) -> str:
    """The drive says that it is no longer reliable (bit 2 of its critical warning): unhealthy, and back when it stops."""
    bed.settle(DISK)
    then = bed.now()
    bed.warn(4)
    bed.gone("ReliabilityDegraded")
    took = bed.changes()[-1][0] - then
    mended = bed.now()
    bed.warn(0)
    return f"gone after {took:.2f} s, {recovers(bed, mended)}"


@check("disk")
def drive_is_worn(bed: Bed) -> str:
    """The drive's endurance is read from it; by default it can only warn."""
    bed.settle(DISK.replace("smart: true", "smart: true, percentageUsed: {warn: 0}"))
    code, said = bed.probe()
    probe = said["probes"][0]
    expect(code == 0 and (probe["outcome"], probe["reason"]) == ("warning", "EnduranceUsed"), said)
    expect(probe["observed"]["nvme0"]["enduranceUsedPercent"] == 0, probe["observed"])
    bed.stays_shown(3)
    return probe["message"]


@check("disk")
def controller_resets(bed: Bed) -> str:
    """A controller that is reset comes back by itself: ten resets, and nothing happens."""
    bed.settle(DISK)
    bed.vm.sh("for i in 1 2 3 4 5 6 7 8 9 10; do echo 1 > /sys/class/nvme/nvme0/reset_controller; sleep 0.4; done")
    bed.stays_shown(3)
    code, said = bed.probe()
    expect(code == 0, said)
    return f"{said['probes'][0]['observed']['nvme0']}"


@check("disk")
def controller_removed(bed: Bed) -> str:
    """A drive that drops off the bus: DeviceGone; found again: back."""
    bed.settle(DISK)
    bed.vm.sh("echo 1 > $(readlink -f /sys/class/nvme/nvme0/device)/remove")
    bed.gone("DeviceGone")
    mended = bed.now()
    bed.vm.sh("echo 1 > /sys/bus/pci/rescan")
    return recovers(bed, mended)

# --- booted with a dead port -----------------------------------------------------------------------------------------


@check("boot", boot="carrier=off")
def booted_with_the_port_down(bed: Bed) -> str:
    """A node whose port is dead at boot does not register; the first cable in brings it up."""
    bed.start_agent(ANY)
    bed.vm.sh("sleep 14")  # the start grace is 10 s
    expect(not bed.changes(), f"the socket was shown: {bed.changes()}")
    status = bed.status()
    expect(status["health"]["verdict"] == "unhealthy" and "NoUsablePort" in status["health"]["causeReason"], status["health"])
    return f"not shown in 14 s; {recovers(bed, bed.plug())}"


# --- how fast --------------------------------------------------------------------------------------------------------


def cuts(bed: Bed, *flags: str) -> list[float]:
    """Pulls the cable over and over; returns how long the socket was there after each.

    A round in which the machine itself stood still says nothing of the agent. It is made again, up to as many as there should be.
    """
    bed.settle(FABRIC, *flags, "--max-recovery-hold=0s", hold=0)
    bed.vm.sh(f"(clock late {STOOD_STILL} >> /tmp/late.log 2>&1 & echo $! > /run/late.pid)")
    times: list[float] = []
    still = 0
    while len(times) < ROUNDS:
        # The period must not always be met at the same point.
        bed.vm.sh(f"sleep {0.5 + random.random():.2f}")
        cut = bed.unplug()
        bed.gone("PortDown")
        at, what = bed.changes()[-1]
        expect(what == "gone" and at >= cut, f"cut at {cut}: {bed.changes()[-3:]}")
        if any(cut <= end and end - lasted <= at for end, lasted in bed.stood_still()):
            still += 1
            expect(still <= ROUNDS, f"the machine stood still for over {STOOD_STILL} ms in {still} of {still + len(times)} rounds: it is too busy to measure")
        else:
            times.append(at - cut)
        # The kernel tells of a link at most once a second.
        bed.vm.sh("sleep 0.3")
        bed.plug()
        bed.shown()
    bed.vm.sh("kill $(cat /run/late.pid)")
    return times


def figure(times: list[float]) -> str:
    return f"carrier off to socket unlinked, of {len(times)}: median {statistics.median(times) * 1000:.0f} ms, worst {max(times) * 1000:.0f} ms"


@check("time")
def confirmed_in_time(bed: Bed) -> str:
    """With a confirmation after 1 s: at most 1.4 s, and never sooner than the confirmation."""
    times = cuts(bed)
    expect(max(times) <= WORST_CONFIRMED, f"{figure(times)}; promised {WORST_CONFIRMED} s at worst")
    expect(min(times) >= 1, f"unlinked after {min(times):.3f} s, and nothing was confirmed")
    return figure(times)


@check("time")
def at_once_in_time(bed: Bed) -> str:
    """With confirm-interval 0: a median of at most 100 ms."""
    times = cuts(bed, "--confirm-interval=0s")
    expect(statistics.median(times) <= MEDIAN_AT_ONCE, f"{figure(times)}; promised a median of {MEDIAN_AT_ONCE} s")
    return figure(times)


# ---------------------------------------------------------------------------------------------------------------------


def run(chosen: list[Check], boot: Callable[[str], Bed]) -> int:
    """Runs the checks, one machine for all that need none of their own; returns how many failed."""
    passed = failed = 0
    bed, booted = None, ""
    for one in sorted(chosen, key=lambda one: one.boot):
        then = time.monotonic()
        try:
            if bed is None or booted != one.boot:
                if bed is not None:
                    bed.vm.close()
                bed, booted = boot(one.boot), one.boot
            if not one.boot:
                bed.settle()
            then = time.monotonic()
            seen = one.run(bed)
        except Exception as error:  # whatever it was, the other checks still run
            failed += 1
            told = str(error) if isinstance(error, Failed) else traceback.format_exc()
            print(f"FAIL {one.name}: {told} ({time.monotonic() - then:.1f} s)", flush=True)
            if bed is not None:
                print(bed.tails(), flush=True)
                # A machine that a check has broken is not the next one's fault.
                bed.vm.close()
                bed = None
        else:
            passed += 1
            print(f"PASS {one.name}: {seen} ({time.monotonic() - then:.1f} s)", flush=True)
    if bed is not None:
        bed.vm.close()
    print(f"{passed} passed, {failed} failed", flush=True)
    return failed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names of the checks, and no more")
    parser.add_argument("--only", default="", help="names, or groups, by commas")
    parser.add_argument("--dir", type=pathlib.Path, help="an empty folder with a short path; `clock` is in it")
    parser.add_argument("--kernel", type=pathlib.Path, help="what kernel.sh prints")
    parser.add_argument("--agent", help="the binary under test")
    parser.add_argument("--node", help="the rdma-vm-node binary")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the timing")
    return parser.parse_args()


def main() -> int:
    global ROUNDS
    args = arguments()
    if args.list:
        for one in CHECKS:
            print(f"{one.group:8} {one.name:26} {one.run.__doc__}")
        return 0
    ROUNDS = args.rounds
    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - {one.name for one in CHECKS} - {one.group for one in CHECKS}:
        print(f"no such check: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [one for one in CHECKS if not names or one.name in names or one.group in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    programs = {"busybox": "/bin/busybox", "rdma": shutil.which("rdma", path="/usr/bin:/usr/sbin:/bin:/sbin"), "clock": str(args.dir / "clock")}
    programs |= {"csi-warden": args.agent, "node": args.node}
    here = pathlib.Path(__file__).parent
    initrd = pack(args.dir, args.kernel, here / "init", programs)
    machines: list[Machine] = []

    def boot(words: str) -> Bed:
        for attempt in range(BOOTS):
            try:
                machines.append(Machine(args.dir / f"vm{len(machines)}-{attempt}", args.kernel, initrd, words))
                break
            except Failed as why:
                # The kernel patches its own code as it boots, and the emulator may show that half done to the other CPU.
                if "Oops: int3" not in str(why) or attempt + 1 == BOOTS:
                    raise
                print("the emulated kernel fell over its own patching; booting again", flush=True)
        return Bed(machines[-1])

    try:
        return 1 if run(chosen, boot) else 0
    finally:
        for machine in machines:
            machine.close()


if __name__ == "__main__":
    sys.exit(main())
