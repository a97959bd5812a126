"""`python -m quietgrad` is `quietgrad`."""

import sys

from quietgrad.cli import main

sys.exit(main())
