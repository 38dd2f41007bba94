#!/usr/bin/env python3
"""Checks the agent against a real kubelet. Started by `run`; the last line is the sum.

A check is a function below with @check; its name on the command line is the function's with dashes. It starts from a
settled bed (everything up, healthy, registered), raises Failed or returns what it saw.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback

from bed import Bed
from image import is_static
from registry import CHECKS, QUIET, REFUSED, Check, check, expect, shown, stays
from sidecar import LIVENESS, MEMORY_LIMIT, REGISTRAR, sidecar
from watch import DRIVER_NAME, NODE, Failed, wait_until

NOT_REGISTERED = "not found in the list of registered CSI drivers"


def withdraw(bed: Bed) -> float:
    """Makes the agent deregister; returns when the deciding error was written."""
    decided = bed.health.fail()
    bed.folder.wait("gone", decided - 1.5)
    bed.csi_node.wait(False)
    return decided


def recover(bed: Bed) -> float:
    """Makes the agent register again; returns when the first OK was written."""
    first = bed.health.recover()
    bed.csi_node.wait(True)
    return first


def mounts(bed: Bed, name: str) -> float:
    """A new pod gets its volume; returns how long that took."""
    then = time.monotonic()
    with bed.pod(name):
        volume = bed.wait_running(name)
        expect(volume.startswith("csi-"), f"volume_id holds {volume!r}")
        took = time.monotonic() - then
    return took


# --- registration ----------------------------------------------------------------------------------------------------


@check(health=False)
def registers(bed: Bed) -> str:
    """A new agent puts the driver into CSINode, with what NodeGetInfo says."""
    bed.end_agents()
    bed.csi_node.wait(False)
    agent = bed.start_agent(fresh=True)
    socket = bed.folder.wait("shown", agent.started)
    csi_node = bed.csi_node.wait(True, agent.started)
    entry = bed.csi_node_entry()
    expect(entry["nodeID"] == NODE, f"nodeID {entry['nodeID']!r}")
    expect(entry["allocatable"] == {"count": 16}, f"allocatable {entry.get('allocatable')}")
    expect(entry["topologyKeys"] == ["topology.csi-warden.example/rack"], f"topologyKeys {entry.get('topologyKeys')}")
    agent.wait_http("/healthz", 200)
    if bed.has_health:
        agent.wait_http("/registered", 200)
        agent.wait_http("/readyz", 200)
    return f"socket after {socket - agent.started:.2f} s, CSINode after {csi_node - agent.started:.2f} s"


@check(health=False)
def plain_flags(bed: Bed) -> str:
    """Without a health file it is the plain registrar: it registers, and SIGTERM unlinks the socket and exits 0."""
    bed.end_agents()
    bed.csi_node.wait(False)
    agent = bed.start_agent(health=False)
    bed.csi_node.wait(True, agent.started)
    socket = bed.folder.wait("shown", agent.started)
    stopped = time.monotonic()
    code = agent.send(signal.SIGTERM)
    expect(code == 0, f"exit code {code} after SIGTERM")
    expect(bed.identity() is None, "the socket is still there after SIGTERM")
    left = bed.csi_node.wait(False, stopped) - stopped
    return f"socket after {socket - agent.started:.2f} s; SIGTERM: exit 0, CSINode without it after {left:.2f} s"


@check(health=False)
def stale_socket(bed: Bed) -> str:
    """A dead socket at the path, as a crash leaves it, is replaced."""
    bed.end_agents()
    bed.csi_node.wait(False)
    script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    subprocess.run([sys.executable, "-c", script, bed.socket], check=True)
    dead = bed.identity()
    expect(dead, "no dead socket to start from")
    time.sleep(2)  # the kubelet has begun to dial it
    agent = bed.start_agent(fresh=True)
    # The kubelet dials the dead one for 10 s and then pauses for that path.
    took = bed.csi_node.wait(True, agent.started) - agent.started
    replaced = bed.folder.wait("shown", agent.started) - agent.started
    expect(bed.identity() != dead, "the dead socket is still at the path")
    expect(replaced < 5, f"replaced only after {replaced:.2f} s")
    return f"replaced after {replaced:.2f} s, CSINode after {took:.2f} s"


@check(health=False)
def file_at_the_path(bed: Bed) -> str:
    """Where a regular file holds the path, the agent exits 1 and leaves the file alone."""
    bed.end_agents()
    bed.csi_node.wait(False)
    bed.socket.write_text("not ours")
    try:
        agent = bed.start_agent(fresh=True)
        wait_until("the agent's exit", lambda: not agent.running())
        expect(agent.child.returncode == 1, f"exit code {agent.child.returncode}")
        expect(bed.socket.read_text() == "not ours", "the file was changed")
    finally:
        bed.socket.unlink(missing_ok=True)
        bed.end_agents()
    return "exit code 1, file untouched"


@check()
def socket_deleted(bed: Bed) -> str:
    """A socket that somebody deletes is shown again."""
    then = time.monotonic()
    bed.socket.unlink()
    again = bed.folder.wait("shown", then) - then
    bed.csi_node.wait(False, then)
    back = bed.csi_node.wait(True, then) - then
    bed.agent.wait_http("/registered", 200)
    return f"shown again after {again:.2f} s, CSINode has it after {back:.2f} s"


@check(health=False)
def pod_mounts(bed: Bed) -> str:
    """A pod with an inline volume runs and reads its volume, and goes again."""
    then = time.monotonic()
    running = mounts(bed, "inline")
    expect(not bed.mounts(), f"mounts left: {bed.mounts()}")
    return f"running after {running:.1f} s, gone after {time.monotonic() - then:.1f} s"


@check(health=False)
def staged_volume(bed: Bed) -> str:
    """A pod with a claim: stage, publish, unpublish, unstage all reach the driver."""
    name = f"staged-{int(time.time())}"
    bed.create_claim(name)
    methods = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"]
    before = [bed.calls_of(method) for method in methods]
    with bed.pod(name, claim=name):
        volume = bed.wait_running(name)
        expect(volume == name, f"volume_id holds {volume!r}")
    wait_until("the volume unstaged", lambda: bed.calls_of(methods[-1]) > before[-1])
    calls = [bed.calls_of(method) - count for method, count in zip(methods, before, strict=True)]
    wait_until("no mount left", lambda: not bed.mounts())
    return f"stage, publish, unpublish, unstage: {calls} calls"


# --- health ----------------------------------------------------------------------------------------------------------


@check()
def two_errors_deregister(bed: Bed) -> str:
    """The second ERROR takes the driver away, a new pod says why it waits, and OK brings both."""
    decided = bed.health.fail(lambda: expect(bed.identity(), "one ERROR was enough"))
    gone = bed.folder.wait("gone", decided - 1) - decided
    left = bed.csi_node.wait(False, decided - 1) - decided
    expect(gone > -0.05, f"the socket was gone {-gone:.2f} s before the second ERROR")
    bed.agent.wait_http("/healthz", 200)
    expect(bed.agent.http("/registered") != 200, "/registered says 200 while withdrawn")
    with bed.pod("waits"):
        bed.wait_event("waits", NOT_REGISTERED)
        expect(bed.identity() is None, "the socket is back without an OK")
        first = bed.health.recover()
        shown_after = bed.folder.wait("shown", first) - first
        back = bed.csi_node.wait(True, first) - first
        expect(shown_after >= 2.9, f"shown {shown_after:.2f} s after the first OK, before the hold of 3 s")
        bed.agent.wait_http("/registered", 200)
        bed.wait_running("waits")
        runs = time.monotonic() - first
    return (
        f"second ERROR -> socket gone {gone:.3f} s, CSINode {left:.2f} s; "
        f"first OK -> socket {shown_after:.2f} s (hold 3 s), CSINode {back:.2f} s, the pod runs {runs:.1f} s"
    )


@check()
def one_error_is_ignored(bed: Bed) -> str:
    """One ERROR between OKs changes nothing, three times over."""
    then = time.monotonic()
    for _ in range(3):
        bed.health.write("ERROR port mlx5_0/1 is down")
        time.sleep(0.5)
        bed.health.write("OK")
        time.sleep(1.5)
    stays(bed, then, "one ERROR", 6 + QUIET)
    return "no change of the socket or CSINode"


@check()
def flapping(bed: Bed) -> str:
    """A file that says ERROR, ERROR, OK by turns every 50 ms costs one deregistration at most."""
    bed.end_agents()
    bed.start_agent(*(["--max-recovery-hold=10m"] if bed.knows("--max-recovery-hold") else []), fresh=True)
    bed.csi_node.wait(True)
    bed.agent.wait_http("/registered", 200)
    then = time.monotonic()
    while time.monotonic() - then < 10:
        for text in ("ERROR flapping", "ERROR flapping", "OK"):
            bed.health.write(text)
            time.sleep(0.05)
    bed.health.recover()
    time.sleep(QUIET)
    bed.agent.wait_http("/registered", 200)
    bed.csi_node.wait(True)
    changes = bed.csi_node.since(then)
    expect(len(changes) <= 2, f"CSINode changed {len(changes)} times: {shown(changes, then)}")
    return f"{len(changes)} changes of CSINode, {len(bed.folder.since(then))} of the socket; registered at the end"


@check()
def slow_flapping(bed: Bed) -> str:
    """Hardware that comes and goes every few seconds is taken out once, until it stays."""
    bed.end_agents()
    bed.start_agent(*(["--max-recovery-hold=10m"] if bed.knows("--max-recovery-hold") else []), fresh=True)
    bed.csi_node.wait(True)
    bed.agent.wait_http("/registered", 200)
    then = time.monotonic()
    while time.monotonic() - then < 20:
        for text in ("ERROR flapping", "ERROR flapping", "OK", "OK"):
            bed.health.write(text)
            time.sleep(1.2)
    bed.csi_node.wait(True)
    bed.agent.wait_http("/registered", 200)
    changes = bed.csi_node.since(then)
    expect(len(changes) == 2, f"CSINode changed {len(changes)} times: {shown(changes, then)}")
    expect(changes[1][0] - then > 18, f"back while it still flapped: {shown(changes, then)}")
    return shown([(at, "with" if present else "without") for at, present in changes], then)


@check()
def deleted_health_file(bed: Bed) -> str:
    """Without the file nothing is known, and nothing changes."""
    then = time.monotonic()
    bed.health.path.unlink()
    stays(bed, then, "file deleted")
    return "registration kept"


@check()
def garbage_in_health_file(bed: Bed) -> str:
    """Words that are neither OK nor ERROR are no verdict."""
    then = time.monotonic()
    for text in ("", "MAYBE", "ok?", "\0\0\0\0", "ERR", "x" * 5000):
        bed.health.write(text)
        time.sleep(1.2)
    stays(bed, then, "garbage", 7.2 + QUIET)
    return "registration kept"


@check()
def stale_health_file(bed: Bed) -> str:
    """A writer that died is unknown at --health-max-age, and a failure at --health-dead-after."""
    bed.end_agents()
    agent = bed.start_agent("--health-max-age=3s", "--health-dead-after=15s", fresh=True)
    bed.csi_node.wait(True, agent.started)
    agent.wait_http("/registered", 200)
    written = bed.health.write("OK")
    stays(bed, written, "file older than --health-max-age", 12)
    gone = bed.folder.wait("gone", written) - written
    expect(gone >= 14.5, f"socket gone after {gone:.1f} s already")
    bed.csi_node.wait(False, written)
    first = recover(bed)
    back = bed.csi_node.wait(True, first) - first
    return f"kept until {gone:.1f} s (dead after 15 s), back {back:.2f} s after the first OK"


# --- restarts --------------------------------------------------------------------------------------------------------


@check(health=False)
def kubelet_restart_registered(bed: Bed) -> str:
    """A new kubelet finds the socket that is there."""
    before, calls = bed.identity(), bed.calls_of("NodeGetInfo")
    then = time.monotonic()
    with bed.without("kubelet"):
        pass
    up = time.monotonic()
    wait_until("the new kubelet asks the driver", lambda: bed.calls_of("NodeGetInfo") > calls)
    asked = time.monotonic() - up
    bed.csi_node.wait(True)
    expect(bed.identity() == before, "the socket was replaced")
    expect(not bed.folder.since(then), f"the socket changed: {shown(bed.folder.since(then), then)}")
    mounted = mounts(bed, "after-kubelet")
    return f"asked {asked:.1f} s after its start, {bed.csi_node.removals(then)} removals, a pod runs after {mounted:.1f} s"


@check()
def kubelet_restart_deregistered(bed: Bed) -> str:
    """A kubelet that restarts while the driver is withdrawn does not get it back before it is healthy."""
    withdraw(bed)
    then = time.monotonic()
    with bed.without("kubelet"):
        pass
    stays(bed, then, "kubelet restarted", time.monotonic() - then + QUIET)
    first = recover(bed)
    back = bed.csi_node.wait(True, first) - first
    return f"stayed out for {first - then:.0f} s, back {back:.2f} s after the first OK"


@check()
def kubelet_down_meanwhile(bed: Bed) -> str:
    """The kubelet misses a whole withdrawal: after its start everything is right."""
    then, before, calls = time.monotonic(), bed.identity(), bed.calls_of("NodeGetInfo")
    with bed.without("kubelet"):
        decided = bed.health.fail()
        gone = bed.folder.wait("gone", decided - 1) - decided
        first = bed.health.recover()
        bed.folder.wait("shown", first)
    expect(bed.identity() not in (None, before), "no new socket at the path")
    bed.csi_node.wait(True)
    bed.agent.wait_http("/registered", 200)
    expect(bed.calls_of("NodeGetInfo") > calls, "the driver was never asked")
    mounted = mounts(bed, "after-missed")
    removals = bed.csi_node.removals(then)
    return f"socket gone {gone:.3f} s after the second ERROR; then {removals} removals, a pod runs after {mounted:.1f} s"


@check(health=False)
def agent_killed_registered(bed: Bed) -> str:
    """An agent that crashed and is started again costs one re-registration at most."""
    old = bed.identity()
    then = time.monotonic()
    bed.agent.send(signal.SIGKILL)
    time.sleep(1)
    expect(bed.identity() == old, "SIGKILL took the socket away, which nothing should have")
    agent = bed.start_agent()
    shown_after = bed.folder.wait("shown", agent.started) - agent.started
    if bed.has_health:
        agent.wait_http("/registered", 200)
    time.sleep(3)  # the kubelet's reconciler has had its turns
    bed.csi_node.wait(True)
    removals = bed.csi_node.removals(then)
    expect(bed.identity() != old, "the dead socket is still at the path")
    expect(removals <= 1, f"{removals} removals: {shown(bed.csi_node.since(then), then)}")
    return f"socket {shown_after:.2f} s after the start, {removals} removals"


@check()
def agent_killed_unhealthy(bed: Bed) -> str:
    """An agent that crashed while the driver was withdrawn remembers it: not published, even for a moment."""
    # With the crash of a check before, two more would be three, and the third run stays out of the way.
    bed.end_agents()
    bed.start_agent(fresh=True).wait_http("/registered", 200)
    withdraw(bed)
    then = time.monotonic()
    bed.agent.send(signal.SIGKILL)
    agent = bed.start_agent()
    stays(bed, then, "restarted while unhealthy", QUIET)
    expect(bed.identity() is None, "the socket is there")
    agent.wait_http("/healthz", 200)
    # The file that said it may be gone, too: then nothing is known, and the verdict holds.
    bed.health.path.unlink()
    agent.send(signal.SIGKILL)
    bed.start_agent()
    stays(bed, then, "restarted while unhealthy, file gone", time.monotonic() - then + QUIET)
    first = recover(bed)
    back = bed.csi_node.wait(True, first) - first
    return f"stayed out for {first - then:.0f} s over two restarts, back {back:.2f} s after the first OK"


@check()
def state_folder_is_made(bed: Bed) -> str:
    """A --state-dir that does not exist yet is made, and a restart finds its verdict there."""
    bed.end_agents()
    bed.count += 1
    bed.csi_node.wait(False)
    agent = bed.start_agent()
    bed.csi_node.wait(True, agent.started)
    agent.wait_http("/registered", 200)
    withdraw(bed)
    wait_until("a state file", lambda: bed.state().exists() and list(bed.state().iterdir()), 5)
    recover(bed)
    return "made, with the verdict in it"


@check()
def surge_update(bed: Bed) -> str:
    """A second agent takes over; the first stands by, and leaves the successor's socket alone when it ends."""
    first, old, then = bed.agent, bed.identity(), time.monotonic()
    second = bed.start_agent()
    taken = bed.folder.wait("shown", second.started) - second.started
    new = bed.identity()
    expect(new != old, "the socket is still the first agent's")
    second.wait_http("/registered", 200)
    time.sleep(QUIET)
    expect(bed.identity() == new, "the agents publish over each other")
    first.wait_http("/healthz", 200)
    code = first.send(signal.SIGTERM)
    expect(code == 0, f"the first agent's exit code is {code}")
    time.sleep(3)
    expect(bed.identity() == new, "the first agent took the second's socket away")
    bed.csi_node.wait(True)
    second.wait_http("/registered", 200)
    removals = bed.csi_node.removals(then)
    expect(removals <= 1, f"{removals} removals: {shown(bed.csi_node.since(then), then)}")
    return f"taken over {taken:.2f} s after the start, {removals} re-registrations; the first's exit left the socket alone"


