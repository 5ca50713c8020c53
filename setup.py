"""Package ddl. `kernels/` and `csrc/` stand at the top of the repository and install inside it."""

from setuptools import setup

setup(
    name="ddl",
    version="0.1.0",
    description="Data-parallel synchronous SGD with exact gradient sparsification",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    # A top-level package called `kernels` would shadow an unrelated, popular one.
    packages=["ddl", "ddl.collectives", "ddl.comm", "ddl.csrc", "ddl.kernels"],
    package_dir={"ddl.kernels": "kernels", "ddl.csrc": "csrc"},
    package_data={"ddl": ["py.typed"], "ddl.csrc": ["*.cu", "*.cuh"]},
    install_requires=[
        "torch>=2.1",
        "numpy",
        "numba>=0.59",
        "mpi4py>=4",
        "tqdm",
    ],
    extras_require={
        "mpich": ["mpich"],
        "cuda12": ["cupy-cuda12x"],
        "cuda13": ["cupy-cuda13x"],
        "examples": ["torchvision", "scikit-learn", "tensorboard", "matplotlib"],
        "test": [
            "pytest",
            "hypothesis",
            "ruff",
            "mypy",
            "setuptools>=70.1",
            "mpich",
            "torchvision",
            "scikit-learn",
            "tensorboard",
            "matplotlib",
        ],
    },
)
