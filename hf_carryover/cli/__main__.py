"""`python -m hf_carryover.cli`, where the script `hf-carryover` is not on the path."""

from . import app

app(prog_name="hf-carryover")