@check()
def successor_dies(bed: Bed) -> str:
    """Should the successor crash, the agent that stands by takes over again."""
    first = bed.agent
    second = bed.start_agent()
    bed.folder.wait("shown", second.started)
    second.wait_http("/registered", 200)
    time.sleep(3)
    successor, then = bed.identity(), time.monotonic()
    second.send(signal.SIGKILL)
    taken = bed.folder.wait("shown", then) - then
    expect(bed.identity() not in (None, successor), "the dead socket is still at the path")
    bed.csi_node.wait(True)
    first.wait_http("/registered", 200)
    time.sleep(3)
    removals = bed.csi_node.removals(then)
    expect(removals <= 1, f"{removals} removals: {shown(bed.csi_node.since(then), then)}")
    bed.agents.remove(second)
    return f"taken over {taken:.1f} s after the crash, {removals} re-registrations"


@check(health=False)
def driver_killed(bed: Bed) -> str:
    """A driver that crashes and is away for 10 s loses nothing; pods mount after it."""
    then, pid = time.monotonic(), bed.agent.pid
    bed.driver.send(signal.SIGKILL)
    stays(bed, then, "driver away", 10)
    bed.start_driver()
    mounted = mounts(bed, "after-driver")
    expect(bed.agent.pid == pid and bed.agent.running(), "the agent ended")
    expect(not bed.csi_node.since(then), "CSINode changed")
    bed.agent.wait_http("/healthz", 200)
    return f"registration kept, a pod runs after {mounted:.1f} s"


