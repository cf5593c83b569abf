"""Package list: the rooms under `deepinfer/`, and two top-level folders installed below it.

`kernels/` becomes `deepinfer.kernels` and `csrc/` its data-only sibling `deepinfer.csrc`; static
metadata cannot both discover packages and remap two of them, so this list is computed.
"""

from setuptools import find_packages, setup

rooms = find_packages(include=["deepinfer", "deepinfer.*"])
kernels = ["deepinfer.kernels"] + [f"deepinfer.kernels.{p}" for p in find_packages("kernels")]
setup(
    packages=[*rooms, *kernels, "deepinfer.csrc"],
    package_dir={"deepinfer.kernels": "kernels", "deepinfer.csrc": "csrc"},
    package_data={
        "deepinfer": ["embedded/*"],
        "deepinfer.csrc": ["**/*.cpp", "**/*.cu", "**/*.cuh", "**/*.h", "**/*.hpp", "README.md"],
    },
)
