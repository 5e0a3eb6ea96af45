"""What a request may ask its output to be: frozen values, equal when they ask for the same.

Knows neither the library nor the API's field names; imports nothing of the engine.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """One JSON value that a schema of draft 2020-12 accepts; properties come in its order."""

    schema: str  # JSON text


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the pattern matches as a whole.

    The syntax is that of Rust's regex: Unicode classes, neither look-around nor back-references.
    """

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A context-free grammar: llguidance's Lark with a rule `start`, or GBNF with a rule `root`.

    Lark may embed schemas, `%json {…}`, and name special tokens, `<|…|>`: that is how the forms of
    tool calls are written.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Tag:
    """A stretch of JSON between two markers, as models write tool calls."""

    begin: str  # starts with one of the triggers
    schema: str  # JSON text
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Free text in which whatever starts with a trigger must be one of the tags."""

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]


GrammarSpec = JsonSchema | JsonObject | Regex | Choice | Grammar | StructuralTags


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost. Everything beyond is refused with the name of the limit."""

    source_bytes: int = 262_144  # OpenAI allows 120,000 characters of names and values
    schema_depth: int = 64  # nesting of a schema's JSON; OpenAI allows 10 levels of objects
    choices: int = 10_000
    # Trying a grammar. Ordinary ones take milliseconds; 300 enum values of 20 characters 10 ms.
    trial_cpu_s: float = 2.0
    trial_bytes: int = 536_870_912
    trial_tokens: int = 8  # masks computed for it
    # The library's own. Half a million units are 10 ms of analysis, 20,000 states about 30 MB.
    lexer_fuel: int = 1_000_000
    lexer_states: int = 20_000


class GrammarError(Exception):
    """A grammar that cannot be used: the client's fault, a 400; `transient` where it is ours."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.transient = transient  # nothing was found out about the grammar; worth a retry
