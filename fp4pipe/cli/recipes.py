"""`fp4pipe recipes`: list, show, copy and check recipes."""

from pathlib import Path
from typing import Annotated

import typer

from fp4pipe import console
from fp4pipe.cli.outcome import Outcome
from fp4pipe.cli.stdout import command
from fp4pipe.errors import UsageError

recipes = typer.Typer(help="List, show, copy and check recipes.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values put over the recipe's.")]


@recipes.command("list")
@command
def list_recipes() -> Outcome:
    """List the recipes that come with fp4pipe."""
    from fp4pipe.recipe_file import load_recipe, shipped_recipes

    loaded = [load_recipe(name) for name in shipped_recipes()]
    rows = [{"name": r.name, "source": r.source[0], "description": r.description} for r in loaded]
    return Outcome({"recipes": rows}, console.format_table(rows))


@recipes.command()
@command
def show(recipe: Name, overrides: Overrides = None) -> Outcome:
    """Print a recipe as it runs: defaults filled in, overrides applied."""
    import yaml

    from fp4pipe.recipe_file import load_recipe

    resolved = load_recipe(recipe, overrides or ()).model_dump(mode="json", by_alias=True)
    return Outcome(resolved, yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).rstrip())


@recipes.command()
@command
def copy(
    recipe: Name,
    to: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Default: the recipe's file name, here.")] = None,
) -> Outcome:
    """Copy a recipe, comments and all, to edit it."""
    from fp4pipe.recipe_file import find_recipe

    source = find_recipe(recipe)
    target = to or Path(source.name)
    if target.is_dir():
        target = target / source.name
    try:
        with open(target, "x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UsageError(f"{target} exists", fix="name another file, or remove it") from None
    except OSError as error:
        raise UsageError(f"{target} cannot be written", because=error.strerror) from None
    return Outcome({"copied": target}, str(target))


@recipes.command()
@command
def check(recipe: Name, overrides: Overrides = None) -> Outcome:
    """Check a recipe against the schema without running it."""
    from fp4pipe.recipe_file import find_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or ())
    return Outcome({"name": loaded.name, "file": find_recipe(recipe), "ok": True}, f"{loaded.name}: ok")
