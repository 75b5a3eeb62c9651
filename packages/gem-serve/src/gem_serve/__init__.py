"""Will hold the ranking service, Solaris precomputation, representation stores and export.

It registers no plugin yet: installing it changes nothing that ``gem`` does.
"""

from importlib.metadata import version

__version__ = version("gem-serve")

__all__ = ["__version__"]