# --- the API server is away ------------------------------------------------------------------------------------------


@check()
def api_server_down(bed: Bed) -> str:
    """Deregistration needs no API server; when it is back and the hardware too, the driver is registered."""
    with bed.without("apiserver"):
        decided = bed.health.fail()
        gone = bed.folder.wait("gone", decided - 1) - decided
        time.sleep(3)  # the kubelet has tried to write CSINode, and given up
    time.sleep(3)
    left_over = "the driver still" if bed.csi_node.present else "no driver"
    calls, first = bed.calls_of("NodeGetInfo"), bed.health.recover()
    shown_after = bed.folder.wait("shown", first) - first
    bed.agent.wait_http("/registered", 200)
    wait_until("the kubelet asks the driver", lambda: bed.calls_of("NodeGetInfo") > calls)
    bed.csi_node.wait(True)
    mounted = mounts(bed, "after-api")
    return (
        f"socket gone {gone:.3f} s after the second ERROR; CSINode then had {left_over}; "
        f"socket {shown_after:.2f} s after the first OK, a pod runs after {mounted:.1f} s"
    )


# --- as a container --------------------------------------------------------------------------------------------------


@check(health=False, group="container")
def container_swapped_image(bed: Bed) -> str:
    """A manifest made for the upstream registrar works with our image: locked down, both probe forms, 16 MiB."""
    with sidecar(bed, "swapped") as pod:
        socket = bed.folder.wait("shown", pod.started) - pod.started
        csi_node = bed.csi_node.wait(True, pod.started) - pod.started
        ready = pod.wait_ready() - pod.started
        pod.wait_http("/healthz", 200)
        if bed.has_health:
            pod.wait_http("/registered", 200)
        process = pod.process()
        seen = {name: process[name] for name in ("NoNewPrivs", "Seccomp")}
        expect(seen == {"NoNewPrivs": "1", "Seccomp": "2"}, f"the process has {seen}")
        held = [name for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(process[name], 16)]
        expect(not held, f"capabilities left: {held}")
        image = pathlib.Path(f"/proc/{pod.pid()}/root")
        names = [(image / name.lstrip("/")).stat().st_ino for name in (REGISTRAR, LIVENESS, "/csi-warden")]
        expect(len(set(names)) == 1, "the image's names are several files")
        mounted = mounts(bed, "beside-container")
        succeeded = probe_successes(bed, pod.name)
        wait_until("the kubelet's probes of both forms", lambda: min(probe_successes(bed, pod.name)) > 2)
        expect(pod.container()["restartCount"] == 0, f"restarted; probes had succeeded {succeeded} times")
        memory = pod.memory()
        expect(memory["limit"] == MEMORY_LIMIT, f"the limit is {memory['limit']}")
        expect(memory["used"] < MEMORY_LIMIT // 2, f"{memory['used']} bytes in use")
        liveness, readiness = probe_successes(bed, pod.name)
        rss, anonymous = (int(process[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))
    return (
        f"socket {socket:.2f} s, CSINode {csi_node:.2f} s, ready {ready:.2f} s after the pod's creation, a pod runs "
        f"{mounted:.1f} s after its own; {liveness} GETs of /healthz and {readiness} exec probes good; cgroup "
        f"{memory['used'] / 1048576:.1f} MiB now, peak {memory['peak'] / 1048576:.1f} of {MEMORY_LIMIT >> 20}, of it the "
        f"process {rss:.1f} MiB, {anonymous:.1f} anonymous"
    )


def probe_successes(bed: Bed, pod: str) -> tuple[int, int]:
    """How often the kubelet says that the registrar's liveness and readiness probes succeeded."""
    lines = (bed.root / "log/kubelet.log").read_text(errors="replace").splitlines()
    about = [line for line in lines if '"Probe succeeded"' in line and f'pod="default/{pod}"' in line]
    return tuple(sum(f'probeType="{kind}"' in line for line in about) for kind in ("Liveness", "Readiness"))


@check(health=False, group="container")
def container_killed(bed: Bed) -> str:
    """A container whose process is killed is started again by the kubelet, and registers again."""
    with sidecar(bed, "killed") as pod:
        bed.csi_node.wait(True, pod.started)
        pod.wait_ready()
        old, then = bed.identity(), time.monotonic()
        os.kill(pod.pid(), signal.SIGKILL)
        shown_after = bed.folder.wait("shown", then) - then
        ready = pod.wait_ready(restarts=1) - then
        expect(bed.identity() not in (None, old), "the dead socket is still at the path")
        code = pod.container()["lastState"]["terminated"]["exitCode"]
        expect(code == 137, f"exit code {code} after SIGKILL")
        if bed.has_health:
            pod.wait_http("/registered", 200)
        time.sleep(3)  # the kubelet's reconciler has had its turns
        bed.csi_node.wait(True)
        removals = bed.csi_node.removals(then)
        expect(removals <= 1, f"{removals} removals: {shown(bed.csi_node.since(then), then)}")
        mounted = mounts(bed, "after-container")
    return (
        f"new socket {shown_after:.2f} s, ready {ready:.2f} s after the kill, {removals} removals, "
        f"a pod runs after {mounted:.1f} s"
    )


@check(health=False, group="container")
def container_deleted(bed: Bed) -> str:
    """A pod that is deleted takes its registration with it, and the agent's exit code is 0."""
    with sidecar(bed, "deleted") as pod:
        bed.csi_node.wait(True, pod.started)
        pod.wait_ready()
        then = time.monotonic()
        last = pod.delete()
        took = time.monotonic() - then
        gone = bed.folder.wait("gone", then) - then
        left = bed.csi_node.wait(False, then) - then
        expect(bed.identity() is None, "the socket is still there")
        statuses = {status["name"]: status["state"] for status in last["status"]["containerStatuses"]}
        ended = statuses["node-driver-registrar"].get("terminated")
        expect(ended and ended["exitCode"] == 0, f"the registrar's last state: {statuses['node-driver-registrar']}")
    # The kubelet lets up to two seconds pass before it stops a container that it has just started.
    return f"after the deletion: socket gone {gone:.2f} s, CSINode {left:.2f} s, pod {took:.2f} s; exit code 0"


@check(group="container")
def container_health(bed: Bed) -> str:
    """A prober container and a shared folder: bad hardware fences, good lets in again, and a kill changes neither."""
    with sidecar(bed, "health", health=True) as pod:
        bed.csi_node.wait(True, pod.started)
        pod.wait_ready()
        broken = pod.broken()
        pod.wait_fenced()
        up = time.monotonic() - broken
        # What the defaults do where nobody followed the volumes from the boot on: they may be here, so it stays registered.
        bed.create_pod("waits-for-repair")
        bed.wait_event("waits-for-repair", REFUSED)
        time.sleep(QUIET)
        expect(bed.csi_node.present, "withdrawn with volumes that nobody knows")
        pod.wait_http("/healthz", 200)
        pod.wait_http("/readyz", 200)
        # Its verdict lies beside the driver's socket, in the host's folder.
        then = time.monotonic()
        os.kill(pod.pid(), signal.SIGKILL)
        restarted = pod.wait_ready(restarts=1) - then
        pod.wait_fenced()
        time.sleep(QUIET)
        expect("running" not in bed.container_of("waits-for-repair").get("state", {}), "a pod got in")
        repaired = pod.repair()
        bed.wait_running("waits-for-repair")
        runs = time.monotonic() - repaired
        bed.delete_pod("waits-for-repair")
        bed.wait_deleted("waits-for-repair")
        expect(pod.container("prober")["restartCount"] == 0, "the prober was restarted")
        memory = pod.memory()
        expect(pod.container()["restartCount"] == 1, "restarted more than once")
    return (
        f"broken -> fenced {up:.2f} s (checked every 1.5 s), registered; killed: ready again {restarted:.2f} s, fenced; "
        f"repaired -> the waiting pod runs {runs:.1f} s (hold 3 s); cgroup peak {memory['peak'] / 1048576:.1f} MiB"
    )


# --- the fence -------------------------------------------------------------------------------------------------------

import fence_checks  # noqa: E402, F401 - its checks come here, before the last one

# --- the end ---------------------------------------------------------------------------------------------------------


@check(health=False)
def nothing_is_left(bed: Bed) -> str:
    """After all that, pods go, and no mount stays."""
    for index in range(3):
        bed.create_pod(f"last-{index}")
    for index in range(3):
        bed.wait_running(f"last-{index}")
    then = time.monotonic()
    names = [item["metadata"]["name"] for item in bed.api.call("GET", bed.PODS)["items"]]
    for name in names:
        bed.delete_pod(name)
    for name in names:
        bed.wait_deleted(name)
    took = time.monotonic() - then
    wait_until("no mount left", lambda: not bed.mounts())
    folders = list((bed.kubelet_root / "pods").glob("*/volumes/kubernetes.io~csi/*"))
    expect(not folders, f"folders left: {folders}")
    leftovers = [path.name for path in bed.socket.parent.iterdir() if path != bed.socket]
    expect(not leftovers, f"left in the registration folder: {leftovers}")
    return f"{len(names)} pods gone after {took:.1f} s, no mount, no folder, no stray socket"


# --- running them ----------------------------------------------------------------------------------------------------


def run(bed: Bed, chosen: list[Check]) -> int:
    """Runs the checks in order; returns how many failed."""
    passed = failed = skipped = 0
    for one in chosen:
        if why := cannot_run(bed, one):
            skipped += 1
            print(f"SKIP {one.name}: {why}", flush=True)
            continue
        then = time.monotonic()
        try:
            bed.settle()
            then = time.monotonic()
            seen = one.run(bed)
        except Exception as error:  # whatever it was, the other checks still run
            failed += 1
            told = str(error) if isinstance(error, Failed) else traceback.format_exc()
            print(f"FAIL {one.name}: {told} ({time.monotonic() - then:.1f} s)\n{bed.tails()}", flush=True)
            start_over(bed)
        else:
            passed += 1
            print(f"PASS {one.name}: {seen} ({time.monotonic() - then:.1f} s)", flush=True)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""), flush=True)
    return failed


