"""`python -m limitforge.cli` is the `limitforge` command."""

from limitforge.cli import main

main()
