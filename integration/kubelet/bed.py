"""What the checks and the figures stand on: a cluster, a driver, agents, pods."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from watch import DRIVER_NAME, NODE, PATIENCE, Api, CsiNodeWatch, Failed, FolderWatch, wait_until

HERE = pathlib.Path(__file__).resolve().parent


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """One process of ours, with a log, known to the cluster's `down`."""

    def __init__(self, root: pathlib.Path, name: str, command: list[str]):
        self.log = root / "log" / f"{name}.log"
        self.pid_file = root / "run" / f"{name}.pid"
        with open(self.log, "ab") as log:
            log.write(f"--- {' '.join(map(str, command))}\n".encode())
            log.flush()
            self.started = time.monotonic()
            self.child = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pid_file.write_text(f"{self.child.pid}\n")

    @property
    def pid(self) -> int:
        return self.child.pid

    def running(self) -> bool:
        return self.child.poll() is None

    def send(self, number: signal.Signals, patience: float = PATIENCE) -> int:
        """Sends a signal that ends the process; returns its exit code."""
        self.child.send_signal(number)
        try:
            return self.child.wait(patience)
        except subprocess.TimeoutExpired:
            raise Failed(f"pid {self.pid} still runs {patience:.0f} s after {number.name}") from None
        finally:
            if not self.running():
                self.pid_file.unlink(missing_ok=True)

    def end(self) -> None:
        """Makes sure that it is gone."""
        if self.running():
            self.child.kill()
        self.child.wait()
        self.pid_file.unlink(missing_ok=True)


class HttpEndpoint:
    """The HTTP address of an agent, wherever that runs."""

    port: int

    def http(self, path: str) -> int:
        """The status code at `path`; 0 where nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def text(self, path: str) -> str:
        """The body at `path`; empty where nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    def wait_http(self, path: str, wanted: int, patience: float = PATIENCE) -> None:
        wait_until(f"{path} answers {wanted}", lambda: self.http(path) == wanted, patience, 0.05)


class Agent(Process, HttpEndpoint):
    """The registrar under test."""

    def __init__(self, root: pathlib.Path, name: str, command: list[str], port: int):
        self.port = port
        super().__init__(root, name, [*command, f"--http-endpoint=127.0.0.1:{port}"])


