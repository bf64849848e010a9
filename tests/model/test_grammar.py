"""Grammars alone: what is refused and how, what a matcher allows, and what is kept."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import threading

import pytest
from grammar_tools import GRAMMARS, eos_token_ids, tokenizer, tokenizer_files
from tiny_models import VOCAB_SIZE

from deployments.execution import llguidance_grammar
from deployments.execution.grammar import (
    CachingCompiler,
    CompiledGrammar,
    GrammarMatcher,
    GrammarStuck,
    PreparedGrammars,
)
from deployments.execution.llguidance_grammar import (
    MAX_GRAMMAR_CHARS,
    LlguidanceCompiler,
    make_grammar_compiler,
)
from deployments.protocol import (
    FinishReason,
    GenerateRequest,
    Grammar,
    RequestRefused,
    SamplingParams,
)
from serve_app.tool_schema import calls_schema


def compiler(vocab_size: int = VOCAB_SIZE) -> LlguidanceCompiler:
    return LlguidanceCompiler(
        tokenizer_files()["tokenizer.json"].decode(), vocab_size, eos_token_ids()
    )


def ids_of(text: str) -> list[int]:
    return [tokenizer().token_to_id(char) for char in text]


def allowed_after(grammar: Grammar, text: str, vocab_size: int = VOCAB_SIZE) -> set[str]:
    mask = compiler(vocab_size).compile(grammar).start().find_allowed(ids_of(text))
    assert mask.shape == (vocab_size,)
    return {tokenizer().id_to_token(int(index)) for index in mask.nonzero()[:, 0]}


# --- what is refused ------------------------------------------------------------------------------

REFUSED = [
    (Grammar("json_schema", '{"type": "objekt"}'), "grammar", "objekt"),
    (Grammar("json_schema", '{"type": "string", "not": {}}'), "grammar", "not"),
    (
        Grammar("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}'),
        "grammar",
        "not",
    ),
    (Grammar("json_schema", "{"), "grammar", ""),
    (Grammar("json_schema", "[" * 50_000), "grammar", "recursion"),
    (Grammar("json_schema", '{"$ref": "http://x.org/y"}'), "grammar", ""),
    (Grammar("regex", "("), "grammar", "unclosed"),
    (Grammar("regex", "(?=a)b"), "grammar", "look-ahead"),
    (Grammar("regex", "\ud800"), "grammar", "surrogates"),
    (Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1)), "grammar", f"{MAX_GRAMMAR_CHARS}"),
    (Grammar("regex", "é"), "grammar", ""),
    (Grammar("choice", "[]"), "grammar", "list of strings"),
    (Grammar("choice", '["a", 1]'), "grammar", "list of strings"),
    (Grammar("choice", '[""]'), "grammar", "empty"),
    (Grammar("choice", '{"a": 1}'), "grammar", "list of strings"),
    (Grammar("choice", "[" * 50_000), "grammar", "JSON"),
]


@pytest.mark.parametrize(("grammar", "param", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_bad_grammar_is_refused_by_the_field_it_came_in(
    grammar: Grammar, param: str, says: str
) -> None:
    """What is no grammar, is too large, or asks for what would not be enforced is the client's
    error: one line that names the field.
    """
    with pytest.raises(RequestRefused) as refusal:
        compiler().compile(grammar)
    info = refusal.value.info
    assert info.param == param
    assert param in info.message
    assert says in info.message
    assert "\n" not in info.message
    assert len(info.message) < 500


def test_a_grammar_that_costs_too_much_is_refused(monkeypatch) -> None:
    """The effort of compiling is bounded, not only the length of the text."""
    words = [f"word {i}" for i in range(2000)]
    properties = {f"k{i}": {"enum": words[i::40]} for i in range(40)}
    large = Grammar("json_schema", json.dumps({"type": "object", "properties": properties}))
    compiler().compile(large)
    monkeypatch.setattr(llguidance_grammar, "_LEXER_FUEL", 10_000)
    with pytest.raises(RequestRefused, match="too big"):
        compiler().compile(large)


def test_without_the_library_a_grammar_is_refused_with_what_to_install(monkeypatch) -> None:
    """An engine without the optional library serves plain requests and says what is missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    made = make_grammar_compiler(tokenizer_files(), VOCAB_SIZE, eos_token_ids())
    for grammar in GRAMMARS.values():
        with pytest.raises(RequestRefused, match=r"pip install 'chunkserve\[structured\]'"):
            made.compile(grammar)


@pytest.mark.parametrize(
    ("files", "eos", "says"),
    [({}, (1,), "tokenizer.json"), (tokenizer_files(), (), "end-of-sequence")],
)
def test_a_model_that_cannot_be_held_is_named(files: dict, eos: tuple, says: str) -> None:
    """No tokenizer, or no token that ends a text: refused when asked, not at the start."""
    with pytest.raises(RequestRefused, match=says):
        make_grammar_compiler(files, VOCAB_SIZE, eos).compile(GRAMMARS["regex"])


# --- what is allowed ------------------------------------------------------------------------------


def test_each_end_of_sequence_token_is_allowed_where_the_grammar_may_end_and_nowhere_else() -> None:
    """Also one that the vocabulary of the library does not know as such."""
    grammar = Grammar("regex", "ab?")
    assert allowed_after(grammar, "") == {"a"}
    assert allowed_after(grammar, "a") == {"b", "<eos>", "<end>"}
    assert allowed_after(grammar, "ab") == {"<eos>", "<end>"}


