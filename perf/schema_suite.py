"""Which schemas of the JSON-Schema-Test-Suite are accepted, and whether their outputs are valid.

The suite comes with the source distribution of PyPI's jsonschema: `json/tests/draft2020-12`. Of
every accepted schema, outputs are drawn by the masks and validated by that package; one that is not
valid is an error. Writes the list of both, with the reason of each refusal.

Left out is optional/ecmascript-regex: the package reads patterns as Python's, whose \\d and \\W are
Unicode's, where ECMAScript's and ours are ASCII's.
"""

import json
from pathlib import Path
from typing import Any

import click
import jsonschema
from rich.console import Console
from rich.progress import track

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import GrammarError, JsonSchema
from perf.results import save
from tests.fakes_vocabularies import byte_level_tokenizer, drawn, small_vocabulary

OUTPUTS = 20
LEFT_OUT = "ecmascript-regex"
TOKENIZER = byte_level_tokenizer()
CLOSING = [TOKENIZER.token_to_id(text) for text in ('"', "}", "]", "1", "e", "l", '"}', '"]')]


def schemas(folder: Path) -> dict[str, Any]:
    """Name → schema of every case of the suite."""
    found = {}
    for file in sorted(folder.rglob("*.json")):
        if file.stem == LEFT_OUT:
            continue
        for number, case in enumerate(json.loads(file.read_text())):
            name = f"{file.relative_to(folder).with_suffix('')} {number}: {case['description']}"
            found[name] = case["schema"]
    return found


def valid_outputs(compiler: GrammarCompiler, schema: Any) -> int:
    """How many outputs ended, all valid. Raises GrammarError where the schema is refused."""
    grammar = compiler.compile(JsonSchema(json.dumps(schema)))
    draft = jsonschema.Draft202012Validator
    validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
    ended = 0
    for seed in range(OUTPUTS):
        ids = drawn(grammar.matcher(), compiler.vocabulary, seed, CLOSING)
        if ids is not None:
            ended += 1
            validator.validate(json.loads(TOKENIZER.decode(ids, skip_special_tokens=False)))
    return ended


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Goes through the suite in FOLDER, its tests/draft2020-12."""
    console = Console()
    accepted: dict[str, int] = {}
    refused: dict[str, str] = {}
    compiler = GrammarCompiler(small_vocabulary())
    try:
        for name, schema in track(schemas(folder).items(), "Drawing", console=console):
            try:
                accepted[name] = valid_outputs(compiler, schema)
            except GrammarError as refusal:
                refused[name] = refusal.message
    finally:
        compiler.close()
    figures = {
        "accepted": len(accepted),
        "refused": len(refused),
        "outputs": sum(accepted.values()),
        "invalid": 0,
        "outputs_of_accepted": accepted,
        "reasons_of_refused": refused,
    }
    console.print({name: figures[name] for name in ("accepted", "refused", "outputs", "invalid")})
    console.print(f"written to {save('schema_suite', figures).name}")


if __name__ == "__main__":
    main()
