"""Checks of proxy, fence and topology: what they do to pods, and what the kubelet makes of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time

from bed import Agent, Bed
from registry import REFUSED, check, expect, shown
from watch import DRIVER_NAME, NODE, wait_until

# Short waits of the reaction, so that a check sees its end.
FENCING = ["--on-unhealthy=fence-then-deregister", "--deregister-after=2s"]
UNREGISTERED = 3.0  # longer than --deregister-after and the kubelet's second


def fencing_agent(bed: Bed, *flags: str, fresh: bool = True) -> Agent:
    """The only agent, registered, with a fence before its driver; `fresh`: one that has followed all volumes."""
    bed.end_agents()
    if fresh:
        bed.remember(None)
    agent = bed.start_agent(*FENCING, *flags)
    agent.wait_http("/registered", 200)
    bed.csi_node.wait(True)
    return agent


def fenced(bed: Bed) -> dict | None:
    """The fence, if it is up."""
    fence = bed.status()["fence"]
    return fence if fence and fence["up"] else None


def put_up(bed: Bed) -> tuple[float, float]:
    """The fence by two ERRORs: when the deciding one was written, and when the fence was seen up."""
    decided = bed.health.fail()
    wait_until("the fence up", lambda: fenced(bed), pause=0.005)
    return decided, time.monotonic()


def take_down(bed: Bed) -> float:
    """The fence down by two OKs, and the driver registered; returns when the first was written."""
    first = bed.health.recover()
    wait_until("the fence down", lambda: not fenced(bed))
    bed.csi_node.wait(True)
    return first


def unique(name: str) -> str:
    """A name that no pod had before: events outlive their pods."""
    return f"{name}-{time.monotonic_ns() // 1_000_000 % 10_000_000}"


def claimed(bed: Bed, name: str) -> str:
    """A pod with a claim of its own, created; both have the name returned, and so has the volume."""
    name = unique(name)
    bed.create_claim(name)
    bed.create_pod(name, name)
    return name


def inline(bed: Bed, name: str) -> str:
    """A pod with an inline volume, created; its name."""
    name = unique(name)
    bed.create_pod(name)
    return name


def gone(bed: Bed, *names: str) -> float:
    """Deletes pods; returns how long until the last was gone."""
    then = time.monotonic()
    for name in names:
        bed.delete_pod(name)
    for name in names:
        bed.wait_deleted(name)
    return time.monotonic() - then


def clean(bed: Bed, *volumes: str) -> None:
    """Nothing is mounted, and each of these volumes was staged at most once and unstaged."""
    wait_until("no mount left", lambda: not bed.mounts(), 20)
    for volume in volumes:
        staged = bed.calls_of("NodeStageVolume", volume, "Ok")
        expect(staged <= 1, f"{volume} was staged {staged} times")
        expect(not staged or bed.calls_of("NodeUnstageVolume", volume, "Ok"), f"{volume} was never unstaged")


def code_of(event: str) -> str:
    """The gRPC code in an event's text."""
    return re.search(r"code = (\w+)", event).group(1)


# --- the fence -------------------------------------------------------------------------------------------------------


@check(group="fence")
def swapped_in_unhealthy(bed: Bed) -> str:
    """Our image in place of a registrar, on a sick node with running pods: fenced, not withdrawn, and all pods can end."""
    bed.end_agents()
    before = bed.start_agent(health=False)  # exactly the registrar that went before
    bed.csi_node.wait(False)
    bed.csi_node.wait(True, before.started)
    pods = [claimed(bed, "before"), inline(bed, "before-inline")]
    for pod in pods:
        bed.wait_running(pod)
    code = before.send(signal.SIGTERM)
    expect(code == 0, f"exit code {code}")
    bed.health.write("ERROR port mlx5_0/1 is down")
    bed.remember("notFollowed")  # as on any node that was booted more than 15 min ago
    agent = bed.start_agent(*FENCING)
    agent.wait_http("/registered", 200)
    wait_until("the fence up", lambda: fenced(bed))
    up = time.monotonic()
    volumes = bed.status()["volumes"]
    expect(not volumes["complete"], f"the table counts as complete: {volumes}")
    refused = inline(bed, "after")
    event = bed.wait_event(refused, REFUSED)
    expect(code_of(event) == "Unavailable", f"a final code, though nobody knows what is here: {event}")
    time.sleep(max(0.0, up + 2 * UNREGISTERED - time.monotonic()))
    expect(bed.csi_node.present and bed.identity(), "withdrawn with volumes that nobody knows")
    took = gone(bed, *pods, refused)
    clean(bed, pods[0])
    bed.csi_node.wait(True)
    take_down(bed)
    return f"{volumes['inUse']} volumes known ({volumes['gap']}); registered and fenced; all pods gone after {took:.1f} s"


