"""A process and all that it started: their processor time, and signals to all of them.

A process that was seen once stays in the tree when its parent ends, as daemons do.
"""

from __future__ import annotations

import signal

import psutil


class ProcessTree:
    """The tree below one process.

    Args:
        pid: of its root, a child of this process or this process itself.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[int, psutil.Process] = {pid: self._root}

    def processes(self) -> list[psutil.Process]:
        """Those that run now, the root first."""
        for process in list(self._seen.values()):
            try:
                found = process.children(recursive=True)
            except psutil.NoSuchProcess:
                continue
            for child in found:
                self._seen.setdefault(child.pid, child)
        # psutil compares start times too, so a pid that was given to another process is not taken.
        self._seen = {pid: each for pid, each in self._seen.items() if each.is_running()}
        return list(self._seen.values())

    def cpu_s(self) -> float:
        """User and system seconds so far. Those of ended children stand with who waited for them;
        what an orphan used is lost once it ends.
        """
        total_s = 0.0
        for process in self.processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total_s += times.user + times.system + times.children_user + times.children_system
        return total_s

    def num_rss_bytes(self) -> int:
        """Memory that they hold; pages that several share count for each."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of them, the root first, so that none is started meanwhile."""
        for process in self.processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
