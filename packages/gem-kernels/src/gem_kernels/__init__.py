"""Will hold the fast backends of GEM's ops (processor and Triton) and MXFP8.

It registers no plugin yet: installing it changes nothing that ``gem`` does.
"""

from importlib.metadata import version

__version__ = version("gem-kernels")

__all__ = ["__version__"]
