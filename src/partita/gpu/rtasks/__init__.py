"""A model's small ops as tiles of persistent kernels: regions, and fallbacks between them."""
