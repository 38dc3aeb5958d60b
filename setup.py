"""Compile the kernels, and give the package the README as its description, with links that also
work away from the repository.

All else is in pyproject.toml.
"""

import re
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import CompileError

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


sys.path.insert(0, str(HERE))
from perseus_planner.solver import compiling  # noqa: E402  # of this folder, whatever is installed


class BuildKernels(Command):
    """Compile each folder of C sources: beside them in an editable installation."""

    editable_mode = False

    def initialize_options(self) -> None:
        """Take the folder of the build from the command `build`."""
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        """Take it."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Compile."""
        for folder, target in self._targets():
            try:
                compiling.compile_into(folder, target)
            except compiling.CompileError as error:
                raise CompileError(str(error)) from error

    def get_source_files(self) -> list[str]:
        """Return none, as the sources are data of the package."""
        return []

    def get_outputs(self) -> list[str]:
        """Return the files that the command makes."""
        return [str(target / compiling.library(folder).name) for folder, target in self._targets()]

    def get_output_mapping(self) -> dict[str, str]:
        """Return the same for an editable installation: all stand in this folder."""
        return {}

    def _targets(self) -> list[tuple[Path, Path]]:
        """Return each folder of sources, and where its library goes."""
        top = HERE if self.editable_mode else Path(str(self.build_lib))
        return [(folder, top / folder.relative_to(HERE)) for folder in compiling.folders()]


class Wheel(bdist_wheel):
    """One wheel for every Python, as ctypes loads the kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel."""
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    """A package that is not the same on every machine."""

    def has_ext_modules(self) -> bool:
        """Return that it is not."""
        return True


build.sub_commands.append(("build_kernels", None))
setup(
    distclass=Binary,
    cmdclass={"build_kernels": BuildKernels, "bdist_wheel": Wheel},
    long_description=described(),
    long_description_content_type="text/markdown",
)