@check(group="fence")
def kubelet_restart_fenced(bed: Bed) -> str:
    """A new kubelet while fenced looks after running pods: what they have mounted is not refused, and a crashed container runs again."""
    fencing_agent(bed)
    pods = [claimed(bed, "kept"), inline(bed, "kept-inline")]
    for pod in pods:
        bed.wait_running(pod)
    put_up(bed)
    published = bed.calls_of("NodePublishVolume", code="Ok")
    with bed.without("kubelet"):
        for pod in pods:
            os.kill(bed.pid_of(bed.container_of(pod)["containerID"]), signal.SIGKILL)
    up = time.monotonic()
    for pod in pods:
        wait_until(f"{pod}'s container again", lambda pod=pod: bed.container_of(pod).get("restartCount") == 1, 120, 0.1)
        bed.wait_running(pod)
    again = time.monotonic() - up
    republished = bed.calls_of("NodePublishVolume", code="Ok") - published
    expect(fenced(bed), "the fence is down")
    expect(republished >= 2, f"{republished} volumes published again")
    refused = inline(bed, "new")
    bed.wait_event(refused, REFUSED)
    took = gone(bed, refused, *pods)
    take_down(bed)
    wait_until("no mount left", lambda: not bed.mounts(), 20)
    return f"{republished} republished, both containers run again after {again:.1f} s; gone after {took:.1f} s"


@check(group="fence")
def swapped_in_then_kubelet_restart(bed: Bed) -> str:
    """Pods from before us, a sick node and a new kubelet: their volumes are known by then, so crashed containers run again."""
    bed.end_agents()
    before = bed.start_agent(health=False)
    bed.csi_node.wait(False)
    bed.csi_node.wait(True, before.started)
    pods = [claimed(bed, "old"), inline(bed, "old-inline")]
    for pod in pods:
        bed.wait_running(pod)
    before.send(signal.SIGTERM)
    bed.remember("notFollowed")
    agent = bed.start_agent(*FENCING)
    agent.wait_http("/registered", 200)
    then = time.monotonic()

    def published() -> int:
        return sum(place["kind"] == "published" for place in bed.status()["volumes"]["places"])

    # The kubelet asks for each volume's usage, here every 10 s, by default every minute.
    wait_until("both volumes known", lambda: published() == 2, 60, 0.2)
    learnt = time.monotonic() - then
    put_up(bed)
    with bed.without("kubelet"):
        for pod in pods:
            os.kill(bed.pid_of(bed.container_of(pod)["containerID"]), signal.SIGKILL)
    up = time.monotonic()
    for pod in pods:
        wait_until(f"{pod}'s container again", lambda pod=pod: bed.container_of(pod).get("restartCount") == 1, 60, 0.1)
    again = time.monotonic() - up
    expect(fenced(bed), "the fence is down")
    gone(bed, *pods)
    wait_until("nothing in the table", lambda: bed.status()["volumes"]["inUse"] == 0, 20)
    expect(bed.csi_node.present, "withdrawn although the table is not complete")
    take_down(bed)
    wait_until("no mount left", lambda: not bed.mounts(), 20)
    return f"both volumes learnt {learnt:.1f} s after the swap; both containers run again after {again:.1f} s"


