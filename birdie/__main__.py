"""`python -m birdie`: the command line. torchrun starts it this way: `torchrun … -m birdie train`."""

from birdie.cli import main

main()
