"""`kvserve bench`: speed against ceilings taken in the same run."""

import typer

bench = typer.Typer(help="Measure speed against ceilings taken in the same run.")
