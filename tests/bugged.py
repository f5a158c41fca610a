"""The command line with a planted bug in every rank: `python tests/bugged.py BUG generate ...`.

BUG is a class of tests/mutants. docs/compare.md shows what `compare` says of such a run.
"""

from __future__ import annotations

import sys

import mutants

from anyshard import worker
from anyshard.cli import main
from anyshard.verify.naive import rank_body

if __name__ == "__main__":
    setattr(worker, "rank_main", rank_body(getattr(mutants, sys.argv[1])))  # noqa: B010
    sys.exit(main(sys.argv[2:]))
