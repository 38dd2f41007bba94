#!/usr/bin/env bash
# One real kubelet (node `node1`) with its API server, all on loopback, each part stopped and started by itself.
#
#   cluster.sh up DIR                    install, start everything, wait until it answers
#   cluster.sh down DIR                  stop everything that runs/*.pid names, unmount; DIR stays
#   cluster.sh start|stop DIR NAME       one of: etcd containerd apiserver kubelet scheduler; `up` starts all but the last
#   cluster.sh kubectl DIR ARGS…
#
# Environment: KUBE_VERSION, API_PORT, ETCD_PORT (and the one after it), KUBELET_PORT, CSI_WARDEN_CACHE. The ports of a
# folder are those of its `up`. DIR must be short: a socket's path has at most 107 bytes.
set -euo pipefail
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cmd=$1; mkdir -p "$2"; dir=$(cd "$2" && pwd); shift 2
version=${KUBE_VERSION:-1.36.2}
cache=${CSI_WARDEN_CACHE:-$HOME/.cache/csi-warden}/kubernetes-$version
export PATH=$PATH:/usr/local/go/bin

install() {
  local packages=()
  command -v containerd >/dev/null || packages+=(containerd)
  command -v runc >/dev/null || packages+=(runc)
  command -v etcd >/dev/null || packages+=(etcd-server)
  command -v iptables >/dev/null || packages+=(iptables)
  command -v openssl >/dev/null || packages+=(openssl)
  command -v python3 >/dev/null || packages+=(python3)
  if [ ! -f "$cache/pause.tar" ]; then
    command -v cc >/dev/null || packages+=(gcc)
    [ -e /usr/include/stdio.h ] || packages+=(libc6-dev)
  fi
  if [ ${#packages[@]} -gt 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
  fi
  mkdir -p "$cache"
  local name missing=()
  for name in kubelet kube-apiserver kubectl kube-scheduler; do [ -x "$cache/$name" ] || missing+=("$name"); done
  [ ${#missing[@]} -eq 0 ] || build_kubernetes "${missing[@]}"
  if [ ! -f "$cache/pause.tar" ]; then
    # the sandbox image that every pod needs; it is the test pods' container too
    echo 'int pause(void);int main(void){for(;;)pause();}' | cc -x c -static -Os -o "$cache/pause" -
    python3 "$here/image.py" localhost/pause:1 "$cache/pause" "$cache/pause.tar"
  fi
}

build_kubernetes() {
  command -v go >/dev/null || { echo "building Kubernetes $version takes a recent Go, from https://go.dev/dl" >&2; exit 1; }
  echo "building $* of Kubernetes $version into $cache, once: some minutes" >&2
  local staging=v0.${version#1.} build commands=("${@/#/k8s.io/kubernetes/cmd/}"); build=$(mktemp -d)
  # The staging modules have to be named one by one: a release carries them as v0.MINOR.PATCH.
  (
    cd "$build"
    { printf 'module cluster\n\ngo 1.26.0\n\ntool (\n'
      printf '\t%s\n' "${commands[@]}"
      printf ')\n\nrequire k8s.io/kubernetes v%s\n\n' "$version"
      go mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/.*"GoMod": "\(.*\)",/\1/p' | xargs cat |
        awk '/^\tk8s.io\/[a-z-]+ v0.0.0$/ {print $1}' | sort -u | while read -r m; do echo "replace $m => $m $staging"; done; } > go.mod
    go mod tidy
    mkdir bin
    go build -o bin/ "${commands[@]}"
    mv bin/* "$cache/"
  )
  rm -rf "$build"
}

wait_for() {
  for _ in $(seq 600); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done
  echo "timed out: $*" >&2; return 1
}

spawn() {
  local name=$1; shift
  if running "$name"; then echo "$name runs already" >&2; return 1; fi
  (cd "$dir" && exec setsid "$@" >>"log/$name.log" 2>&1 </dev/null) & echo $! > "$dir/run/$name.pid"
}

running() { [ -f "$dir/run/$1.pid" ] && kill -0 "$(cat "$dir/run/$1.pid")" 2>/dev/null; }

kubectl() { "$cache/kubectl" --kubeconfig "$dir/kubeconfig" "$@"; }

port_open() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

start() {
  # shellcheck source=/dev/null
  . "$dir/ports"
  case $1 in
    etcd)
      spawn etcd etcd --data-dir etcd --listen-client-urls "http://127.0.0.1:$etcd_port" --advertise-client-urls "http://127.0.0.1:$etcd_port" \
        --listen-peer-urls "http://127.0.0.1:$((etcd_port + 1))"
      wait_for port_open "$etcd_port" ;;
    containerd)
      spawn containerd containerd -c containerd.toml
      wait_for ctr -a "$dir/ctrd/containerd.sock" version ;;
    apiserver)
      spawn apiserver "$cache/kube-apiserver" --etcd-servers="http://127.0.0.1:$etcd_port" --bind-address=127.0.0.1 --secure-port="$api_port" \
        --cert-dir=certs --service-cluster-ip-range=10.96.0.0/16 --authorization-mode="${AUTHORIZATION:-AlwaysAllow}" --token-auth-file=certs/tokens.csv \
        --service-account-issuer=https://cluster.local --service-account-key-file=certs/sa.pub --service-account-signing-key-file=certs/sa.key \
        --disable-admission-plugins=ServiceAccount,TaintNodesByCondition --allow-privileged=true
      wait_for kubectl get --raw /readyz ;;
    kubelet)
      spawn kubelet "$cache/kubelet" --config=kubelet.yaml --kubeconfig=kubeconfig --root-dir="$dir/kubelet" --hostname-override=node1 --v=4
      wait_for port_open "$kubelet_port" ;;
    scheduler)
      spawn scheduler "$cache/kube-scheduler" --kubeconfig=kubeconfig --leader-elect=false --secure-port=0 --v=3 ;;
    *) usage ;;
  esac
}

# Ends one process that we started: SIGTERM, and SIGKILL for what is still there after GRACE tenths of a second.
stop() {
  local name=$1 grace=${2:-50} pid
  [ -f "$dir/run/$name.pid" ] || return 0
  pid=$(cat "$dir/run/$name.pid")
  # an API server that was asked to stop lingers on its port for a minute
  [ "$name" != apiserver ] || grace=5
  kill "$pid" 2>/dev/null || true
  for _ in $(seq "$grace"); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
  kill -KILL "$pid" 2>/dev/null || true
  for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
  rm -f "$dir/run/$name.pid"
}

configure() {
  api_port=${API_PORT:-16443}; etcd_port=${ETCD_PORT:-23790}; kubelet_port=${KUBELET_PORT:-10250}
  mkdir -p "$dir"/{run,log,etcd,certs,kubelet,ctrd,cni/bin,cni/conf}
  printf 'api_port=%s etcd_port=%s kubelet_port=%s\n' "$api_port" "$etcd_port" "$kubelet_port" > "$dir/ports"
  cat > "$dir/containerd.toml" <<T
version = 2
root = "$dir/ctrd/root"
state = "$dir/ctrd/state"
[grpc]
  address = "$dir/ctrd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true # a sandboxed machine may not lower it
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$dir/cni/bin"
    conf_dir = "$dir/cni/conf"
T
  cat > "$dir/kubeconfig" <<K
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:$api_port", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: admintoken}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
K
  cat > "$dir/kubelet.yaml" <<K
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
address: 127.0.0.1
port: $kubelet_port
healthzPort: 0
containerRuntimeEndpoint: unix://$dir/ctrd/containerd.sock
podLogsDir: $dir/log/pods
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
volumeStatsAggPeriod: 10s
evictionHard: {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%"}
K
  [ -f "$dir/certs/sa.key" ] || { openssl genrsa -out "$dir/certs/sa.key" 2048; openssl rsa -in "$dir/certs/sa.key" -pubout -out "$dir/certs/sa.pub"; } 2>/dev/null
  echo 'admintoken,admin,admin,system:masters' > "$dir/certs/tokens.csv"
}

up() {
  install
  configure
  start etcd
  start containerd
  ctr -a "$dir/ctrd/containerd.sock" -n k8s.io images import "$cache/pause.tar" >/dev/null
  start apiserver
  start kubelet
  wait_for kubectl get csinode node1
}

down() {
  stop kubelet
  if running containerd; then
    local task
    for task in $(ctr -a "$dir/ctrd/containerd.sock" -n k8s.io tasks ls -q 2>/dev/null); do
      timeout 10 ctr -a "$dir/ctrd/containerd.sock" -n k8s.io tasks rm -f "$task" >/dev/null 2>&1 || true
    done
  fi
  stop containerd
  # a shim outlives its containerd; ours carry our socket among their arguments
  local args pid
  for args in /proc/[0-9]*/cmdline; do
    if tr '\0' '\n' 2>/dev/null <"$args" | grep -qxF "$dir/ctrd/containerd.sock"; then
      pid=${args#/proc/}; kill -KILL "${pid%/cmdline}" 2>/dev/null || true
    fi
  done
  stop apiserver
  stop etcd
  for pid in "$dir"/run/*.pid; do
    [ ! -e "$pid" ] || stop "$(basename "$pid" .pid)" 10
  done
  # the kubelet links to its containers' logs from a folder that no setting moves
  find /var/log/containers -maxdepth 1 -type l -lname "$dir/*" -delete 2>/dev/null || true
  awk -v d="$dir/" 'index($2, d) == 1 {print $2}' /proc/mounts | sort -r | while read -r m; do umount -l "$m" 2>/dev/null || true; done
}

case $cmd in
  up) up ;;
  down) down ;;
  start) [ $# -eq 1 ] || usage; start "$1" ;;
  stop) [ $# -eq 1 ] || usage; stop "$1" ;;
  kubectl) kubectl "$@" ;;
  *) usage ;;
esac
