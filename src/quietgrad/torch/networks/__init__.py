"""Torch modules as objectives: per-example clipped sums at about the cost of an ordinary gradient."""

import os

# Samples differ in size, and oneDNN prepares every convolution anew for every size; of the 1024 that it keeps, a
# deep network's are gone before a size comes again. Read by oneDNN at its first use; what the user has set stays.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")