@check(group="fence")
def refuses_and_lets_out(bed: Bed) -> str:
    """Fenced: a new pod says why it waits, the running one goes, then the driver is withdrawn; and back with the recovery."""
    agent = fencing_agent(bed)
    running = claimed(bed, "runs")
    bed.wait_running(running)
    decided, up = put_up(bed)
    waits = claimed(bed, "waits")
    event = bed.wait_event(waits, REFUSED)
    refused = time.monotonic() - decided
    for words in ("port mlx5_0/1 is down", "since 20", "csi-warden fence off"):
        expect(words in event, f"no {words!r} in {event!r}")
    time.sleep(2 * UNREGISTERED)
    expect(not bed.folder.since(up), f"withdrawn with a volume in use: {shown(bed.folder.since(up), up)}")
    expect(bed.calls_of("NodeStageVolume", waits) == 0, "a refused call reached the driver")
    told = [text for text in bed.events(waits) if REFUSED in text]
    expect(len(told) == 1, f"the same refusal makes {len(told)} events")
    took = gone(bed, running)
    withdrawn = bed.folder.wait("gone", up)
    left = bed.csi_node.wait(False, up)
    unstaged = bed.called_at("NodeUnstageVolume", running)
    expect(withdrawn > unstaged, f"withdrawn {unstaged - withdrawn:.3f} s before the last unstage")
    clean(bed, running)
    agent.wait_http("/healthz", 200)
    first = bed.health.recover()
    back = bed.folder.wait("shown", first) - first
    listed = bed.csi_node.wait(True, first) - first
    bed.wait_running(waits)
    runs = time.monotonic() - first
    gone(bed, waits)
    clean(bed, waits)
    return (
        f"2nd ERROR -> fence seen up {up - decided:.3f} s, a new pod's event {refused:.2f} s; the running pod gone "
        f"{took:.1f} s; last unstage -> socket gone {withdrawn - unstaged:.3f} s, CSINode {left - unstaged:.2f} s; 1st OK -> "
        f"socket {back:.2f} s (hold 3 s), CSINode {listed:.2f} s, the waiting pod runs {runs:.1f} s\n     event: {event}"
    )


@check(group="fence")
def refusal_codes(bed: Bed) -> str:
    """Each --refusal-code, and what the kubelet does with the state of the volume that was refused."""
    rows = []
    for setting in ("failed-precondition", "unavailable", "auto"):
        fencing_agent(bed, f"--refusal-code={setting}")
        runs = claimed(bed, "base")
        bed.wait_running(runs)
        bed.warden("fence", "on", "--for=10m", "--reason=refusal codes")
        refused = {"stage": claimed(bed, "stage"), "publish": unique("publish"), "inline": inline(bed, "inline")}
        bed.create_pod(refused["publish"], runs)  # its volume is staged already, for the pod that runs
        events = {what: bed.wait_event(pod, REFUSED) for what, pod in refused.items()}
        staging = bed.kubelet_root / "plugins/kubernetes.io/csi" / DRIVER_NAME
        kept = {
            "stage": any(refused["stage"] in file.read_text() for file in staging.glob("*/vol_data.json")),
            "publish": bed.volume_record(refused["publish"]).exists(),
            "inline": bed.volume_record(refused["inline"]).exists(),
        }
        unpublished = bed.calls_of("NodeUnpublishVolume")
        called = {}
        gone(bed, refused["inline"])
        called["inline"] = bed.calls_of("NodeUnpublishVolume") - unpublished
        gone(bed, refused["publish"])
        called["publish"] = bed.calls_of("NodeUnpublishVolume", runs)
        gone(bed, refused["stage"])
        time.sleep(3)  # the kubelet unstages when the pod is gone
        called["stage"] = bed.calls_of("NodeUnstageVolume", refused["stage"])
        code = "Unavailable" if setting == "unavailable" else "FailedPrecondition"
        for what, event in events.items():
            expect(code_of(event) == code, f"{what} with {setting}: {event}")
            keeps = code == "Unavailable"
            word = f"{what} with {setting}: record kept {kept[what]}, {called[what]} calls when the pod went"
            expect(kept[what] == keeps and bool(called[what]) == keeps, word)
        rows.append(f"{setting}: {code}, record kept {kept}, calls at the end {called}")
        gone(bed, runs)
        bed.warden("fence", "auto")
        clean(bed, runs, refused["stage"])
    return "\n     ".join(["as docs/fence.md says", *rows])


