# What there is to run. `just --list` shows it.

# Builds and tests use exactly the locked dependencies.
locked := "--locked"

_list:
    @just --list --unsorted

# Formatting, lints, documentation
check:
    cargo fmt --check
    cargo clippy {{ locked }} --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc {{ locked }} --no-deps --document-private-items

# Unit tests, promises, documents
test:
    cargo test {{ locked }}

# Review changed snapshots (needs cargo-insta)
snap:
    cargo insta test --review

# Fuzz one target, such as `authority` (needs cargo-fuzz and a nightly toolchain); ends after SECONDS
fuzz TARGET SECONDS="60":
    mkdir -p fuzz/corpus/{{ TARGET }} fuzz/seeds/{{ TARGET }}
    cargo +nightly fuzz run --sanitizer none {{ TARGET }} fuzz/corpus/{{ TARGET }} fuzz/seeds/{{ TARGET }} -- \
        -max_total_time={{ SECONDS }} -max_len=4096 -rss_limit_mb=2048 -timeout=20

# Licences, duplicates, sources, advisories (needs cargo-deny; advisories need the network)
deny:
    cargo deny {{ locked }} check

# The real kubelet; needs root and the network on its first run. `just integration --list` shows the checks
integration *OPTIONS:
    integration/kubelet/run {{ OPTIONS }}

# Calls direct and through the proxy, compared; csi-sanity too. Root; `just conformance --list` shows the checks
conformance *OPTIONS:
    integration/proxy/run {{ OPTIONS }}

# A real kernel with RDMA and NVMe, emulated; needs the network on its first run. `just hardware --list` shows the checks
hardware *OPTIONS:
    integration/rdma-vm/run {{ OPTIONS }}

# The image, into the local store (needs Docker with BuildKit)
image TAG="csi-warden:dev":
    docker buildx build --build-arg REVISION="$(git rev-parse HEAD)" --load --tag {{ TAG }} .

# Memory, threads, CPU, size, growth; `just footprint --peer NAME=BIN` puts another sidecar beside it
footprint *OPTIONS:
    benches/footprint/run {{ OPTIONS }}

# What a call costs through the proxy, beside socat and nginx
proxy-cost *OPTIONS:
    benches/proxy/run {{ OPTIONS }}

# Exactly what CI runs
ci:
    .ci/run
