"""Makes the environments of the peers, one step after the other, each told before it is done.

Packages come by name from the package index that pip is configured for. A step that fails ends its
peer's installation, and the next peer is tried.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable

from loadtest.peers.launch import Peer, Place, Step


class InstallFailed(RuntimeError):
    """A step of an installation failed; one line that says which."""


def install_peers(peers: Iterable[Peer], place: Place, tell: Callable[[str], None]) -> list[str]:
    """Install all that are not there yet; the names of those that failed.

    Args:
        peers: to install.
        place: whose folder takes an environment for each.
        tell: is given each step before it is done, and each failure.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for peer in peers:
        if peer.is_installed(place):
            tell(f"{peer.name}: is installed")
            continue
        try:
            _install(peer, place, tell)
        except InstallFailed as error:
            tell(str(error))
            failed.append(peer.name)
    return failed


def _install(peer: Peer, place: Place, tell: Callable[[str], None]) -> None:
    for step in peer.install(place):
        tell(f"{peer.name}: {step.what}")
        try:
            _do(step)
        except (OSError, subprocess.CalledProcessError) as error:
            raise InstallFailed(f"{peer.name}: {step.what} failed: {error}") from error
    if not peer.is_installed(place):
        missing = [str(path) for path in peer.needs(place) if not path.exists()]
        raise InstallFailed(f"{peer.name}: installed, but without {', '.join(missing)}")


def _do(step: Step) -> None:
    if isinstance(step.run, tuple):
        subprocess.run(step.run, check=True, env={**os.environ, **step.env})
    else:
        step.run()
