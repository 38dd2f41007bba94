"""Calls a registration socket with gRPC C-core: SOCKET NAME [AUTHORITY]. Without AUTHORITY, C-core sends the encoded path.

The messages are so small that they are read and written by hand; no protoc is needed.
"""

import importlib.metadata
import sys

import grpc


def strings(message):
    """The fields of a message that holds nothing but short strings, as (number, text)."""
    fields = []
    while message:
        key, length = message[0], message[1]
        assert key & 7 == 2 and length < 0x80, f"not a short string: {message!r}"
        fields.append((key >> 3, message[2 : 2 + length].decode()))
        message = message[2 + length :]
    return fields


def main(socket, name, authority=None):
    options = [("grpc.default_authority", authority)] if authority else []
    with grpc.insecure_channel("unix:" + socket, options=options) as channel:
        get_info = channel.unary_unary("/pluginregistration.Registration/GetInfo")
        notify = channel.unary_unary("/pluginregistration.Registration/NotifyRegistrationStatus")
        for call in range(3):
            info = strings(get_info(b"", timeout=5, metadata=[("x-call", str(call))]))
            assert (1, "CSIPlugin") in info, info
            assert (2, name) in info, info
            endpoints = [text for number, text in info if number == 3]
            assert len(endpoints) == 1 and endpoints[0].startswith("/"), info
            assert notify(b"\x08\x01", timeout=5) == b""  # plugin_registered: true
    print(f"grpcio {importlib.metadata.version('grpcio')} got {name} at {endpoints[0]}")


main(*sys.argv[1:])
