"""`python -m specdecode_ref.cli` is `specdecode`."""

from specdecode_ref.cli import main

main()
