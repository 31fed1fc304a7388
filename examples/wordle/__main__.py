"""`python -m wordle`, in the folder above this one."""

import sys

from wordle.run import main

sys.exit(main())
