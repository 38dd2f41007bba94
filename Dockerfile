# csi-warden as an image: one static binary under three names, and nothing else.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg REVISION=$(git rev-parse HEAD) .
#
# Needs BuildKit (for TARGETARCH). The compiler runs on the building machine whatever the target is: the tree is Rust alone,
# so rustup's musl target and its own linker are all that another architecture takes; no emulation, no cross compiler.
ARG RUST_VERSION=1.95.0

FROM --platform=$BUILDPLATFORM rust:${RUST_VERSION}-slim-bookworm AS build
ARG TARGETARCH
WORKDIR /src
RUN case "$TARGETARCH" in \
      amd64) echo x86_64-unknown-linux-musl ;; \
      arm64) echo aarch64-unknown-linux-musl ;; \
      *) echo "no build for '$TARGETARCH'" >&2; exit 1 ;; \
    esac > /target && \
    rustup target add "$(cat /target)"
# For the target alone: what runs while building is linked as usual.
ENV CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld
COPY Cargo.toml Cargo.lock build.rs ./
COPY proto proto
COPY integration/driver integration/driver
COPY src src
RUN cargo build --locked --release --bin csi-warden --target "$(cat /target)" && \
    mkdir /image && \
    cp "target/$(cat /target)/release/csi-warden" /image/csi-warden && \
    # manifests name the replaced programs by their paths; hard links, so one layer holds the bytes once
    ln /image/csi-warden /image/csi-node-driver-registrar && \
    ln /image/csi-warden /image/livenessprobe

FROM scratch
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="csi-warden" \
      org.opencontainers.image.description="Node sidecar that registers a CSI driver with the kubelet and tells it the truth about the node's storage hardware" \
      org.opencontainers.image.source="https://github.com/csi-warden/csi-warden" \
      org.opencontainers.image.documentation="https://github.com/csi-warden/csi-warden/blob/main/README.md" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /image/ /
# No USER, as in the image that it replaces: drivers make their sockets for root alone, and the registration folder is
# root's. Where yours are not, `runAsUser` in the manifest is all it takes.
ENTRYPOINT ["/csi-node-driver-registrar"]
