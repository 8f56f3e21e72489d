"""``python -m kvstore_backend.cli``: the same as ``kvstore``."""

import sys

from kvstore_backend.cli import main

sys.exit(main())
