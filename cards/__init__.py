"""Cards: what a model is, as data.

A card names the components, the loops that run them, the recipe that made the weights and the parity that the card
promises. Nothing here runs a step: ``loops`` say what to evaluate next and ``inference`` evaluates it.
"""

import os

# On some CPUs MKL picks a matmul's kernel by the alignment of its operands: weights mapped from a file and their copy
# in memory then differ in the last bits of a product. AUTO keeps the fastest kernels that do not; it costs nothing
# measurable. MKL reads it at its first use, so it has to be here, before any plane computes something.
os.environ.setdefault("MKL_CBWR", "AUTO")
