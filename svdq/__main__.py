"""python -m svdq: the svdq command."""

from svdq.cli.main import main

main()
