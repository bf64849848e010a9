"""Who used the machine during a turn: the service, the client, others.

    all that was busy = service + client + others

The machine's time is counted by the kernel in ticks and that of processes exactly, so that `others`
of a turn of a few seconds may come out a few hundredths of a core off, even below zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from loadtest.peers.process_tree import ProcessTree


@dataclass(frozen=True, slots=True)
class MachineShare:
    """Cores in use on average over a turn.

    Args:
        taken_s: wall time of the turn.
        service_cores: used by the service and all it started.
        client_cores: used by the load client.
        others_cores: used by anybody else.
        stolen_cores: that the hypervisor gave to another machine.
    """

    taken_s: float
    service_cores: float
    client_cores: float
    others_cores: float
    stolen_cores: float


@dataclass(frozen=True, slots=True)
class _Reading:
    time_s: float
    busy_s: float
    stolen_s: float
    service_s: float
    client_s: float


class MachineMeter:
    """Reads the machine's clocks before and after a turn.

    Args:
        service: whose share is told apart.
        client: this process, without the services it started.
    """

    def __init__(self, service: ProcessTree) -> None:
        self._service = service
        self._client = psutil.Process()
        self._begin = self._read()

    def share(self) -> MachineShare:
        """Since the meter was made."""
        begin, end = self._begin, self._read()
        taken_s = end.time_s - begin.time_s
        service_s = end.service_s - begin.service_s
        client_s = end.client_s - begin.client_s
        others_s = end.busy_s - begin.busy_s - service_s - client_s
        return MachineShare(
            taken_s=taken_s,
            service_cores=service_s / taken_s,
            client_cores=client_s / taken_s,
            others_cores=others_s / taken_s,
            stolen_cores=(end.stolen_s - begin.stolen_s) / taken_s,
        )

    def _read(self) -> _Reading:
        machine = psutil.cpu_times()
        own = self._client.cpu_times()
        return _Reading(
            time_s=time.monotonic(),
            # Without interrupts, which belong to nobody, and mostly to the turn itself.
            busy_s=machine.user + machine.nice + machine.system,
            stolen_s=getattr(machine, "steal", 0.0),
            service_s=self._service.cpu_s(),
            client_s=own.user + own.system,
        )
