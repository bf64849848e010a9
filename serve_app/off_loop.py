"""Where work on a client's text is done: here if it is short, in a thread if it could hold up the
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MAX_INLINE_CHARS = 1024
"""Tokenizing so much takes about as long as a thread takes to be asked and to answer."""


async def run_sized(size: int, work: Callable[[], T], max_inline: int = MAX_INLINE_CHARS) -> T:
    """What `work` returns, which takes time in proportion to `size`: characters, bytes or ids."""
    if size <= max_inline:
        return work()
    return await asyncio.to_thread(work)
