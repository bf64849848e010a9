"""How a process becomes one that serves a model without Python's collector in its way.

Importing torch and transformers makes about a million objects that live as long as the process.
The collector walks them again and again while they are made (a quarter of the import's time), and
later whenever it looks at its oldest generation, which would stand as a pause between two tokens.
Imports neither of the two.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def made_to_stay() -> Iterator[None]:
    """What is made within is taken for permanent: the collector rests until the end of the block,
    and never looks at what is alive then again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
