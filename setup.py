"""Give the package the README as its description, with links that also work away from the
repository.

All else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)]+)\)")


def described() -> str:
    """Return the README with the addresses of files in the repository, at the tag of this version;
    on the main branch before its release.
    """
    source = re.search(r'^Source = "(.+)"$', (HERE / "pyproject.toml").read_text(), re.MULTILINE)
    version = re.search(
        r'^__version__ = "(.+)"$',
        (HERE / "perseus_planner" / "base" / "__init__.py").read_text(),
        re.MULTILINE,
    )
    if source is None or version is None:
        raise ValueError("pyproject.toml has no Source, or base/__init__.py no __version__")

    reference = "main" if ".dev" in version[1] else f"v{version[1]}"

    def absolute(link: re.Match[str]) -> str:
        image, text, path = link.groups()
        return f"{image}{text}({source[1]}/{'raw' if image else 'blob'}/{reference}/{path})"

    return _LINK.sub(absolute, (HERE / "README.md").read_text())


setup(long_description=described(), long_description_content_type="text/markdown")