@check(group="fence")
def fifty_pods_while_flapping(bed: Bed) -> str:
    """50 pods come and go while health comes and goes: nothing is left mounted, nothing is stuck."""
    agent = fencing_agent(
        bed,
        "--deregister-after=1s",
        "--recovery-hold=500ms",
        "--max-recovery-hold=500ms",
        "--health-interval=500ms",
    )
    stop = threading.Event()

    def flap() -> None:
        while not stop.wait(1):
            bed.health.fail()
            stop.wait(1.5)
            bed.health.recover()

    flapping = threading.Thread(target=flap)
    flapping.start()
    pods: list[str] = []
    alive: list[tuple[str, float]] = []
    ran = 0
    try:
        for index in range(50):
            pod = claimed(bed, f"many{index}") if index % 2 else inline(bed, f"many{index}")
            pods.append(pod)
            alive.append((pod, time.monotonic()))
            while alive and (len(alive) > 20 or time.monotonic() - alive[0][1] > 6):
                oldest, _ = alive.pop(0)
                ran += "running" in bed.container_of(oldest).get("state", {})
                bed.delete_pod(oldest)
            time.sleep(0.25)
        wait_until("three fences", lambda: agent.log.read_text().count("the fence is up") >= 3)
    finally:
        stop.set()
        flapping.join()
    ups = agent.log.read_text().count("the fence is up")
    refused = sum(any(REFUSED in text for text in bed.events(pod)) for pod in pods)
    then = time.monotonic()
    gone(bed, *(pod for pod, _ in alive))
    for pod in pods:
        bed.wait_deleted(pod)
    took = time.monotonic() - then
    clean(bed, *pods)
    wait_until("no volume in the table", lambda: bed.status()["volumes"]["inUse"] == 0)
    expect(bed.status()["volumes"]["complete"], "the table is not complete any more")
    left = [
        volume
        for volume in bed.volumes_called("csi-")
        if bed.calls_of("NodePublishVolume", volume, "Ok") and not bed.calls_of("NodeUnpublishVolume", volume, "Ok")
    ]
    expect(not left, f"published and never unpublished: {left}")
    expect(refused and ran, f"{refused} refusals, {ran} pods ran: this has shown nothing")
    take_down(bed)
    return (
        f"the fence was up {ups} times, {refused} pods were refused once or more, {ran} of the first {50 - len(alive)} ran; "
        f"the last {len(alive)} gone after {took:.1f} s"
    )


@check(group="fence")
def by_hand(bed: Bed) -> str:
    """`csi-warden fence on`, `off` and `auto` on the living agent, with real pods."""
    fencing_agent(bed)
    bed.warden("fence", "on", "--for=10m", "--reason=cable swap, ticket 7")
    waits = inline(bed, "hand")
    event = bed.wait_event(waits, REFUSED)
    expect("cable swap, ticket 7" in event, f"no reason in {event!r}")
    then = time.monotonic()
    bed.warden("fence", "auto")
    bed.wait_running(waits)
    runs = time.monotonic() - then
    put_up(bed)
    bed.warden("fence", "off", "--for=10m", "--reason=the probe is wrong")
    sick = inline(bed, "sick")
    bed.wait_running(sick)
    expect(bed.status()["health"]["verdict"] == "unhealthy", "it is not unhealthy")
    # Off also keeps it registered when the last volume is out.
    gone(bed, waits, sick)
    time.sleep(UNREGISTERED)
    expect(bed.csi_node.present, "withdrawn though the fence is off")
    bed.warden("fence", "off", "--for=1s", "--reason=for a moment")
    wait_until("the override ends by itself", lambda: fenced(bed), 5)
    bed.csi_node.wait(False)
    take_down(bed)
    return f"on: event with the reason; auto: the pod runs after {runs:.1f} s; off: a pod runs while unhealthy; ends by itself"


# --- the proxy -------------------------------------------------------------------------------------------------------


SLOW = "--stage-takes=3000"


@contextlib.contextmanager
def other_driver(bed: Bed, *flags: str):
    """The driver runs with these flags, too, inside the block."""
    bed.driver.send(signal.SIGTERM)
    bed.start_driver(*flags)
    try:
        yield
    finally:
        bed.driver.send(signal.SIGTERM)
        bed.start_driver()


def stage_begins(bed: Bed, name: str) -> str:
    """A new pod whose volume is being staged; its name."""
    pod = claimed(bed, name)
    wait_until("a stage has begun", lambda: bed.calls_of("NodeStageVolume-begun", pod))
    return pod


