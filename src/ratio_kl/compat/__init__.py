"""Fronts for other packages: imported by name (docs/migrating.md).

Nothing here patches a class or a module, and importing ratio_kl imports none of it.
"""

from importlib.util import find_spec


def require(package: str, extra: str) -> None:
    """Raise ImportError naming the extra to install, unless `package` can be imported."""
    if find_spec(package) is None:
        raise ImportError(
            f"this front needs the package {package}, which is not installed: "
            f"pip install ratio-kl[{extra}]",
            name=package,
        )
