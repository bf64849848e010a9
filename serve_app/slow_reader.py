"""When to give up a client that takes nothing of its stream, whose tokens pile up meanwhile.

Owns the decision alone. One timer a stream, not one an event: events are many, and almost all are
taken at once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from types import TracebackType

from starlette.types import Message, Send

logger = logging.getLogger(__name__)


class SlowReaderGuard:
    """Ends what runs within it once a single send has waited for `limit_s`: the block is left as if
    it had been cancelled, without an error, and `has_fired` tells.

    Args:
        limit_s: how long the client may take for what its connection can hold.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.has_fired = False
        self._sending_since_s: float | None = None

    def watch(self, send: Send) -> Send:
        """The same send, under watch."""

        async def watched(message: Message) -> None:
            self._sending_since_s = self._loop.time()
            try:
                await send(message)
            finally:
                self._sending_since_s = None

        return watched

    def __enter__(self) -> SlowReaderGuard:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a guard watches a task; use it within one")
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._look_again()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._timer.cancel()
        if not (self.has_fired and isinstance(error, asyncio.CancelledError)):
            return False
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        logger.warning("a client took nothing for %.0f s and was cut off", self._limit_s)
        return True

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / 4, self._look)

    def _look(self) -> None:
        since_s = self._sending_since_s
        if since_s is not None and self._loop.time() - since_s >= self._limit_s:
            self.has_fired = True
            self._task.cancel()
        else:
            self._look_again()
