"""The agent in the virtual machine, between a driver and a kubelet in small."""

from __future__ import annotations

import json
import pathlib
import shlex

from vm import PATIENCE, Failed, Machine

NAME = "vm.csi-warden.example"
SOCKET = f"/run/reg/{NAME}-reg.sock"
CARRIER = "/sys/class/net/dummy0/carrier"
FABRIC = "probes: [{name: fabric, type: rdma, rdma: {devices: [rxe0]}}]"
ANY = "probes: [{name: fabric, type: rdma}]"
DISK = "probes: [{name: disk, type: nvme, period: 1s, nvme: {devices: [nvme0], smart: true}}]"
# Short, so that the checks are; a node has 30 s.
HOLD = 2


class Bed:
    """One boot of the machine, and the agent in it."""

    def __init__(self, machine: Machine):
        self.vm = machine
        self.vm.sh(
            "mkdir -p /run/reg; (node /run/csi.sock /run/reg %s >> /tmp/node.log 2>&1 &); (clock watch /run/reg %s-reg.sock >> /tmp/clock.log 2>&1 &)"
            % (NAME, NAME)
        )
        self.vm.wait("the driver listens", "[ -S /run/csi.sock ]")

    def settle(self, config: str = FABRIC, *flags: str, hold: float = HOLD) -> None:
        """Everything as it should be, and a new agent without a past that has registered the driver."""
        self.end_agent()
        self.mend()
        self.start_agent(config, *flags, hold=hold)
        self.registered()

    def mend(self) -> None:
        """The hardware as after the boot."""
        self.warn(0)
        self.vm.sh(
            "ip link set dummy0 up; echo 1 > %s; "
            "ip addr show dev dummy0 | grep -q 10.9.0.1/24 || ip addr add 10.9.0.1/24 dev dummy0; "
            "[ -e /sys/class/nvme/nvme0 ] || echo 1 > /sys/bus/pci/rescan; "
            "[ -e /sys/class/infiniband/rxe0 ] || rdma link add rxe0 type rxe netdev dummy0; "
            "[ -e /dev/infiniband/uverbs0 ] || mknod /dev/infiniband/uverbs0 c 231 192; "
            "[ -e /dev/infiniband/rdma_cm ] || mknod /dev/infiniband/rdma_cm c 10 $(sed 's/.*://' /sys/class/misc/rdma_cm/dev)"
            % CARRIER
        )
        self.vm.wait("the port is active", "grep -q 4: /sys/class/infiniband/rxe0/ports/1/state")

    def warn(self, bits: int) -> None:
        """Sets the disk's SMART critical warning."""
        self.vm.qmp("qom-set", path="/machine/peripheral/nvme0", property="smart_critical_warning", value=bits)

    def start_agent(self, config: str = FABRIC, *flags: str, hold: float = HOLD) -> None:
        words = ["csi-warden", "--csi-address=/run/csi.sock", "--kubelet-registration-path=/run/csi.sock"]
        # The quick reaction: what is measured is how soon the port is seen. Others are tried on the real kubelet.
        words += ["--on-unhealthy=deregister", "--plugin-registration-path=/run/reg", "--state-dir=/run/state", "--config=/run/warden.yaml", "--v=4"]
        words += [f"--recovery-hold={hold}s", *flags]
        self.vm.sh(
            f"rm -rf /run/state; mkdir /run/state; echo {shlex.quote(config)} > /run/warden.yaml; : > /tmp/agent.log; : > /tmp/clock.log; "
            f": > /tmp/node.log; (exec {shlex.join(words)} > /tmp/agent.log 2>&1 & echo $! > /run/agent.pid)"
        )

    def end_agent(self) -> None:
        self.vm.sh(
            "[ ! -e /run/agent.pid ] || { p=$(cat /run/agent.pid); rm /run/agent.pid; kill $p; i=0; "
            "while [ -e /proc/$p ] && [ $i -lt 100 ]; do i=$((i + 1)); sleep 0.1; done; kill -9 $p 2>/dev/null; true; }"
        )

    def registered(self) -> None:
        """Waits until the driver is registered."""
        self.vm.wait("the driver is registered", f"[ -e {SOCKET} ] && tail -n 1 /tmp/node.log | grep -q ^registered")

    def shown(self) -> None:
        """Waits until the registration socket is there."""
        self.vm.wait("the registration socket is shown", f"[ -e {SOCKET} ]")

    def gone(self, reason: str) -> dict:
        """Waits until the registration socket is gone, and expects `reason` to be why; returns the status."""
        self.vm.wait("the registration socket is gone", f"[ ! -e {SOCKET} ]")
        status = self.status()
        why = status["health"]["causeReason"] or ""
        if status["health"]["verdict"] != "unhealthy" or reason not in why:
            raise Failed(f"the verdict is {status['health']['verdict']} because of {why!r} instead of {reason}")
        return status

    def stays_shown(self, seconds: float) -> None:
        """Expects that the registration socket is not touched for so long."""
        before = self.changes()
        self.vm.sh(f"sleep {seconds}", patience=seconds * 4 + PATIENCE)
        if (after := self.changes()) != before:
            raise Failed(f"the socket changed: {after[len(before):]}; {self.status()['health']}")
        if self.vm.run(f"[ -e {SOCKET} ]")[0]:
            raise Failed("the socket is not there")

    def changes(self) -> list[tuple[float, str]]:
        """What happened to the registration socket since the agent started: seconds by the kernel's clock, shown or gone."""
        lines = self.vm.sh("cat /tmp/clock.log").splitlines()
        return [(int(at) / 1e6, what) for at, what in (line.split() for line in lines)]

    def stood_still(self) -> list[tuple[float, float]]:
        """When the machine stood still, by `clock late`: each end by the kernel's clock, and how long."""
        lines = self.vm.sh("cat /tmp/late.log").splitlines()
        return [(int(end) / 1e6, int(lasted) / 1e6) for end, lasted in (line.split() for line in lines)]

    def put(self, path: str, text: str) -> float:
        """Writes `text` into a file; returns when, by the kernel's clock."""
        return int(self.vm.sh(f"clock put {path} {text}")) / 1e6

    def now(self) -> float:
        """The kernel's clock, in hundredths of a second."""
        return float(self.vm.sh("cut -d ' ' -f 1 /proc/uptime"))

    def unplug(self) -> float:
        return self.put(CARRIER, "0")

    def plug(self) -> float:
        return self.put(CARRIER, "1")

    def status(self) -> dict:
        """What the agent says of itself."""
        return json.loads(self.vm.sh(f"csi-warden status --status-socket=/run/state/{NAME}-warden-status.sock --output=json || [ $? -le 2 ]"))

    def probe(self, config: str = "") -> tuple[int, dict]:
        """What `csi-warden probe` says, and its exit code."""
        config = f"echo {shlex.quote(config)} > /tmp/probe.yaml; f=/tmp/probe.yaml; " if config else "f=/run/warden.yaml; "
        code, said = self.vm.run(config + "csi-warden probe --config $f --output=json 2>/tmp/probe.err")
        try:
            return code, json.loads(said)
        except ValueError:
            raise Failed(f"probe: exit {code}: {said} {self.vm.run('cat /tmp/probe.err')[1]}") from None

    def tails(self) -> str:
        """The ends of the logs."""
        try:
            return self.vm.run("for f in agent node clock; do echo \"--- $f.log\"; tail -n 15 /tmp/$f.log; done")[1]
        except (Failed, OSError) as error:
            return f"no logs: {error}"
