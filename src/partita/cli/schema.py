"""`partita schema`: JSON Schemas of the files and answers that partita writes."""

import click

from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.files import encode_json
from partita.jobs.schemas import ANSWERS, FILES, kinds, schema_of


@click.command()
@click.argument("kind", required=False)
@output_option("Write the schema here.", only_json=True)
@common_options
def command(kind: str | None, output: OutputFile | None, out: Output) -> int:
    """Print the JSON Schema of a KIND of file or of what --json prints; without KIND list them.

    A file and an answer say their kind: "format": "partita/plan@6" is of the kind plan.
    """
    if kind is None:
        out.show(f"files     {', '.join(FILES)}\nanswers   {', '.join(ANSWERS)}")
        out.result({"format": "partita/schemas@1", "kinds": list(kinds())})
        return 0
    schema = schema_of(kind)
    text = encode_json(schema)
    if output is not None:
        out.show(f"schema in {output.write(text)}")
    else:
        out.show(text.decode().rstrip("\n"))
    out.result({"format": "partita/schema@1", "kind": kind, "schema": schema})
    return 0
