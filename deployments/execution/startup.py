"""How a process becomes one that serves a model without Python's collector in its way, or the
threads that loading left behind.

Importing torch and transformers makes about a million objects that live as long as the process.
The collector walks them again and again while they are made (a quarter of the import's time), and
later whenever it looks at its oldest generation, which would stand as a pause between two tokens.
Imports neither of the two.

What comes later is mostly made and dropped within a step, many objects at once. Left alone, the
collector takes that for growth: every few dozen steps it would walk all there is, each token id of
each request included, which stands as a pause of its own (22 ms with 1,024 requests).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

Made = TypeVar("Made")

NUM_YOUNG_OBJECTS = 50_000
"""So many more objects made than dropped before the collector looks at the young ones; far more
than a step makes.
"""


@contextmanager
def made_to_stay() -> Iterator[None]:
    """What is made within is taken for permanent: the collector rests until the end of the block,
    and never looks at what is alive then again; afterwards it looks more seldom.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(NUM_YOUNG_OBJECTS, *gc.get_threshold()[1:])
        if was_enabled:
            gc.enable()


def call_apart(make: Callable[[], Made]) -> Made:
    """What `make` returns, called in a thread that ends with it. Raises what it raises.

    Whoever computes with OpenMP has a team of threads from then on. As soon as a process has more
    of them than cores, libgomp lets all of them sleep as good as at once where there is nothing to
    do, and waking them costs more than many an operation of a step. So the thread that loads a
    model, and is not the one that steps it, has to go, and its team goes with it.
    """
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # to the caller, whatever it is
            made.set_exception(error)

    # A daemon: an interrupted caller does not wait for it.
    thread = Thread(target=run, name="load", daemon=True)
    thread.start()
    result = made.result()
    thread.join()
    return result
