"""The agent as a container: a pod such as a CSI driver's DaemonSet makes, from images packed here.

The registrar's container is written as for the upstream registrar. Only its image is ours.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
import time

from bed import Bed, HttpEndpoint, free_port
from image import pack
from watch import DRIVER_NAME, NODE, Failed, wait_until

AGENT_IMAGE, DRIVER_IMAGE, PROBER_IMAGE = "localhost/csi-warden:1", "localhost/mounting-driver:1", "localhost/prober:1"
REGISTRAR, LIVENESS = "/csi-node-driver-registrar", "/livenessprobe"
MEMORY_LIMIT = 16 << 20

# What a policy of the kind `restricted` asks for, but for the user: a driver's socket is root's.
LOCKED = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def load_images(bed: Bed) -> None:
    """Gives the node its images, once."""
    if bed.images:
        return
    names = {"/csi-warden": REGISTRAR, LIVENESS: REGISTRAR}
    images = {
        AGENT_IMAGE: ({REGISTRAR: bed.agent_binary}, names),
        DRIVER_IMAGE: ({"/driver": bed.driver_binary}, {}),
    }
    if bed.has_health:
        # It has the probe command, and a check with all that the check needs: here, itself.
        images[PROBER_IMAGE] = ({"/csi-warden": bed.agent_binary, "/check": bed.check_binary}, {})
    for name, (files, links) in images.items():
        archive = bed.root / "image.tar"
        pack(name, archive, files, links)
        subprocess.run([*bed.ctr, "images", "import", archive], capture_output=True, timeout=120, check=True)
        archive.unlink()
    bed.images = True


class Sidecar(HttpEndpoint):
    """The pod: driver, registrar and, where wanted, a prober."""

    def __init__(self, bed: Bed, name: str, *, health: bool):
        self.bed, self.name, self.health = bed, name, health
        self.port = free_port()
        self.path = f"{bed.PODS}/{name}"
        # The node's hardware, as far as /check knows.
        self.hardware = bed.root / "hardware"
        self.hardware.mkdir(exist_ok=True)
        self.repair()
        self.started = 0.0

    def broken(self) -> float:
        """Breaks the hardware; returns when."""
        now = time.monotonic()
        (self.hardware / "broken").touch()
        return now

    def repair(self) -> float:
        """Repairs it; returns when."""
        now = time.monotonic()
        (self.hardware / "broken").unlink(missing_ok=True)
        return now

    # --- the manifest ------------------------------------------------------------------------------------------------

    def create(self) -> None:
        containers, folders = [self._driver(), self._registrar()], {
            "plugin-dir": self.bed.driver_socket.parent,
            "registration-dir": self.bed.socket.parent,
            "kubelet-dir": self.bed.kubelet_root,
            "log-dir": self.bed.calls.parent,
        }
        volumes = []
        if self.health:
            containers.append(self._prober())
            folders["hardware"] = self.hardware
            volumes.append({"name": "health", "emptyDir": {}})
        for name, path in folders.items():
            volumes.append({"name": name, "hostPath": {"path": str(path), "type": "Directory"}})
        spec = {
            "nodeName": NODE,
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 10,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"imagePullPolicy": "Never", **container} for container in containers],
            "volumes": volumes,
        }
        self.started = time.monotonic()
        self.bed.api.call("POST", self.bed.PODS, {"metadata": {"name": self.name}, "spec": spec})

    def _driver(self) -> dict:
        root, log = str(self.bed.kubelet_root), str(self.bed.calls.parent)
        return {
            "name": "driver",
            "image": DRIVER_IMAGE,
            "args": self.bed.driver_flags(),
            "securityContext": {"privileged": True},
            "volumeMounts": [
                {"name": "kubelet-dir", "mountPath": root, "mountPropagation": "Bidirectional"},
                {"name": "log-dir", "mountPath": log},
            ],
        }

    def _registrar(self) -> dict:
        host_path = f"--kubelet-registration-path={self.bed.driver_socket}"
        args = ["--v=5", "--csi-address=/csi/csi.sock", host_path, f"--http-endpoint=:{self.port}"]
        mounts = [{"name": "plugin-dir", "mountPath": "/csi"}]
        mounts.append({"name": "registration-dir", "mountPath": "/registration"})
        if self.health:
            args += ["--health-file=/health/health", "--health-interval=2s", "--recovery-hold=3s", "--start-grace=10s"]
            mounts.append({"name": "health", "mountPath": "/health"})
        exec_form = [REGISTRAR, host_path, "--mode=kubelet-registration-probe"]
        often = {"periodSeconds": 2, "timeoutSeconds": 5}
        return {
            "name": "node-driver-registrar",
            "image": AGENT_IMAGE,
            "args": args,
            "securityContext": LOCKED,
            "resources": {"requests": {"memory": "8Mi", "cpu": "10m"}, "limits": {"memory": str(MEMORY_LIMIT)}},
            # Upstream documents both forms, for livenessProbe. A container has one of it, so the other stands here.
            "livenessProbe": {"httpGet": {"path": "/healthz", "port": self.port}, **often},
            "readinessProbe": {"exec": {"command": exec_form}, **often},
            "volumeMounts": mounts,
        }

    def _prober(self) -> dict:
        return {
            "name": "prober",
            "image": PROBER_IMAGE,
            "command": ["/csi-warden", "probe", "--write", "/health/health", "--period", "1500ms"],
            "args": ["--timeout", "1s", "--", "/check"],
            "securityContext": LOCKED,
            "resources": {"limits": {"memory": str(MEMORY_LIMIT)}},
            "volumeMounts": [
                {"name": "health", "mountPath": "/health"},
                {"name": "hardware", "mountPath": "/hardware", "readOnly": True},
            ],
        }

    # --- what can be seen --------------------------------------------------------------------------------------------

    def container(self, name: str = "node-driver-registrar") -> dict:
        """The container's status; empty until the kubelet has told."""
        statuses = (self.bed.api.find(self.path) or {}).get("status", {}).get("containerStatuses") or []
        return next((status for status in statuses if status["name"] == name), {})

    def wait_ready(self, restarts: int = 0) -> float:
        """When the registrar's container was seen to run and its readiness probe to succeed, after so many restarts."""

        def ready() -> bool:
            status = self.container()
            return status.get("ready", False) and status["restartCount"] == restarts

        wait_until(f"{self.name} ready, {restarts} restarts", ready, pause=0.1)
        return time.monotonic()

    def wait_fenced(self) -> None:
        """Waits until the fence is up, by the registrar's metrics."""
        up = re.compile(r'^csi_warden_fenced\{.*by="health".*\} 1$', re.MULTILINE)
        wait_until("the fence up", lambda: up.search(self.text("/metrics")), pause=0.05)

    def pid(self) -> int:
        """The registrar's process, as the host sees it."""
        return self.bed.pid_of(self.container()["containerID"])

    def process(self) -> dict[str, str]:
        """Fields of the registrar's /proc/PID/status."""
        lines = pathlib.Path(f"/proc/{self.pid()}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def memory(self) -> dict[str, int]:
        """Bytes that the registrar's cgroup counts: `used`, `peak` and `limit`."""
        lines = pathlib.Path(f"/proc/{self.pid()}/cgroup").read_text().splitlines()
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
        if "memory" in paths:
            folder = pathlib.Path("/sys/fs/cgroup/memory" + paths["memory"])
            files = {"used": "usage_in_bytes", "peak": "max_usage_in_bytes", "limit": "limit_in_bytes"}
        else:
            folder = pathlib.Path("/sys/fs/cgroup" + paths[""])
            files = {"used": "current", "peak": "peak", "limit": "max"}
        return {what: int((folder / f"memory.{file}").read_text()) for what, file in files.items()}

    def delete(self) -> dict:
        """Deletes the pod as an operator does; returns its last state as the API server had it, once it is gone."""
        version = self.bed.api.call("GET", self.path)["metadata"]["resourceVersion"]
        self.bed.api.call("DELETE", self.path)
        selector = f"fieldSelector=metadata.name%3D{self.name}&resourceVersion={version}"
        for event in self.bed.api.stream(f"{self.bed.PODS}?watch=true&timeoutSeconds=60&{selector}"):
            if event["type"] == "DELETED":
                return event["object"]
        raise Failed(f"pod {self.name} not gone within 60 s")

    def logs(self) -> str:
        """The ends of the containers' logs, and what the pod's events say."""
        text = []
        for path in sorted((self.bed.root / "log/pods").glob(f"default_{self.name}_*/*/*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            text.append(f"--- {path.parent.name}/{path.name}\n" + "\n".join(lines))
        selector = f"fieldSelector=involvedObject.name%3D{self.name}"
        events = self.bed.api.call("GET", f"/api/v1/namespaces/default/events?{selector}")
        text.append("--- events\n" + "\n".join(item.get("message", "") for item in events["items"]))
        return "\n".join(text)


@contextlib.contextmanager
def sidecar(bed: Bed, name: str, *, health: bool = False):
    """The driver and its agent run as a pod inside the block, and not as processes of ours."""
    load_images(bed)
    bed.start_over()
    bed.csi_node.wait(False)
    for state in bed.driver_socket.parent.glob("*-warden*.json"):
        state.unlink()
    bed.leave_table(bed.driver_socket.parent, "notFollowed")
    pod = Sidecar(bed, name, health=health)
    pod.create()
    try:
        yield pod
    except BaseException:
        print(pod.logs(), flush=True)
        raise
    finally:
        bed.delete_pod(name)
        bed.wait_deleted(name)
        bed.driver_socket.unlink(missing_ok=True)