class HealthFile:
    """The file that a health prober shares with the agent."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, text: str) -> float:
        """Replaces the file in one step; returns when, as of just before."""
        draft = self.path.with_name(".draft")
        draft.write_text(text + "\n")
        now = time.monotonic()
        draft.rename(self.path)
        return now

    def fail(self, after_first: Callable[[], None] | None = None) -> float:
        """Two ERRORs, further apart than the confirm interval; returns when the second, deciding one was written."""
        self.write("ERROR port mlx5_0/1 is down")
        if after_first:
            after_first()
        time.sleep(1.3)
        return self.write("ERROR port mlx5_0/1 is down")

    def recover(self) -> float:
        """Two OKs; returns when the first was written."""
        first = self.write("OK")
        time.sleep(1.1)
        self.write("OK")
        return first


class Bed:
    """The cluster and everything beside it."""

    def __init__(self, root: pathlib.Path, agent: str, driver: str, kind: str, check: str = ""):
        self.root, self.agent_binary, self.driver_binary, self.check_binary = root, agent, driver, check
        self.has_health = kind != "upstream"
        ports = dict(word.split("=") for word in (root / "ports").read_text().split())
        self.api = Api(int(ports["api_port"]))
        self.kubelet_port = int(ports["kubelet_port"])
        self.ctr = ["ctr", "-a", f"{root}/ctrd/containerd.sock", "-n", "k8s.io"]
        self.images = False
        self.kubelet_root = root / "kubelet"
        self.socket = self.kubelet_root / "plugins_registry" / f"{DRIVER_NAME}-reg.sock"
        self.driver_socket = self.kubelet_root / "plugins" / DRIVER_NAME / "csi.sock"
        self.driver_socket.parent.mkdir(parents=True, exist_ok=True)
        self.calls = root / "log" / "calls"
        self.health = HealthFile(root / "health" / "health")
        self.csi_node = CsiNodeWatch(self.api)
        self.folder = FolderWatch(self.socket)
        self.driver: Process | None = None
        self.agents: list[Agent] = []
        self.count = 0
        help_text = subprocess.run([agent, "--help"], capture_output=True, text=True, check=False)
        self.help = help_text.stdout + help_text.stderr
        self._describe_driver()

    def _describe_driver(self) -> None:
        path = "/apis/storage.k8s.io/v1/csidrivers"
        if not self.api.find(f"{path}/{DRIVER_NAME}"):
            spec = {"attachRequired": False, "podInfoOnMount": True, "volumeLifecycleModes": ["Ephemeral", "Persistent"]}
            self.api.call("POST", path, {"metadata": {"name": DRIVER_NAME}, "spec": spec})

    # --- parts -------------------------------------------------------------------------------------------------------

    def part(self, verb: str, name: str) -> None:
        """Starts or stops one part of the cluster."""
        done = subprocess.run(
            [HERE / "cluster.sh", verb, self.root, name], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise Failed(f"cluster.sh {verb} {name}: {done.stderr.strip()}")

    def part_runs(self, name: str) -> bool:
        try:
            os.kill(int((self.root / "run" / f"{name}.pid").read_text()), 0)
        except (OSError, ValueError):
            return False
        return True

    @contextlib.contextmanager
    def without(self, name: str):
        """A part of the cluster is down inside the block, and up again after it."""
        self.part("stop", name)
        try:
            yield
        finally:
            self.part("start", name)

    def driver_flags(self) -> list[str]:
        flags = ["--endpoint", self.driver_socket, "--name", DRIVER_NAME, "--node-id", NODE, "--max-volumes", "16"]
        flags += ["--topology", "topology.csi-warden.example/rack=r1", "--stage", "--log", self.calls]
        return [str(flag) for flag in flags]

    def start_driver(self, *flags: str) -> None:
        self.driver = Process(self.root, "driver", [self.driver_binary, *self.driver_flags(), *flags])
        wait_until("the driver's socket", self.driver_socket.exists)

    def start_agent(self, *flags: str, health: bool = True, fresh: bool = False) -> Agent:
        """One more agent; later flags win. `fresh`: it remembers nothing."""
        if fresh:
            self.count += 1
            self.state().mkdir(exist_ok=True)
        command = [
            self.agent_binary,
            f"--csi-address={self.driver_socket}",
            f"--kubelet-registration-path={self.driver_socket}",
            f"--plugin-registration-path={self.socket.parent}",
        ]
        if self.has_health and health:
            wanted = [
                f"--health-file={self.health.path}",
                "--health-interval=2s",
                "--health-max-age=10m",
                "--health-dead-after=30m",
                "--recovery-hold=3s",
                "--max-recovery-hold=3s",  # the checks of one run are many flaps
                "--start-grace=2s",
                f"--state-dir={self.state()}",
                "--on-unhealthy=deregister",
            ]
            command += [flag for flag in wanted if self.knows(flag)]
        agent = Agent(self.root, f"agent-{len(self.agents) + 1}", [*command, *flags], free_port())
        self.agents.append(agent)
        return agent

    def remember(self, gap: str | None) -> None:
        """The next agent begins afresh, but for the table of volumes of one before it; `gap` as in `leave_table`."""
        self.count += 1
        self.state().mkdir()
        self.leave_table(self.state(), gap)

    def leave_table(self, folder: pathlib.Path, gap: str | None) -> None:
        """What an agent leaves that has just ended: it knows of no volume, and `gap` is why there may be others."""
        left = {
            "schema": 1,
            "driver": DRIVER_NAME,
            "bootId": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "endedBootSeconds": int(time.clock_gettime(time.CLOCK_BOOTTIME)),
            "crashesBootSeconds": [],
            "gap": gap,
            "volumes": {},
        }
        (folder / f"{DRIVER_NAME}-warden-volumes.json").write_text(json.dumps(left))
        # An override that a check left would outlast its agent.
        (folder / f"{DRIVER_NAME}-warden-override.json").unlink(missing_ok=True)
        # Who ends in good order takes it away; one that lies there belies the file.
        self.driver_socket.with_name(f"{DRIVER_NAME}-warden.sock").unlink(missing_ok=True)

    def state(self) -> pathlib.Path:
        """The folder where the agents of now keep their verdict."""
        return self.root / f"state-{self.count}"

    def knows(self, flag: str) -> bool:
        """Whether the agent's help names the flag."""
        return flag.split("=")[0].removeprefix("-") in self.help

    @property
    def agent(self) -> Agent:
        """The newest agent."""
        return self.agents[-1]

    def settle(self) -> None:
        """Everything runs, one agent, healthy, and CSINode has the driver."""
        for name in ("etcd", "containerd", "apiserver", "kubelet"):
            if not self.part_runs(name):
                self.part("start", name)
        if not (self.driver and self.driver.running()):
            self.start_driver()
        self.health.write("OK")
        if [agent.running() for agent in self.agents].count(True) != 1 or not self.agent.running():
            self.end_agents()
            self.start_agent(fresh=True)
        self.csi_node.wait(True)
        wait_until("the registration socket", self.socket.exists)
        if self.has_health:
            self.agent.wait_http("/registered", 200)

    def start_over(self) -> None:
        """After a failed check: new agents and a new driver."""
        self.end_agents()
        if self.driver:
            self.driver.end()
            self.driver = None

    def end_agents(self) -> None:
        for agent in self.agents:
            agent.end()
        if self.socket.is_socket():
            self.socket.unlink()

    def close(self) -> None:
        self.start_over()

    # --- what can be seen --------------------------------------------------------------------------------------------

    def identity(self) -> tuple[int, int] | None:
        """Which registration socket is there, if any: its inode, which the next one may be given again, and its birth."""
        try:
            socket = self.socket.lstat()
        except FileNotFoundError:
            return None
        return socket.st_ino, socket.st_mtime_ns

    def calls_of(self, method: str, volume: str = "", code: str = "") -> int:
        """How many calls of that method the driver has seen: about the volume, with the code, if those are given."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        wanted = (method, volume, code)
        seen = (line.split()[1:] for line in lines)
        return sum(all(want in ("", word) for want, word in zip(wanted, words, strict=True)) for words in seen)

    def volumes_called(self, prefix: str) -> set[str]:
        """The volumes that calls were about, by their IDs' beginning."""
        return {line.split()[2] for line in self.calls.read_text().splitlines() if line.split()[2].startswith(prefix)}

    def called_at(self, method: str, volume: str) -> float:
        """When the driver answered OK for the last time to such a call."""
        lines = [line.split() for line in self.calls.read_text().splitlines()]
        answered = [int(words[0]) for words in lines if words[1:] == [method, volume, "Ok"]]
        return answered[-1] / 1000 - time.time() + time.monotonic()

    def warden(self, *arguments: str) -> str:
        """What a subcommand that asks the running agent prints; it must succeed."""
        command = [self.agent_binary, *arguments, f"--status-socket={self.state()}/{DRIVER_NAME}-warden-status.sock"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        # A status of 1 says "not registered".
        if done.returncode and not done.stdout:
            raise Failed(f"csi-warden {' '.join(arguments)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def status(self) -> dict:
        """What `csi-warden status` knows."""
        wait_until("the status socket", (self.state() / f"{DRIVER_NAME}-warden-status.sock").exists)
        return json.loads(self.warden("status", "--output=json"))

    def csi_node_entry(self) -> dict:
        """What CSINode has of our driver."""
        drivers = self.api.call("GET", f"/apis/storage.k8s.io/v1/csinodes/{NODE}")["spec"]["drivers"]
        return next(driver for driver in drivers if driver["name"] == DRIVER_NAME)

    def volume_record(self, pod: str) -> pathlib.Path:
        """The kubelet's record of a pod's only volume of our driver; a path that may not exist."""
        uid = self.api.call("GET", f"{self.PODS}/{pod}")["metadata"]["uid"]
        folder = self.kubelet_root / "pods" / uid / "volumes/kubernetes.io~csi"
        return next(folder.glob("*/vol_data.json"), folder / "vol_data.json")

    def mounts(self) -> list[str]:
        """The mount points of CSI volumes below the kubelet's folder."""
        points = [line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()]
        below = [point for point in points if point.startswith(f"{self.kubelet_root}/")]
        return [point for point in below if "kubernetes.io~csi" in point or "kubernetes.io/csi" in point]

    def tails(self) -> str:
        """The ends of the logs that may say why."""
        text = []
        for path in [*(agent.log for agent in self.agents[-2:]), self.calls]:
            if path.exists():
                text.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:]))
        kubelet = (self.root / "log/kubelet.log").read_text(errors="replace").splitlines()
        words = (DRIVER_NAME, "plugin_watcher", "operation_generator", "reconciler.go", "csi_plugin")
        about = [line[:300] for line in kubelet[-4000:] if any(word in line for word in words)]
        text.append("--- kubelet.log, lines about the driver\n" + "\n".join(about[-25:]))
        return "\n".join(text)

    # --- pods --------------------------------------------------------------------------------------------------------

    PODS = "/api/v1/namespaces/default/pods"

    def create_pod(self, name: str, claim: str | None = None, node: str | None = NODE) -> None:
        """A pod with one volume of our driver: inline, or through a claim. `node`: `None` if a scheduler is to choose."""
        volume = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"csi": {"driver": DRIVER_NAME}}
        container = {"name": "pause", "image": "localhost/pause:1", "imagePullPolicy": "Never"}
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
        spec = {
            **({"nodeName": node} if node else {}),
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
            "volumes": [{"name": "data", **volume}],
        }
        self.api.call("POST", self.PODS, {"metadata": {"name": name}, "spec": spec})

    def create_claim(self, name: str) -> None:
        """A claim with its volume, both of that name. There is no controller to bind them."""
        claims = "/api/v1/namespaces/default/persistentvolumeclaims"
        size, modes = {"storage": "1Mi"}, ["ReadWriteOnce"]
        spec = {"accessModes": modes, "resources": {"requests": size}, "storageClassName": "", "volumeName": name}
        bound = {"pv.kubernetes.io/bind-completed": "yes"}  # or the scheduler waits for it
        claim = self.api.call("POST", claims, {"metadata": {"name": name, "annotations": bound}, "spec": spec})
        reference = {"namespace": "default", "name": name, "uid": claim["metadata"]["uid"]}
        spec = {"accessModes": modes, "capacity": size, "storageClassName": "", "claimRef": reference}
        spec["csi"] = {"driver": DRIVER_NAME, "volumeHandle": name}
        self.api.call("POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": spec})
        patch = "application/merge-patch+json"
        self.api.call("PATCH", f"/api/v1/persistentvolumes/{name}/status", {"status": {"phase": "Bound"}}, patch)
        status = {"phase": "Bound", "accessModes": modes, "capacity": size}
        self.api.call("PATCH", f"{claims}/{name}/status", {"status": status}, patch)

    def wait_running(self, name: str, patience: float = 150) -> str:
        """Waits until the pod runs; returns what the container reads from `volume_id`.

        The patience covers the kubelet's pause between tries of one mount, which grows to two minutes.
        """

        def started() -> str | None:
            container = self.container_of(name)
            return container.get("containerID") if "running" in container.get("state", {}) else None

        pid = self.pid_of(wait_until(f"pod {name} runs", started, patience, 0.1))
        return pathlib.Path(f"/proc/{pid}/root/data/volume_id").read_text()

    def container_of(self, name: str) -> dict:
        """The status of a pod's only container; empty until the kubelet has told."""
        status = (self.api.find(f"{self.PODS}/{name}") or {}).get("status", {})
        return (status.get("containerStatuses") or [{}])[0]

    def pid_of(self, container_id: str) -> int:
        """The first process of a running container, by the id that the API has for it."""
        container = container_id.removeprefix("containerd://")
        table = subprocess.run([*self.ctr, "tasks", "ls"], capture_output=True, text=True, timeout=30, check=True).stdout
        return next(int(line.split()[1]) for line in table.splitlines() if line.startswith(container))

    def wait_event(self, pod: str, text: str, patience: float = PATIENCE) -> str:
        """Waits for an event of the pod that contains `text`."""

        def found() -> str | None:
            return next((message for message in self.events(pod) if text in message), None)

        return wait_until(f"an event of {pod} with {text!r}", found, patience, 0.1)

    def events(self, pod: str = "") -> list[str]:
        """The texts of a pod's events, or of all."""
        selector = f"?fieldSelector=involvedObject.name%3D{pod}" if pod else ""
        items = self.api.call("GET", f"/api/v1/namespaces/default/events{selector}")["items"]
        return [item.get("message", "") for item in items]

    def delete_pod(self, name: str) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            self.api.call("DELETE", f"{self.PODS}/{name}")

    def wait_deleted(self, name: str, patience: float = 150) -> None:
        wait_until(f"pod {name} gone", lambda: self.api.find(f"{self.PODS}/{name}") is None, patience, 0.1)

    @contextlib.contextmanager
    def pod(self, name: str, claim: str | None = None):
        """A pod that is there inside the block; its end is waited for only where the block went well."""
        self.create_pod(name, claim)
        try:
            yield
        except BaseException:
            self.delete_pod(name)
            raise
        self.delete_pod(name)
        self.wait_deleted(name)