@check(group="fence")
def agent_killed_in_a_mount(bed: Bed) -> str:
    """Our agent is killed while a volume is mounted: the driver finishes it, the kubelet comes again, and the pod runs and goes."""
    fencing_agent(bed)
    with other_driver(bed, SLOW):
        pod = stage_begins(bed, "killed")
        then = time.monotonic()
        bed.agent.send(signal.SIGKILL)
        bed.start_agent(*FENCING)
        wait_until("the driver finished", lambda: bed.calls_of("NodeStageVolume", pod, "Ok"))
        finished = time.monotonic() - then
        bed.wait_running(pod)
        runs = time.monotonic() - then
        stages = bed.calls_of("NodeStageVolume-begun", pod)
        gap = bed.status()["volumes"]["gap"]
        took = gone(bed, pod)
        wait_until("no mount left", lambda: not bed.mounts(), 20)
        expect(bed.calls_of("NodeUnstageVolume", pod, "Ok"), "never unstaged")
    return (
        f"killed; the driver finished after {finished:.1f} s, {stages} stage calls, the pod runs after {runs:.1f} s, gone "
        f"{took:.1f} s; table: {gap or 'complete'}"
    )


@check(group="fence")
def agent_stopped_in_a_mount(bed: Bed) -> str:
    """SIGTERM while a volume is mounted: the registration goes first, the call ends well, then exit 0."""
    fencing_agent(bed)
    with other_driver(bed, SLOW):
        pod = stage_begins(bed, "stopped")
        then = time.monotonic()
        code = bed.agent.send(signal.SIGTERM)
        exited = time.monotonic()
        withdrawn = bed.folder.wait("gone", then)
        ended = bed.called_at("NodeStageVolume", pod)
        expect(code == 0, f"exit code {code}")
        expect(withdrawn < ended < exited, f"order: {withdrawn - then:.2f}, {ended - then:.2f}, {exited - then:.2f}")
        fencing_agent(bed, fresh=False)
        bed.wait_running(pod)
        # The kubelet heard that it is staged, or it would have asked again.
        expect(bed.calls_of("NodeStageVolume-begun", pod) == 1, "the kubelet staged it again")
        gone(bed, pod)
        clean(bed, pod)
    return (
        f"SIGTERM -> socket gone {withdrawn - then:.3f} s, the stage ended {ended - then:.2f} s, exit 0 {exited - then:.2f} s; "
        "staged once"
    )


@check(group="fence")
def driver_restarts_proxied(bed: Bed) -> str:
    """A driver that restarts on a new socket needs no restart of ours."""
    agent = fencing_agent(bed)
    first = inline(bed, "old-driver")
    bed.wait_running(first)
    then = time.monotonic()
    bed.driver.send(signal.SIGKILL)
    second = inline(bed, "no-driver")
    event = bed.wait_event(second, "the CSI driver cannot be reached")
    bed.start_driver()
    bed.wait_running(second)
    runs = time.monotonic() - then
    expect(agent.running() and not bed.folder.since(then), "the agent or its socket changed")
    took = gone(bed, first, second)
    wait_until("no mount left", lambda: not bed.mounts(), 20)
    return f"away: {code_of(event)}; back: the pod runs {runs:.1f} s after the kill; both gone {took:.1f} s"


# --- NodeGetInfo -----------------------------------------------------------------------------------------------------

SWITCH = "topology.csi-warden.example/switch"


def label(bed: Bed, value: str | None) -> None:
    """Sets or removes the node's label, as an administrator does."""
    patch = {"metadata": {"labels": {SWITCH: value}}}
    bed.api.call("PATCH", f"/api/v1/nodes/{NODE}", patch, "application/merge-patch+json")


