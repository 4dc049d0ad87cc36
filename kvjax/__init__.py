"""kvjax: key-value cache compression for JAX.

Small pure transforms over an immutable cache, each one a paper, composable, inside one `jit`.
"""

import os

import lazy_loader

from kvjax.files import VERSION

__version__ = VERSION

# Names are imported when they are first used, from the modules that `__init__.pyi` lists. So the
# command line can show its help before JAX is imported, which takes most of a second.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# `models/` is installed as `kvjax.models`. In a clone it stands beside this package, and Python
# that is started there imports this file even where kvjax is installed.
if not os.path.isdir(os.path.join(__path__[0], "models")):
    __path__.append(os.path.dirname(__path__[0]))
