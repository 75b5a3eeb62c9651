"""`python -m gem_core.cli`, and `torchrun -m gem_core.cli` for many processes."""

import sys

from gem_core.cli import main

sys.exit(main())
