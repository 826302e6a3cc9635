"""`fp4pipe run`: a recipe from source to answer, with gates."""

from pathlib import Path
from typing import Annotated

import typer

from fp4pipe import console
from fp4pipe.cli.outcome import Outcome


def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values put over the recipe's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Checkpoint and reports; default: out/NAME.")] = None,
) -> Outcome:
    """Quantize, audit, validate and ask, as RECIPE says; steps that are already done are kept."""
    from fp4pipe.cli.pipeline import Pipeline
    from fp4pipe.recipe_file import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    pipeline = Pipeline(loaded, out or Path("out") / loaded.name)
    document = pipeline.run()
    console.table(document["table"], f"{loaded.name}: {loaded.description}")
    page = Path(document["report"]).with_suffix(".html")
    console.say(f"checkpoint: {document['checkpoint']}\nreport:     {page}, the same as data in {document['report']}")
    return Outcome(document, failed=tuple(document["failures"]))
