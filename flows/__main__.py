"""`python -m flows`: the `exeunt` command."""

import sys

from flows.cli import main

sys.exit(main())
