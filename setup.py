"""Package ddl. `kernels/` and `csrc/` stand at the top of the repository and install inside it."""

from setuptools import Extension, setup

# Called through ctypes: any C++17 compiler that takes GCC's options will do. Where there is none
# the installation goes on without it, and ddl.kernels takes Numba's loops.
native = Extension(
    "ddl.kernels._native",
    sources=[f"csrc/cpu/{name}.cpp" for name in ("native", "portable", "avx2", "avx512")],
    depends=[f"csrc/cpu/{name}" for name in ("loops.h", "block.inl", "loops.inl")],
    extra_compile_args=[
        "-O3",
        "-g0",
        "-std=c++17",
        "-ffp-contract=off",  # product and sum are rounded one after the other
        "-fvisibility=hidden",
        "-fno-exceptions",
        "-fno-rtti",
    ],
    language="c++",
    optional=True,
)

LINUX = "sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'"

setup(
    name="ddl",
    version="0.1.0",
    description="Data-parallel synchronous SGD with exact gradient sparsification",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    # A top-level package called `kernels` would shadow an unrelated, popular one.
    packages=[
        "ddl",
        "ddl.advise",
        "ddl.aggregation",
        "ddl.checkpoint",
        "ddl.collectives",
        "ddl.comm",
        "ddl.csrc",
        "ddl.ddp",
        "ddl.diagnostics",
        "ddl.kernels",
        "ddl.metrics",
        "ddl.perfmodel",
        "ddl.reduction",
        "ddl.workloads",
    ],
    package_dir={"ddl.kernels": "kernels", "ddl.csrc": "csrc"},
    package_data={"ddl": ["py.typed"], "ddl.csrc": ["*.cu", "*.cuh"]},
    ext_modules=[native],
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
            # Neither needs a GPU: NVRTC compiles, and CuPy shows its names.
            f"nvidia-cuda-nvrtc; {LINUX}",
            f"cupy-cuda13x>=14; {LINUX} and python_version < '3.15'",
        ],
    },
)
