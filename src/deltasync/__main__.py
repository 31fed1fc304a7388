"""`python -m deltasync`."""

import sys

from deltasync.cli.main import main

sys.exit(main())
