"""The command line with a planted bug in every rank: `python tests/bugged.py BUG generate ...`.

BUG is a class of tests/mutants. docs/compare.md shows what `compare` says of such a run. With
`verify` the unsplit run has the bug too, so it must be one that only a split commits.
"""

from __future__ import annotations

import sys

import mutants

from anyshard import worker
from anyshard.cli import main
from anyshard.verify import naive

if __name__ == "__main__":
    bug = getattr(mutants, sys.argv[1])
    naive.ORDERS["written"] = bug  # verify's ranks
    setattr(worker, "rank_main", naive.rank_body(bug))  # noqa: B010
    sys.exit(main(sys.argv[2:]))
