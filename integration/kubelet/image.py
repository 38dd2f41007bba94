#!/usr/bin/env python3
"""Packs static binaries as an image that `ctr images import` takes, without a registry or Docker.

usage: image.py NAME BINARY OUT.tar [ENTRYPOINT] [--link PATH]… [--add PATH=FILE]…
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pathlib
import platform
import struct
import tarfile

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def pack(name: str, out: os.PathLike | str, files: dict[str, str], links: dict[str, str]) -> None:
    """Writes the archive `out`: one layer.

    It has the files (path in the image: path here; the first is the entry point), the hard links (path: the file that it is
    another name of) and the folders that a runtime mounts upon.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("tmp", "dev", "proc", "sys", "etc", "var", "run"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for path, source in files.items():
            data = pathlib.Path(source).read_bytes()
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
        for path, target in links.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.type, info.linkname, info.mode = tarfile.LNKTYPE, target.lstrip("/"), 0o755
            tar.addfile(info)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": [next(iter(files))], "Env": ["PATH=/"]},
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


def is_static(binary: os.PathLike | str) -> bool:
    """Whether an ELF file of 64 bits runs without a loader: no PT_INTERP among its program headers."""
    with open(binary, "rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            return False
        (offset,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(offset)
        table = file.read(size * count)
    return all(struct.unpack_from("<I", table, size * index)[0] != 3 for index in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("binary")
    parser.add_argument("out")
    parser.add_argument("entrypoint", nargs="?")
    parser.add_argument("--link", action="append", default=[], help="one more name of the binary")
    parser.add_argument("--add", action="append", default=[], help="one more file")
    args = parser.parse_args()
    entrypoint = args.entrypoint or "/" + os.path.basename(args.binary)
    files = {entrypoint: args.binary} | dict(pair.split("=", 1) for pair in args.add)
    pack(args.name, args.out, files, dict.fromkeys(args.link, entrypoint))


if __name__ == "__main__":
    main()