def test_the_model_may_have_more_or_fewer_tokens_than_its_tokenizer() -> None:
    """Padding of the embedding is never allowed, least of all where the library's own end lies."""
    num_known = tokenizer().get_vocab_size()
    for vocab_size in (num_known, num_known + 1, num_known + 64):
        assert allowed_after(Grammar("regex", "a*"), "", vocab_size) == {"a", "<eos>", "<end>"}


def test_choices_are_taken_as_they_are() -> None:
    """Quotes, line breaks and characters that mean something elsewhere stand for themselves."""
    choices = ['"', "a\nb", "\\", "(", "| x", "/"]
    grammar = Grammar("choice", json.dumps(choices))
    assert allowed_after(grammar, "") >= {'"', "a", "\\", "(", "|", "/"}
    assert allowed_after(grammar, "a") == {"Ċ"}
    assert allowed_after(grammar, "|") == {"Ġ"}


def test_blanks_in_json_are_bounded() -> None:
    """A model that loves blanks fills the whole answer with them."""
    start = compiler().compile(Grammar("json_object", "")).start()
    blanks = 0
    while bool(start.find_allowed(ids_of("{" + "Ġ" * blanks))[ids_of("Ġ")[0]]):
        blanks += 1
        assert blanks < 100
    assert blanks > 8


def test_a_matcher_follows_the_output_wherever_it_goes() -> None:
    """However many tokens came since it was last asked, and even if the output is another one, what
    it allows is what a new matcher would.
    """
    matcher = compiler().compile(Grammar("regex", "[ab]c[de]f*")).start()
    for text in ("a", "acd", "acd", "acdff", "b", "", "bce"):
        mask = matcher.find_allowed(ids_of(text))
        fresh = compiler().compile(Grammar("regex", "[ab]c[de]f*")).start()
        assert bool((mask == fresh.find_allowed(ids_of(text))).all()), text
    with pytest.raises(GrammarStuck):
        matcher.find_allowed(ids_of("bx"))


def test_matchers_of_one_grammar_are_apart() -> None:
    """Two texts under one compiled grammar share no state."""
    compiled = compiler().compile(Grammar("regex", "[ab]*c"))
    one, two = compiled.start(), compiled.start()
    before = two.find_allowed([])
    one.find_allowed(ids_of("abc"))
    assert bool((two.find_allowed([]) == before).all())


# --- what is kept ---------------------------------------------------------------------------------


class NothingCompiled:
    """A compiled grammar that nobody starts."""

    def start(self) -> GrammarMatcher:
        raise NotImplementedError


class CountingCompiler:
    """Compiles into empty objects, and counts."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.threads: set[str] = set()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled.append(grammar.text)
        self.threads.add(threading.current_thread().name)
        return NothingCompiled()


def test_a_grammar_is_compiled_once_while_it_is_in_use_or_recent() -> None:
    """Equal grammars share one; of those nobody holds only the most recent are kept."""
    inner = CountingCompiler()
    cached = CachingCompiler(inner, max_unused=2)
    held = cached.compile(Grammar("regex", "held"))
    for text in ("a", "b", "c", "b", "c"):
        cached.compile(Grammar("regex", text))
    assert inner.compiled == ["held", "a", "b", "c"]
    assert cached.compile(Grammar("regex", "held")) is held
    gc.collect()
    cached.compile(Grammar("regex", "b"))
    cached.compile(Grammar("regex", "held"))
    assert inner.compiled == ["held", "a", "b", "c", "b"]


def request_of(grammar: Grammar | None) -> GenerateRequest:
    return GenerateRequest("mine", (1, 2), SamplingParams(grammar=grammar))


def test_a_grammar_is_ready_before_its_request_and_as_long_as_it() -> None:
    """Compiled on a thread of its own, neither on the event loop nor on the engine's; found again
    meanwhile however many others came.
    """
    inner = CountingCompiler()
    cached = CachingCompiler(inner, max_unused=1)

    async def serve() -> None:
        async with PreparedGrammars(cached).prepared(request_of(Grammar("regex", "x"))) as refusal:
            assert refusal is None
            for text in ("a", "b", "x"):
                cached.compile(Grammar("regex", text))

    asyncio.run(serve())
    assert inner.compiled == ["x", "a", "b"]
    assert any(name.startswith("grammar") for name in inner.threads)


def test_a_bad_grammar_is_the_only_answer_to_its_request() -> None:
    """The refusal is the last chunk of the request, as data; without a grammar there is none."""

    async def refusal_of(grammar: Grammar | None):
        async with PreparedGrammars(compiler()).prepared(request_of(grammar)) as refusal:
            return refusal

    chunk = asyncio.run(refusal_of(Grammar("regex", "(")))
    assert (chunk.request_id, chunk.finish_reason) == ("mine", FinishReason.ERROR)
    assert chunk.error.param == "grammar"
    assert asyncio.run(refusal_of(None)) is None
    assert asyncio.run(refusal_of(Grammar("regex", "a"))) is None


def test_tools_with_definitions_of_their_own_can_be_followed() -> None:
    """tool_choice "required" is refused for parameters with $ref and $defs, as pydantic writes
    them, or their references are not followed.
    """
    city = {
        "type": "object",
        "$defs": {"City": {"enum": ["yes", "no"]}},
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    schema = calls_schema([("a", city), ("b", tree)], 1)
    grammar = Grammar("json_schema", json.dumps(schema))
    assert allowed_after(grammar, '[{"name":"a","arguments":{"city":"') == {"y", "n", "yes", "no"}
    assert "{" in allowed_after(grammar, '[{"name":"b","arguments":{"kids":[')
    assert "," not in allowed_after(grammar, '[{"name":"b","arguments":{}}')
