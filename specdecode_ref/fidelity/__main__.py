"""`python -m specdecode_ref.fidelity`: the long run of rung R2. What it does is in `long_run`."""

import sys

from specdecode_ref.fidelity.sampled.long_run import main

if __name__ == "__main__":
    sys.exit(main())
