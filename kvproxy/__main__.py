"""`python -m kvproxy`."""

from __future__ import annotations

import sys

from kvproxy.cli import main

if __name__ == "__main__":
    sys.exit(main())
