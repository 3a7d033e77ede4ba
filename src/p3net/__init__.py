"""P³Net: count crowds, and anything else marked by points, from a handful of annotated images.

>>> import p3net                                   # doctest: +SKIP
>>> model = p3net.load("runs/square")              # doctest: +SKIP
>>> model.count("square.jpg").count                # doctest: +SKIP
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p3net.checkpoint import load
    from p3net.counting import Counter
    from p3net.export import push_to_hub, save_pretrained
    from p3net.prediction import Prediction

__version__ = version("p3net")
__all__ = ["Counter", "Prediction", "__version__", "load", "push_to_hub", "save_pretrained"]


def __getattr__(name: str) -> object:
    """Import on first use, so that `import p3net` and `p3net --help` stay quick."""
    if name == "load":
        from p3net.checkpoint import load

        return load
    if name in ("push_to_hub", "save_pretrained"):
        from p3net import export

        return getattr(export, name)
    if name == "Counter":
        from p3net.counting import Counter

        return Counter
    if name == "Prediction":
        from p3net.prediction import Prediction

        return Prediction
    raise AttributeError(f"module 'p3net' has no attribute {name!r}")
