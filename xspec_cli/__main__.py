"""`python -m xspec_cli` is `xspec`."""

from xspec_cli.main import main

main()
