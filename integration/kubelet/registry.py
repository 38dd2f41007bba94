"""The list of checks, and what each of them needs to say whether it saw its promise kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bed import Bed
from watch import Failed

# Long enough for the agent's health interval (2 s), confirm interval and recovery hold (3 s) to show an effect.
QUIET = 8.0

# How a refusal of the fence begins.
REFUSED = "csi-warden: no new volumes of"


@dataclass
class Check:
    """One promise and how to see it kept."""

    name: str
    needs_health: bool
    group: str
    run: Callable[[Bed], str]


CHECKS: list[Check] = []


def check(*, health: bool = True, group: str = "process"):
    """Adds a function to the checks; `health`: it needs an agent that takes --health-file; `group`: what the agent is."""

    def add(function: Callable[[Bed], str]) -> Callable[[Bed], str]:
        CHECKS.append(Check(function.__name__.replace("_", "-"), health, group, function))
        return function

    return add


def expect(good: object, otherwise: str) -> None:
    """Fails the check unless `good`."""
    if not good:
        raise Failed(otherwise)


def stays(bed: Bed, then: float, what: str, seconds: float = QUIET) -> None:
    """Waits, and expects that neither the socket nor CSINode changed since `then`."""
    time.sleep(max(0.0, then + seconds - time.monotonic()))
    expect(not bed.folder.since(then), f"{what}: the socket changed: {shown(bed.folder.since(then), then)}")
    expect(not bed.csi_node.since(then), f"{what}: CSINode changed: {shown(bed.csi_node.since(then), then)}")


def shown(changes: list, then: float) -> str:
    return ", ".join(f"{what} at +{at - then:.2f} s" for at, what in changes)