@check(group="fence")
def topology(bed: Bed) -> str:
    """--topology reaches CSINode and the node's labels; a changed value is refused by the kubelet, and log and status say why."""
    try:
        fencing_agent(bed, f"--topology={SWITCH}=leaf1")
        keys = bed.csi_node_entry()["topologyKeys"]
        expect(SWITCH in keys and len(keys) == 2, f"topologyKeys {keys}")
        labels = bed.api.call("GET", f"/api/v1/nodes/{NODE}")["metadata"]["labels"]
        expect(labels.get(SWITCH) == "leaf1", f"the label is {labels.get(SWITCH)}")
        bed.end_agents()
        bed.remember(None)
        agent = bed.start_agent(*FENCING, f"--topology={SWITCH}=leaf2")
        wait_until("refused", lambda: bed.status()["registration"]["phase"] == "refused")
        trouble = bed.status()["registration"]["trouble"]
        help_text = f"kubectl label node NODE --overwrite {SWITCH}=leaf2"
        expect(help_text in trouble, f"no way out in the status: {trouble}")
        expect(help_text in agent.log.read_text(), "no way out in the log")
        then = time.monotonic()
        label(bed, "leaf2")
        bed.csi_node.wait(True)
        agent.wait_http("/registered", 200, 150)
        back = time.monotonic() - then
    finally:
        bed.end_agents()
        label(bed, None)
    return f"keys {keys}, label leaf1; leaf2 refused; registered {back:.1f} s after the label was changed\n     status: {trouble}"


# The shortest that Kubernetes allows.
PERIOD = 10

# Our word for a driver's "no limit": the scheduler wakes nobody for a limit that goes away.
NO_LIMIT = 2**31 - 1


@contextlib.contextmanager
def periodic(bed: Bed):
    """The kubelet asks NodeGetInfo again every PERIOD seconds inside the block."""

    def every(seconds: int | None) -> None:
        patch = {"spec": {"nodeAllocatableUpdatePeriodSeconds": seconds}}
        path = f"/apis/storage.k8s.io/v1/csidrivers/{DRIVER_NAME}"
        bed.api.call("PATCH", path, patch, "application/merge-patch+json")

    every(PERIOD)
    try:
        yield
    finally:
        every(None)


def wait_count(bed: Bed, count: int) -> None:
    """CSINode says that the node takes so many volumes of the driver."""
    wait_until(f"allocatable {count}", lambda: bed.csi_node_entry().get("allocatable") == {"count": count}, pause=0.1)


@check(group="fence")
def max_volumes(bed: Bed) -> str:
    """--fence-max-volumes: CSINode follows the fence, the scheduler puts no second volume on the node, and what waits is woken."""

    def scheduled(name: str) -> str:
        name = unique(name)
        bed.create_claim(name)
        bed.create_pod(name, name, None)
        return name

    def node_of(pod: str) -> str | None:
        return bed.api.call("GET", f"{bed.PODS}/{pod}")["spec"].get("nodeName")

    bed.part("start", "scheduler")
    try:
        with periodic(bed), other_driver(bed, "--max-volumes=0"):
            fencing_agent(bed, "--fence-max-volumes", "--on-unhealthy=fence")
            wait_count(bed, NO_LIMIT)
            runs = scheduled("first")
            bed.wait_running(runs)
            _, up = put_up(bed)
            wait_count(bed, 1)
            lowered = time.monotonic() - up
            waits = scheduled("second")
            event = bed.wait_event(waits, "max volume count")
            time.sleep(2 * UNREGISTERED)
            expect(not node_of(waits), "a second volume landed on the fenced node")
            first = bed.health.recover()
            wait_until("the fence down", lambda: not fenced(bed))
            wait_count(bed, NO_LIMIT)
            raised = time.monotonic()
            wait_until("scheduled", lambda: node_of(waits), 400, 0.1)
            woken = time.monotonic()
            bed.wait_running(waits)
            gone(bed, waits)
            # An empty node takes one: 0 would mean "no limit".
            put_up(bed)
            wait_count(bed, 1)
            third = scheduled("third")
            bed.wait_event(third, "max volume count")
            gone(bed, runs)
            wait_until("the first volume lands", lambda: node_of(third), 60, 0.1)
            refused = bed.wait_event(third, REFUSED)
            gone(bed, third)
            take_down(bed)
            clean(bed, runs, waits, third)
    finally:
        bed.part("stop", "scheduler")
    return (
        f"fence up -> count 1 after {lowered:.1f} s; 1st OK -> no limit {raised - first:.1f} s (asked every {PERIOD} s), the waiting "
        f"pod scheduled {woken - raised:.2f} s after that; the last volume out -> the next lands, and is refused: "
        f"{code_of(refused)}\n     event: {event}"
    )
