"""`python -m anyshard.cli`."""

from __future__ import annotations

import sys

from anyshard.__main__ import main

__all__: list[str] = []

sys.exit(main())
