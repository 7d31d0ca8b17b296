"""A slow and long link between this network namespace and another one: packets wait as they would on the way.

Two TUN devices are the ends of the link. A thread takes each packet from one and gives it to the other after the time
that the link needs for the bytes before it and for its length. TCP is that of the kernel.
"""

import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

SET_NAME = 0x400454CA  # TUNSETIFF of linux/if_tun.h
TUN, NO_INFO = 0x0001, 0x1000
MTU = 9000
QUEUE_S = 0.5
"""Longest queue before the link, in time; what comes then is lost, as in a router."""


@dataclass(slots=True)
class _Way:
    """One direction."""

    source: int
    target: int
    free_s: float = 0.0
    """Instant from which the link takes the next packet."""
    sent_bytes: int = 0
    waiting: "list[tuple[float, int, bytes]]" = field(default_factory=list)


class SlowLink:
    """A link of `rate_bit_per_s` in each direction, over which an answer takes at least `round_trip_s`."""

    def __init__(self, near: str, far: str, rate_bit_per_s: float, round_trip_s: float) -> None:
        """Makes the devices `near` and `far`; `hand_over` moves the second one."""
        self._rate, self._delay_s = rate_bit_per_s, round_trip_s / 2
        ends = [_device(near), _device(far)]
        self.ways = _Way(ends[0], ends[1]), _Way(ends[1], ends[0])
        """To the other side, and back."""
        self._far, self._count = far, 0
        threading.Thread(target=self._relay, name="slow link", daemon=True).start()

    def hand_over(self, pid: int, name: str) -> None:
        """Gives the far end, under a name, to the network namespace of a process."""
        subprocess.run(["ip", "link", "set", self._far, "netns", str(pid), "name", name], check=True)

    def _relay(self) -> None:
        by_source = {way.source: way for way in self.ways}
        while True:
            due_s = min((way.waiting[0][0] for way in self.ways if way.waiting), default=None)
            timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
            for source in select.select(list(by_source), [], [], timeout_s)[0]:
                self._take(by_source[source])
            for way in self.ways:
                while way.waiting and way.waiting[0][0] <= time.monotonic():
                    with suppress(OSError):  # an end that is not up yet takes no packet
                        os.write(way.target, heapq.heappop(way.waiting)[2])

    def _take(self, way: _Way) -> None:
        packet, now_s = os.read(way.source, MTU + 64), time.monotonic()
        begins_s = max(now_s, way.free_s)
        if begins_s - now_s > QUEUE_S:
            return
        way.free_s = begins_s + 8 * len(packet) / self._rate
        way.sent_bytes += len(packet)
        self._count += 1
        heapq.heappush(way.waiting, (way.free_s + self._delay_s, self._count, packet))


def _device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, SET_NAME, struct.pack("16sH22x", name.encode(), TUN | NO_INFO))
    subprocess.run(["ip", "link", "set", name, "mtu", str(MTU)], check=True)
    return device