def cannot_run(bed: Bed, one: Check) -> str:
    """Why the check says nothing about this agent; empty if it does."""
    if one.needs_health and not bed.has_health:
        return "needs a health file"
    if one.group == "container" and not (is_static(bed.agent_binary) and is_static(bed.driver_binary)):
        return "an image of one file needs static binaries"
    return ""


def start_over(bed: Bed) -> None:
    """Puts away what a failed check may have left."""
    bed.start_over()
    try:
        for name in ("apiserver", "kubelet"):
            if not bed.part_runs(name):
                bed.part("start", name)
        # Volumes come out only through a registered driver.
        bed.settle()
        for item in bed.api.call("GET", bed.PODS)["items"]:
            bed.delete_pod(item["metadata"]["name"])
    except Exception as error:
        print(f"     could not settle: {error}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names of the checks, and no more")
    parser.add_argument("--only", default="", help="names, or groups, by commas")
    parser.add_argument("--dir", type=pathlib.Path, help="the cluster's folder")
    parser.add_argument("--agent", help="the binary under test")
    parser.add_argument("--driver", help="the mounting-driver binary")
    parser.add_argument("--check", default="", help="the binary that the prober container runs")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.list:
        for one in CHECKS:
            print(f"{one.group:10} {one.name:30} {one.run.__doc__}")
        return 0
    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - {one.name for one in CHECKS} - {one.group for one in CHECKS}:
        print(f"no such check: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [one for one in CHECKS if not names or one.name in names or one.group in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bed = Bed(args.dir, args.agent, args.driver, os.environ.get("AGENT_KIND", "csi-warden"), args.check)
    try:
        return 1 if run(bed, chosen) else 0
    finally:
        bed.close()


if __name__ == "__main__":
    sys.exit(main())
