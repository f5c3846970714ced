"""`python -m birdie`: the command line, also the way torchrun starts it (`torchrun … -m birdie train`)."""

from birdie.cli import main

main()
