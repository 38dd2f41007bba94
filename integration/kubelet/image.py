#!/usr/bin/env python3
"""Packs one static binary as an image that `ctr images import` takes, without a registry or Docker.

usage: image.py NAME BINARY OUT.tar [ENTRYPOINT]
"""

import hashlib
import io
import json
import os
import platform
import sys
import tarfile

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def pack(name: str, binary: str, out: str, entrypoint: str) -> None:
    """Writes the archive `out`: one layer, with the binary and the folders that a runtime mounts upon."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("tmp", "dev", "proc", "sys", "etc", "var", "run"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        tar.add(binary, arcname=entrypoint.lstrip("/"))
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": [entrypoint], "Env": ["PATH=/"]},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + digest]},
        }
    ).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    layer_name = digest + "/layer.tar"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": [layer_name]}]).encode()
    with tarfile.open(out, "w") as tar:
        for path, data in ((config_name, config), (layer_name, layer.getvalue()), ("manifest.json", manifest)):
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    image, path, archive = sys.argv[1:4]
    pack(image, path, archive, sys.argv[4] if len(sys.argv) == 5 else "/" + os.path.basename(path))
