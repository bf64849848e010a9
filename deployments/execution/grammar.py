"""What structured output needs of a grammar library, and the cache of compiled grammars.

Compiling may take longer than a step, so a replica compiles a request's grammar before it submits
the request; the sampler then finds it here. Does not know any library: `llguidance_grammar` does.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from deployments.protocol import (
    FinishReason,
    GenerateRequest,
    Grammar,
    RequestRefused,
    TokenChunk,
)


def refuse_grammar(message: str) -> RequestRefused:
    """The refusal of a request for its grammar; the ingress knows what its client calls it."""
    return RequestRefused.invalid("grammar", f"grammar: {message}")


class GrammarStuck(RuntimeError):
    """A text cannot go on within its grammar: no token is left, or a limit of the library is
    passed.
    """


class GrammarMatcher(Protocol):
    """One text on its way through a grammar."""

    def find_allowed(self, output_token_ids: Sequence[int]) -> Tensor:
        """[vocab_size] bool, on the CPU: the tokens that may follow this output, an
        end-of-sequence token only where the grammar may end. At least one is allowed.

        Raises:
            GrammarStuck: the output has left the grammar, or nothing can follow it.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar ready for use, for any number of texts."""

    def start(self) -> GrammarMatcher:
        """A matcher at the beginning of a text."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for the vocabulary of one model. Thread-safe."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, within limits of size and effort.

        Raises:
            RequestRefused: it is no such grammar, too large, or asks for what is not supported.
        """
        ...


class NoGrammars:
    """Refuses every grammar, and says why.

    Args:
        why: what the operator may do about it.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        raise refuse_grammar(self._why)


class CachingCompiler:
    """Compiles each grammar once, as long as it is in use or among the last `max_unused` used.

    Args:
        inner: compiles what is not here.
        max_unused: so many are kept that nobody holds.
    """

    def __init__(self, inner: GrammarCompiler, max_unused: int = 64) -> None:
        self._inner = inner
        self._max_unused = max_unused
        self._in_use: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """At once if it is here; whoever keeps the result keeps it here."""
        with self._lock:
            compiled = self._in_use.get(grammar)
        # Outside the lock: the sampler must not wait for somebody else's grammar.
        compiled = compiled or self._inner.compile(grammar)
        with self._lock:
            self._in_use[grammar] = self._recent[grammar] = compiled
            self._recent.move_to_end(grammar)
            if len(self._recent) > self._max_unused:
                self._recent.popitem(last=False)
        return compiled


class PreparedGrammars:
    """Sees to it that no step compiles: on an event loop, before requests go to the engine.

    One thread compiles, so that costly grammars keep each other waiting and nobody else.

    Args:
        compiler: caches what it compiles, for the sampler.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, "grammar")

    @asynccontextmanager
    async def prepared(self, request: GenerateRequest) -> AsyncIterator[TokenChunk | None]:
        """Keep the request's grammar compiled meanwhile; gives the request's refusal if it has
        one that cannot be compiled.
        """
        grammar = request.sampling_params.grammar
        if grammar is None:
            yield None
            return
        loop = asyncio.get_running_loop()
        try:
            compiled = await loop.run_in_executor(self._thread, self._compiler.compile, grammar)
        except RequestRefused as refused:
            yield TokenChunk(
                request.request_id, finish_reason=FinishReason.ERROR, error=refused.info
            )
            return
        yield None
        del compiled  # held until here, and so the cache holds it
