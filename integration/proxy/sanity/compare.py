#!/usr/bin/env python3
"""Runs csi-sanity against a driver directly and through the proxy; every test must end the same way. Started by `../run`.

Whether a test passes is the driver's affair: the tonic driver, for one, has no Controller. What a test says when it fails is
compared as well, except names that the suite draws anew each time.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

NAME = "sanity.csi-warden.example"
SEED = "1"  # the same order both times


def wait_until(what: str, happened, patience: float = 10) -> None:
    end = time.monotonic() + patience
    while not happened():
        if time.monotonic() > end:
            raise SystemExit(f"not within {patience:.0f} s: {what}")
        time.sleep(0.01)


def end(child: subprocess.Popen) -> None:
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def results(args: argparse.Namespace, binary: str, through: bool) -> dict[str, str]:
    """Each test's name with how it ended, against a driver that has just started."""
    with tempfile.TemporaryDirectory(prefix="csi-s.", dir="/tmp") as folder:  # short, because a socket's path is
        root = pathlib.Path(folder)
        endpoint = root / "csi.sock"
        children = [subprocess.Popen([binary, "--endpoint", endpoint, "--name", NAME, "--node-id", "node", "--stage"])]
        try:
            wait_until("the driver's socket", endpoint.exists)
            if through:
                stand = [args.stand, "--before", endpoint, "--through", args.through]
                proxy = subprocess.Popen(stand, stdout=subprocess.PIPE, text=True)
                children.insert(0, proxy)
                line = proxy.stdout.readline().split()
                if len(line) != 2:
                    return {"the proxy starts": "no"}
                endpoint = line[1]
            report = root / "report.json"
            suite = [args.sanity, "-csi.endpoint", f"unix://{endpoint}", "-csi.testnodevolumeattachlimit", "--ginkgo.no-color"]
            suite += ["-csi.mountdir", root / "mount", "-csi.stagingdir", root / "stage"]
            suite += [f"--ginkgo.seed={SEED}", f"--ginkgo.json-report={report}", "--ginkgo.succinct"]
            subprocess.run(suite, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300, check=False)
            specs = json.loads(report.read_text())[0]["SpecReports"]
        finally:
            for child in children:
                end(child)
    return {name(spec): steady(ending(spec), folder) for spec in specs if spec["LeafNodeText"]}


def name(spec: dict) -> str:
    return " ".join([*(spec["ContainerHierarchyTexts"] or []), spec["LeafNodeText"]])


def ending(spec: dict) -> str:
    failure = spec.get("Failure") or {}
    where = failure.get("Location") or {}
    return f"{spec['State']} {failure.get('Message', '')} line {where.get('LineNumber', '-')}"


def steady(text: str, folder: str) -> str:
    """Without the folder, the addresses of Go's values, and what the suite draws by lot."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", text.replace(folder, "FOLDER"))
    return re.sub(r"[0-9A-F]{8}-[0-9A-F]{8}|[0-9a-f]{8}-[0-9a-f-]{27}", "LOT", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--stand", "--sanity", "--through"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--driver", action="append", required=True, metavar="NAME=BIN")
    args = parser.parse_args()
    passed = failed = 0
    for word in args.driver:
        kind, _, binary = word.partition("=")
        began = time.monotonic()
        direct, through = results(args, binary, False), results(args, binary, True)
        ends = collections.Counter(text.split()[0] for text in direct.values())
        unequal = [test for test in sorted(direct.keys() | through.keys()) if direct.get(test) != through.get(test)]
        good = not unequal and ends["passed"] > 10
        passed, failed = passed + good, failed + (not good)
        summary = ", ".join(f"{count} {how}" for how, count in sorted(ends.items()))
        print(f"{'PASS' if good else 'FAIL'} sanity: {kind}: {summary}, {len(unequal)} otherwise ({time.monotonic() - began:.1f} s)", flush=True)
        for test in unequal:
            print(f"    {test}\n        direct:  {direct.get(test)}\n        through: {through.get(test)}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
