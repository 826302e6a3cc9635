"""`python -m fp4pipe` is the `fp4pipe` command."""

import sys

from fp4pipe.cli import main

sys.exit(main())
