"""`python -m demo`, in the folder above this one."""

import sys

from demo.run import main

sys.exit(main())
