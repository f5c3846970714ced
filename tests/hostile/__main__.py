"""Run a campaign: `python -m tests.hostile kills --count 30`."""

import argparse
import sys

from tests.hostile.campaigns import CAMPAIGNS

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("campaign", choices=CAMPAIGNS)
parser.add_argument("--count", type=int, help="number of attacks of each kind on each target")
parser.add_argument("--seed", type=int)
parser.add_argument("--only", nargs="+", help="commands, races, or patterns of files")
options = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
report = CAMPAIGNS[options.pop("campaign")](**options)
sys.stdout.write(f"{report}\n")
sys.exit(bool(report.failures))
