"""`python -m ostinato`."""

from ostinato.cli.main import main

main()
