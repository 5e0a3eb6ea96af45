"""Constrained output: what a request asks for, to masks over the vocabulary. No torch anywhere.

The library is llguidance: an Earley parser over lexemes whose automata are built as they are
needed. Measured on 2 busy cores with Qwen3's 151,669 tokens and a schema of 8 properties,
free-threaded 3.13 (perf/bench_grammar.py): it compiles in 0.6 ms, and a mask takes 18 µs (median).
xgrammar 0.1.27, the last that builds for that interpreter, takes 5.5 s to compile it, lets outputs
through that `allOf`, `oneOf`, `contains`, `uniqueItems` or `multipleOf` forbid, and had not come to
an end after 100 s with a schema of 20,000 levels. llguidance refuses what it cannot keep, and
bounds the work of one mask. Compiling can still be made to exhaust the stack or the memory; so a
grammar is first tried where that does no harm (`trial`).

    native       llguidance, where it is installed
    spec         the values that cross threads
    schema       what of JSON Schema is refused beside what the library refuses
    source       a spec as the library's own text
    library      the library's calls, and its errors
    vocabulary   a tokenizer as the library knows it
    escapes      names in JSON have one spelling
    trial        a grammar tried in a process that it may take down: trial_process
    compiler     specs to compiled grammars, and the cache of both answers
    on_demand    the compiler, made when the first grammar comes
    matcher      one output's place in its grammar: masks and tokens
"""
