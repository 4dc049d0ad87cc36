"""kvjax: key-value cache compression for JAX.

Small pure transforms over an immutable cache, each one a paper, composable, inside one `jit`.
"""

import lazy_loader

# Names are imported when they are first used, from where `__init__.pyi` says. The command line can
# then show its help, and take a Ctrl-C, before JAX is imported, which takes most of a second.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
