"""`python -m partita` is the `partita` command."""

from partita.cli import main

main()
