# csi-warden as an image: one static binary under three names, and nothing else.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg REVISION=$(git rev-parse HEAD) .
#
# Needs BuildKit (for TARGETARCH). The compiler runs on the building machine whatever the target is; another architecture takes
# rustup's target, Debian's linker and that architecture's own C library (not the one named `-cross`, which gets no updates), and no
# emulation. glibc, not musl: a call through the proxy takes a quarter less CPU with it, and the project's own runs are made with it.
ARG RUST_VERSION=1.95.0

FROM --platform=$BUILDPLATFORM rust:${RUST_VERSION}-slim-bookworm AS build
ARG TARGETARCH
WORKDIR /src
RUN case "$TARGETARCH" in \
      amd64) echo x86_64-unknown-linux-gnu; linker=gcc-x86-64-linux-gnu ;; \
      arm64) echo aarch64-unknown-linux-gnu; linker=gcc-aarch64-linux-gnu ;; \
      *) echo "no build for '$TARGETARCH'" >&2; exit 1 ;; \
    esac > /target && \
    if [ "$(rustc -vV | sed -n 's/^host: //p')" != "$(cat /target)" ]; then \
      rustup target add "$(cat /target)" && \
      dpkg --add-architecture "$TARGETARCH" && apt-get update && \
      apt-get install -y --no-install-recommends "$linker" "libc6-dev:$TARGETARCH" && \
      rm -rf /var/lib/apt/lists/*; \
    fi
COPY Cargo.toml Cargo.lock build.rs ./
COPY release release
COPY proto proto
COPY integration/driver integration/driver
COPY src src
RUN programs=$(release/build --print --target "$(cat /target)" --bin csi-warden) && \
    mkdir /image && \
    cp "$programs/csi-warden" /image/csi-warden && \
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
